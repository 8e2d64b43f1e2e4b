"""What a measured step of ``GradientMonitor`` costs, and what that is at the monitor's usual cadence.

``python -m benchmarks.monitor --models cnn mlp``. Times of a plain step with each preset, in a ``with`` block around
the user's backward and with ``monitor.backward``; log included. Contestants run in a new order each round; medians.
"""

import argparse
import copy
import inspect
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.cases import CASES, Batch
from benchmarks.measure import describe, time_steps
from gradbatch.analysis import GradientMonitor

USUAL = inspect.signature(GradientMonitor).parameters["every"].default


def contestants(plain: nn.Module, batch: Batch, directory: Path) -> dict[str, Callable[[], object]]:
    """A plain step, and measured ones that are warm."""
    steps: dict[str, Callable[[], object]] = {"plain": lambda: batch.losses(plain).mean().backward()}
    for preset in ("economy", "standard", "full"):
        model = copy.deepcopy(plain)
        monitor = GradientMonitor(model, directory / f"{preset}.jsonl", every=1, preset=preset)

        numbers = itertools.count()

        def around(
            model: nn.Module = model, monitor: GradientMonitor = monitor, numbers: Iterator[int] = numbers
        ) -> None:
            with monitor.step(next(numbers)):
                batch.losses(model).mean().backward()

        def losses(
            model: nn.Module = model, monitor: GradientMonitor = monitor, numbers: Iterator[int] = numbers
        ) -> None:
            monitor.backward(batch.losses(model), next(numbers))

        steps |= {f"{preset}, step": around, f"{preset}, backward": losses}
    for step in steps.values():
        for _ in range(3):
            step()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", default=9, type=int)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads, {options.repeats} rounds")
    for name in options.models:
        model, batch = CASES[name].build(torch.device("cpu"))
        with tempfile.TemporaryDirectory() as directory:
            steps = contestants(model, batch, Path(directory))
            times = time_steps(steps, torch.device("cpu"), options.repeats, budget=math.inf)
        seconds = describe(times.pop("plain").seconds)[0]
        ratios = {what: describe(timing.ratios)[0] for what, timing in times.items()}
        shares = "  ".join(
            f"{what} {ratio:.2f} ({(ratio - 1) / USUAL:.1%} every {USUAL})" for what, ratio in ratios.items()
        )
        print(f"{name}: plain {1e3 * seconds:.0f} ms; {shares}", flush=True)


if __name__ == "__main__":
    main()
