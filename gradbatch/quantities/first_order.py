"""Quantities that are linear or bilinear in the per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradbatch.factors import PerSampleGrad
from gradbatch.quantities.base import Quantity


@dataclass(frozen=True)
class BatchGrad(Quantity):
    """The per-sample gradients themselves, ``[N, *shape]``.

    Each is the gradient of that sample's own loss. (BackPACK's quantity of this name is scaled by ``1 / N`` where the
    loss is a mean.)

    Edge cases: an empty batch gives ``[0, *shape]``; a parameter that no loss depends on gives zeros.
    """

    name: ClassVar[str] = "grad_batch"

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[N, *shape]``, in at least float32."""
        # Contiguous also where the zeros of an unused parameter are expanded: the user may write into them.
        return grad.dense().contiguous()

    def reduce_into(self, grad: PerSampleGrad, out: Tensor | None) -> Tensor:
        """``[N, *shape]``, in the memory of ``out`` if it has that shape, dtype and device."""
        wanted = (grad.num_samples, *grad.shape), grad.dtype, grad.device
        if out is None or (tuple(out.shape), out.dtype, out.device) != wanted:
            return self.reduce(grad)
        usable = out.is_contiguous() and not out.requires_grad
        return grad.dense(out) if usable else self.reduce(grad)


@dataclass(frozen=True)
class BatchL2Grad(Quantity):
    """Squared Euclidean norm of each sample's gradient of the parameter, ``[N]``.

    ``results[BatchL2Grad].total()`` is the squared norm over all parameters. Take ``.sqrt()`` for the norm.

    Edge cases: never negative; a non-finite sample has a non-finite norm and leaves the others alone.

    References:
        Efficient Per-Example Gradient Computations (Goodfellow, 2015), https://arxiv.org/abs/1510.01799
    """

    name: ClassVar[str] = "batch_l2"
    additive: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = ("squared_norm",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[N]``."""
        return grad.squared_norm()


@dataclass(frozen=True)
class BatchDotGrad(Quantity):
    r"""Gram matrix of the per-sample gradients, :math:`\langle g_n, g_m \rangle`, ``[N, N]``.

    ``results[BatchDotGrad].total()`` is the Gram matrix over all parameters.
    """

    name: ClassVar[str] = "batch_dot"
    additive: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = ("gram",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[N, N]``, symmetric."""
        return grad.gram()


@dataclass(frozen=True, eq=False)
class WeightedSum(Quantity):
    r"""Weighted sums over samples, :math:`\sum_n w_n g_n`, ``[*shape]`` or ``[K, *shape]``.

    Args:
        weights: ``[N]``, or ``[K, N]`` for several sums at once.

    Raises:
        UsageError: their last axis is not ``N``.

    Edge cases: a weight of zero does not remove a non-finite gradient (``0 * nan`` is ``nan``).
    """

    weights: Tensor
    name: ClassVar[str] = "weighted_sum"
    operations: ClassVar[tuple[str, ...]] = ("weighted_sum",)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[*shape]``, or ``[K, *shape]``."""
        return grad.weighted_sum(self.weights)
