"""Numbers spelled in powers of two: the weights by which samples are told apart, and how exact arithmetic is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """What two gradients of one element may differ by for reasons of rounding.

    Args:
        digits: powers of two that one pass may use before values leave the dtype's range.
        relative: of the element.
        absolute: of the largest element of the same sample; sums that cancel are no better than that.
        peak: power of two that the largest gradient is brought to where it is not of that order; ``None``: only where
            it is so large that the tags could leave the range.
    """

    digits: int
    relative: float
    absolute: float
    peak: int | None = None


# Kernels block by alignment, so that even exact scalings may change the last digits.
PRECISION = {
    torch.float64: Precision(64, 1e-9, 1e-13),
    torch.float32: Precision(64, 1e-4, 1e-5),
    torch.bfloat16: Precision(64, 1e-2, 4e-3),
    # Of its small range, half lies among numbers with few digits.
    torch.float16: Precision(8, 1e-2, 1e-3, peak=4),
}


# Next to the smallest numbers of a dtype, those up to so many times its resolution are known badly.
RESOLVED = 2.0**12


def resolution(dtype: torch.dtype) -> float:
    """Absolute difference that rounding makes next to the smallest numbers of a dtype."""
    return 4 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Tags:
    """How the samples' numbers are spelled in powers of two.

    Args:
        exponents: ``[N]`` of each weighted pass: two of opposite direction for each digit of the numbers.
        numbers: of the samples, ``[N]``, all different.
        digits: base of the numbers.
    """

    exponents: list[Tensor]
    numbers: Tensor
    digits: int

    @classmethod
    def spread(cls, samples: int, digits: int) -> Tags:
        """Numbers spread over the range, so that couplings are amplified as far as possible.

        Shuffled, so that no regular coupling (a difference of neighbours) cancels in all passes.
        """
        count = 0
        while digits**count < samples:
            count += 1
        order = torch.randperm(samples, generator=torch.Generator("cpu").manual_seed(samples), device="cpu")
        numbers = rest = order * (digits**count - 1) // max(samples - 1, 1)
        exponents: list[Tensor] = []
        for _ in range(count):
            digit = (rest % digits).double()
            exponents += [digit, digits - 1 - digit]
            rest = rest // digits
        return cls(exponents, numbers, digits)

    def sample(self, digits: Sequence[Tensor]) -> Tensor:
        """The samples whose numbers are spelled so, lowest digit first; -1 where there is none."""
        number = sum((d * self.digits**i for i, d in enumerate(digits)), torch.zeros_like(digits[0]))
        known, order = self.numbers.to(number.device).sort()
        place = torch.searchsorted(known, number).clamp_max(len(known) - 1)
        return torch.where(known[place] == number, order[place], -1)
