"""Second moments of the per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradbatch.factors import PerSampleGrad
from gradbatch.quantities.base import Quantity


@dataclass(frozen=True)
class SumGradSquared(Quantity):
    r"""Sum of squared per-sample gradients, elementwise: :math:`\sum_n g_n^2`, ``[*shape]``."""

    name: ClassVar[str] = "sum_grad_squared"
    operations: ClassVar[tuple[str, ...]] = ("sum_of_squares",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[*shape]``."""
        return grad.sum_of_squares()


@dataclass(frozen=True)
class Variance(Quantity):
    r"""Elementwise variance of the per-sample gradients over the batch, ``[*shape]``.

    .. math:: \frac{1}{N - \delta} \sum_n (g_n - \bar g)^2, \qquad \bar g = \frac{1}{N} \sum_n g_n

    Summed from the deviations themselves; the difference of two moments would cancel, and go negative.

    Args:
        unbiased: divide by ``N - 1`` (the estimate of the distribution's variance) rather than by ``N`` (the variance
            of this batch).

    Edge cases: never negative. NaN where nothing is defined: an empty batch, and one sample with ``unbiased=True``.
    """

    unbiased: bool = False
    name: ClassVar[str] = "variance"
    operations: ClassVar[tuple[str, ...]] = ("moments",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[*shape]``."""
        degrees = grad.num_samples - self.unbiased
        if degrees <= 0:
            return torch.full(grad.shape, torch.nan, dtype=grad.dtype, device=grad.device)
        return grad.squared_deviations().div_(degrees)
