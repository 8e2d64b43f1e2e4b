"""Sums of gradients that are cut to a norm first, as differentially private training needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.quantities.base import Quantity


@dataclass(frozen=True)
class ClippedSum(Quantity):
    r"""Sum over samples of gradients scaled down to a norm of at most ``max_norm``, ``[*shape]``.

    .. math:: \sum_n \min\left(1, \frac{C}{\lVert g_n \rVert}\right) g_n

    The norm is that of all parameters together for which quantities are computed. Norms and sum come from one backward
    pass, and neither ordinary gradients nor all per-sample gradients are held. After it,
    ``results[ClippedSum].quantity`` has ``norms`` and ``factors``, ``[N]`` each.

    Args:
        max_norm: ``C``, positive; in the unit of the losses over that of the parameters.

    Raises:
        UsageError: ``max_norm`` is not positive.

    Edge cases: a sample whose norm is not finite (or too large to be squared in its dtype) has a factor of zero and
    adds nothing at all, not even a NaN; a sample without gradients has a factor of one.

    References:
        Deep Learning with Differential Privacy (Abadi et al., 2016), https://arxiv.org/abs/1607.00133

    Example:
        >>> import torch, gradbatch
        >>> model = gradbatch.extend(torch.nn.Linear(2, 1, bias=False))
        >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).squeeze(1)
        >>> clipped = gradbatch.backward(model, losses, gradbatch.ClippedSum(max_norm=1.0))[gradbatch.ClippedSum]
        >>> clipped["weight"], clipped.quantity.norms
        (tensor([[0.6000, 1.3000]]), tensor([5.0000, 0.5000]))
    """

    max_norm: float
    norms: Tensor | None = field(default=None, init=False, compare=False, repr=False)
    factors: Tensor | None = field(default=None, init=False, compare=False, repr=False)
    name: ClassVar[str] = "clipped_sum"
    operations: ClassVar[tuple[str, ...]] = ("squared_norm", "weighted_sum")
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise UsageError(f"max_norm is {self.max_norm}; it is a positive number")

    def prepare(self, grads: Mapping[str, PerSampleGrad]) -> ClippedSum:
        """The same, with the factor of each sample."""
        first, *rest = (grad.squared_norm() for grad in grads.values())
        norms = sum((squares.to(first.device) for squares in rest), start=first).sqrt()
        factors = (self.max_norm / norms).clamp(max=1.0)
        prepared = replace(self)
        object.__setattr__(prepared, "norms", norms)
        object.__setattr__(prepared, "factors", torch.where(norms.isfinite(), factors, 0))
        return prepared

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[*shape]``; of a parameter alone, if nothing was prepared."""
        if self.factors is None:
            return self.prepare({"": grad}).reduce(grad)
        factors = self.factors.to(grad.device)
        kept = factors > 0
        if not bool(kept.all()):  # zero times NaN would be NaN
            grad, factors = grad.select(kept), factors[kept]
        return grad.weighted_sum(factors)
