"""Quantities that statistics of gradients are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradbatch.factors import PerSampleGrad
from gradbatch.quantities import Quantity


@dataclass(frozen=True)
class SumL2Grad(Quantity):
    r"""Squared norm of the summed gradient, :math:`\lVert \sum_n g_n \rVert^2`, ``[]``.

    Divide by ``N²`` for the squared norm of the batch's mean gradient. ``results[SumL2Grad].total()`` is that over all
    parameters.

    Edge cases: 0 for an empty batch; non-finite where a sample is.
    """

    name: ClassVar[str] = "sum_l2"
    additive: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = ("sum",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[]``."""
        return grad.sum().square().sum()


@dataclass(frozen=True)
class BatchDotSum(Quantity):
    r"""Dot product of each sample's gradient with the batch's sum, :math:`\langle g_n, \sum_m g_m \rangle`, ``[N]``.

    ``results[BatchDotSum].total()`` is that over all parameters; its sum over samples is :class:`SumL2Grad`.

    Edge cases: a non-finite sample makes all of them non-finite: it is in the sum.
    """

    name: ClassVar[str] = "batch_dot_sum"
    additive: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = ("sum", "dot")

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[N]``."""
        return grad.dot(grad.sum())
