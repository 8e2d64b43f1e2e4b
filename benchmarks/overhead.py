"""What an extended model costs that nobody asks anything of, and what a step costs beside its arithmetic.

``python -m benchmarks.overhead``. *Idle*: a plain step of an extended model, times that of one that is not.
*Book-keeping*: what ``gradbatch.backward`` does besides passes and rules (the walk, what is remembered, checks), in
shares of a plain step. *Norms*: a step with ``BatchL2Grad`` once the layouts are known, and one that measures them.
Contestants run in a new order each round; medians.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from benchmarks.cases import CASES
from benchmarks.measure import describe, time_steps
from benchmarks.models.images import resnet18
from benchmarks.models.transformers import RawTransformer
from gradbatch.capture import passes
from gradbatch.capture.memory import memory_of
from gradbatch.capture.samples import Samples
from gradbatch.capture.search import explain
from gradbatch.selection import select

Losses = Callable[[nn.Module], Tensor]


def cases() -> dict[str, tuple[nn.Module, Losses]]:
    """Models, with functions from them to one loss a sample."""
    images, ids = torch.randn(16, 3, 32, 32), torch.randint(1000, (8, 64))
    labels = torch.randint(10, (16,))

    def classify(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), labels, reduction="none")

    def predict(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(ids).mT, ids, reduction="none").mean(1)

    gpt, batch = CASES["gpt"].build(torch.device("cpu"))
    return {
        "ResNet-18, N=16": (resnet18(), classify),
        "transformer, 4 layers of 128, N=8": (RawTransformer(), predict),
        str(CASES["gpt"]): (gpt, batch.losses),
    }


def bookkeeping(model: nn.Module, losses: Losses, repeats: int) -> float:
    """Median seconds of a steady step's explanation, without its backward pass."""
    spent: list[float] = []
    differentiate, names = passes.differentiate, select(model, None).names
    in_passes = 0.0

    def timed(*args: object) -> object:
        nonlocal in_passes
        start = time.perf_counter()
        found = differentiate(*args)  # type: ignore[arg-type]
        in_passes += time.perf_counter() - start
        return found

    with patch.object(passes, "differentiate", timed):
        for _ in range(repeats):
            vector, in_passes = losses(model), 0.0
            start = time.perf_counter()
            explain([vector], lambda w: [w], Samples(len(vector)), names, memory=memory_of(model))
            spent.append(time.perf_counter() - start - in_passes)
    return statistics.median(spent)


def measure(plain: nn.Module, losses: Losses, repeats: int) -> str:
    """The line of one model."""
    idle, asked, first = (gradbatch.extend(copy.deepcopy(plain)) for _ in range(3))
    gradbatch.extend(first, remember=False)

    def norms(model: nn.Module) -> None:
        gradbatch.backward(model, losses(model), gradbatch.BatchL2Grad())

    for _ in range(3):
        norms(asked)
    contestants: dict[str, Callable[[], object]] = {
        "plain": lambda: losses(plain).mean().backward(),
        "idle": lambda: losses(idle).mean().backward(),
        "norms": lambda: norms(asked),
        "norms, first step": lambda: norms(first),
    }
    for step in contestants.values():
        step()
    times = time_steps(contestants, torch.device("cpu"), repeats, budget=math.inf)
    seconds = describe(times.pop("plain").seconds)[0]
    share = bookkeeping(asked, losses, repeats) / seconds
    ratios = "  ".join(f"{what} {describe(timing.ratios)[0]:.3f}" for what, timing in times.items())
    return f"plain {1e3 * seconds:.1f} ms; times of it: {ratios}  book-keeping {share:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", default=15, type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads, {options.repeats} rounds")
    for name, (model, losses) in cases().items():
        print(f"{name}: {measure(model, losses, options.repeats)}")


if __name__ == "__main__":
    main()
