"""Where the time of one step of gradbatch goes: forward, book-keeping, passes, rules, reduction."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

import gradbatch
from benchmarks.cases import CASES, Batch
from benchmarks.contestants import OURS, PLAIN
from benchmarks.contestants.of_gradbatch import ASKED
from benchmarks.measure import seconds_of
from gradbatch.capture import checkpoints, direct
from gradbatch.capture.evaluate import Totals

SHOWN = 12


class Clock:
    """Seconds by phase; what runs inside a phase and has one of its own is not counted twice.

    Args:
        device: waited for at both ends of a phase, so that on CUDA its work counts where it was asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device, self._inner = device, [0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as this phase's."""
        self._wait()
        self._inner.append(0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            spent = time.perf_counter() - started
            self.seconds[name] += spent - self._inner.pop()
            self._inner[-1] += spent

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted as this phase's."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def watched(clock: Clock, quantity: gradbatch.Quantity) -> Iterator[dict[str, float]]:
    """Time the parts of ``gradbatch.backward``; yields the seconds of reduction by structure and shape."""
    by_shape: defaultdict[str, float] = defaultdict(float)
    reduce = type(quantity).reduce_into

    def timed_reduce(
        self: gradbatch.Quantity, grad: gradbatch.PerSampleGrad, out: torch.Tensor | None
    ) -> torch.Tensor:
        before = clock.seconds["reduction"]
        with clock.phase("reduction"):
            found = reduce(self, grad, out)
        by_shape[f"{grad!r}"[:90]] += clock.seconds["reduction"] - before
        return found

    with ExitStack() as stack:
        for owner, name, phase in (
            (Batch, "losses", "forward"),
            (direct, "explain", "book-keeping"),
            (checkpoints, "differentiate", "backward pass"),
            (Totals, "add_call", "rules"),
            (Totals, "add_node", "rules"),
            (Totals, "pull_back", "rules"),
            (gradbatch.PerSampleGrad, "keep", "keeping"),
        ):
            stack.enter_context(patch.object(owner, name, clock.timed(phase, getattr(owner, name))))
        if quantity.joint:
            prepare = clock.timed("norms first", type(quantity).prepare)
            stack.enter_context(patch.object(type(quantity), "prepare", prepare))
        stack.enter_context(patch.object(type(quantity), "reduce_into", timed_reduce))
        yield by_shape


def profile(case: str, quantity: str, device: torch.device, repeats: int) -> str:
    """Milliseconds of a steady step by phase, and the reductions that take longest.

    Args:
        case: key in ``CASES``.
        quantity: what is computed.
        device: where.
        repeats: steps, after the first ones.
    """
    model, batch = CASES[case].build(device)
    plain = PLAIN.prepare(copy.deepcopy(model), batch, quantity)
    step, clock = OURS.prepare(model, batch, quantity), Clock(device)
    for _ in range(OURS.warm_up):
        step()
    plain()
    whole, untimed = 0.0, [(seconds_of(step, device), seconds_of(plain, device)) for _ in range(repeats)]
    with watched(clock, ASKED[quantity]) as by_shape:
        for _ in range(repeats):
            whole += seconds_of(step, device)
    clock.seconds["the rest"] = whole - sum(clock.seconds.values())
    ours, theirs = (sorted(times)[repeats // 2] for times in zip(*untimed, strict=True))
    lines = [f"{CASES[case]}: {quantity}, {torch.get_num_threads()} threads, {repeats} steps"]
    lines.append(f"a step {1e3 * ours:.2f} ms, a plain one {1e3 * theirs:.2f} ms; watched, on average:")
    for name, spent in [*clock.seconds.items(), ("together", whole)]:
        lines.append(
            f"  {name:15s} {1e3 * spent / repeats:9.2f} ms  {spent / repeats / theirs:6.2f} plain steps"
        )
    lines.append("reductions that take longest:")
    for name, spent in sorted(by_shape.items(), key=lambda item: -item[1])[:SHOWN]:
        lines.append(f"  {1e3 * spent / repeats:9.2f} ms  {name}")
    return "\n".join(lines)
