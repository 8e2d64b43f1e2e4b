"""The measured choice of a plan: every candidate is timed once on the operands at hand, and the fastest is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradbatch.plans.choice import Plan
from gradbatch.plans.convolutions import Patches
from gradbatch.plans.costs import Sizes
from gradbatch.plans.slabs import Operand

Result = TypeVar("Result")

# A candidate that takes this much longer than the fastest so far is not run a second time.
_HOPELESS = 2.0


class Timings:
    """Which plan was the fastest, and how long it took, by what was evaluated.

    Attributes:
        best: plan and seconds, by operation, sizes and device.
    """

    def __init__(self) -> None:
        self.best: dict[Hashable, tuple[Plan, float]] = {}

    def run(
        self, key: Hashable, plans: Sequence[Plan], evaluate: Callable[[Plan], Result], device: torch.device
    ) -> Result:
        """Evaluate by the fastest plan; where it is not known yet, by all of them.

        Args:
            key: what the choice depends on.
            plans: candidates, the best guess first.
            evaluate: runs one.
            device: that it runs on.
        """
        if key in self.best:
            return evaluate(self.best[key][0])
        least = float("inf")
        result: Result | None = None
        for plan in plans:
            seconds = float("inf")
            for _ in range(3):  # the first one fetches memory and compiles
                start = _now(device)
                value = evaluate(plan)
                seconds = min(seconds, _now(device) - start)
                if seconds > _HOPELESS * least:
                    break
            if seconds < least:
                least, result = seconds, value
                self.best[key] = plan, seconds
        assert result is not None
        return result


def key_of(operation: str, sizes: Sizes, left: Tensor, right: Operand) -> Hashable:
    """What the fastest plan depends on."""
    image = (right.window, right.source.shape, right.positions) if isinstance(right, Patches) else None
    return operation, sizes, image, left.dtype, left.device


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
