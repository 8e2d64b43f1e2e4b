"""Quantities that statistics of gradients are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
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
        return grad.compact().sum().square().sum()


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
        grad = grad.compact()
        return grad.dot(grad.sum())


@dataclass(frozen=True)
class EvidenceParts(Quantity):
    r"""What :func:`~gradbatch.analysis.stopping_evidence` is made of, ``[2]`` in float64.

    The sum over elements of :math:`\bar g_k^2 / \hat\sigma_k^2`, and over how many elements; both add up over
    parameters. The evidence is one minus ``N`` times their ratio. One tensor of the parameter's size at a time is made.

    Edge cases: elements without variance and gradient (dead units, or those whose squares are below what the dtype
    holds) are left out of both; infinite for those without variance but with a gradient. NaN for fewer than two
    samples.
    """

    name: ClassVar[str] = "evidence_parts"
    additive: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = ("moments",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[2]``."""
        count = grad.num_samples
        if count < 2:
            return torch.tensor([torch.nan, 0], dtype=torch.double, device=grad.device)
        mean, squares = grad.compact().moments()
        variance = squares / (count - 1)
        # Of squares: those of gradients below 1e-23 are zero in float32, and a ratio of zeros would spoil the sum.
        square = mean.square()
        alive = (square != 0) | (variance != 0)
        ratios = torch.where(alive, square / variance, 0)
        return torch.stack([ratios.sum(dtype=torch.double), alive.sum(dtype=torch.double)])


@dataclass(frozen=True)
class FirstGram(Quantity):
    r"""Dot products between the gradients of the batch's first samples, ``[M, M]`` with ``M`` at most ``most``.

    :class:`~gradbatch.BatchDotGrad` of fewer samples, whose cost does not grow with the square of the batch.
    """

    most: int = 32
    name: ClassVar[str] = "first_gram"
    additive: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = ("gram",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[M, M]``."""
        return grad.select(torch.arange(min(self.most, grad.num_samples), device=grad.device)).gram()
