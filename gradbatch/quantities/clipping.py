"""Sums of gradients that are cut to a norm first, as differentially private training needs them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.factors.cancellation import capped_sum, term_norms
from gradbatch.quantities.base import Quantity

Style = Literal["hard", "normalise"]

# How far rounding may let a sample exceed its bound in a parameter, in units of it: where a sample's terms, scaled, are
# so large that it could be more, they are added up first.
_EXCESS = 2.0**-12


@dataclass(frozen=True)
class ClippedSum(Quantity):
    r"""Sum over samples of gradients scaled down to a norm of at most ``max_norm``, ``[*shape]``.

    .. math:: \sum_n \min\left(1, \frac{C}{\lVert g_n \rVert}\right) g_n

    The norm is that of all parameters together for which quantities are computed, or of each group of them. Norms and
    sum come from one backward pass, and neither ordinary gradients nor all per-sample gradients are held. After it,
    ``results[ClippedSum].quantity`` has ``norms`` and ``factors``, ``[N]`` each, or ``[N, K]`` for ``K`` groups, the
    groups' names in ``groups``, their bounds in ``bounds``, and in ``non_finite`` the number of samples left out.

    Args:
        max_norm: ``C``, positive; in the unit of the losses over that of the parameters. A mapping from name patterns
            to bounds (``{"encoder.*": 0.5, "*": 1.0}``) makes a group of the parameters that match each pattern and
            none before it.
        per_layer: a group for each module with parameters of its own, each with the bound ``C / sqrt(K)``; a mapping
            then has each module's bound by its path.
        style: ``"hard"``; or ``"normalise"``: the factor is ``C / (norm + stability)``, always.
        stability: what is added to the norm when it is normalised, positive.

    Raises:
        UsageError: a bound or ``stability`` is not positive and finite; another style; a parameter that matches no
            pattern, or a pattern that no parameter is left for.

    Edge cases: a sample whose norm is not finite (or too large to be squared in its dtype), in whatever group, has
    factors of zero and adds nothing at all, not even a NaN; a sample without gradients has a factor of one. Of a sample
    whose terms are huge and cancel, what rounding leaves is cut to the norm that was found.

    References:
        Deep Learning with Differential Privacy (Abadi et al., 2016), https://arxiv.org/abs/1607.00133;
        Learning Differentially Private Recurrent Language Models (McMahan et al., 2018), groups,
        https://arxiv.org/abs/1710.06963;
        Automatic Clipping (Bu, Wang, Zha, Karypis, 2022), normalisation, https://arxiv.org/abs/2206.07136

    Example:
        >>> import torch, gradbatch
        >>> model = gradbatch.extend(torch.nn.Linear(2, 1, bias=False))
        >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).squeeze(1)
        >>> clipped = gradbatch.backward(model, losses, gradbatch.ClippedSum(max_norm=1.0))[gradbatch.ClippedSum]
        >>> clipped["weight"], clipped.quantity.norms
        (tensor([[0.6000, 1.3000]]), tensor([5.0000, 0.5000]))
    """

    max_norm: float | Mapping[str, float] = field(hash=False)  # a mapping has no hash
    per_layer: bool = False
    style: Style = "hard"
    stability: float = 0.01
    norms: Tensor | None = field(default=None, init=False, compare=False, repr=False)
    factors: Tensor | None = field(default=None, init=False, compare=False, repr=False)
    groups: tuple[str, ...] = field(default=(), init=False, compare=False, repr=False)
    bounds: tuple[float, ...] = field(default=(), init=False, compare=False, repr=False)
    non_finite: int = field(default=0, init=False, compare=False, repr=False)
    _group_of: Mapping[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    # Samples whose terms cancel in a parameter: which, and the norms that were found of them there.
    _cancelling: Mapping[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _apart: tuple[Tensor, Tensor] | None = field(default=None, init=False, compare=False, repr=False)
    name: ClassVar[str] = "clipped_sum"
    operations: ClassVar[tuple[str, ...]] = ("squared_norm", "weighted_sum")
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        bounds = self.max_norm if isinstance(self.max_norm, Mapping) else {"": self.max_norm}
        for pattern, bound in bounds.items():
            if not isinstance(bound, (int, float)) or not 0 < bound < math.inf:
                of_group = f" of {pattern!r}" if pattern else ""
                raise UsageError(f"max_norm{of_group} is {bound!r}; it is a positive number")
        if not bounds:
            raise UsageError("max_norm is an empty mapping; it has a bound for each group of parameters")
        if self.style not in ("hard", "normalise"):
            raise UsageError(f'style is {self.style!r}; it is "hard" or "normalise"')
        if not 0 < self.stability < math.inf:
            raise UsageError(f"stability is {self.stability}; it is a positive number")

    def grouped(self, names: Iterable[str]) -> ClippedSum:
        """The same, with ``groups`` and ``bounds`` of the parameters of these names (:class:`UsageError`)."""
        group_of = {name: self._group(name) for name in names}
        groups = tuple(dict.fromkeys(group_of.values()))
        if isinstance(self.max_norm, Mapping):
            for group in self.max_norm.keys() - set(groups):
                raise UsageError(f"max_norm: no parameter is left for {group!r}")
            groups, bounds = tuple(self.max_norm), tuple(map(float, self.max_norm.values()))
        else:
            bounds = (self.max_norm / math.sqrt(len(groups)),) * len(groups)
        return self._with(
            groups=groups,
            bounds=bounds,
            _group_of={name: groups.index(group) for name, group in group_of.items()},
        )

    @property
    def sensitivity(self) -> float:
        """The most by which one sample moves the sum of all parameters: the root of the sum of the squared bounds."""
        bounds = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        return math.hypot(*bounds)

    def prepare(self, grads: Mapping[str, PerSampleGrad]) -> ClippedSum:
        """The same, with the factors of each sample."""
        grouped = self.grouped(grads)
        device = next(iter(grads.values())).device
        each = torch.stack([grad.squared_norm().to(device) for grad in grads.values()], dim=1)
        columns: list[list[int]] = [[] for _ in grouped.groups]
        for column, name in enumerate(grads):
            columns[grouped._group_of[name]].append(column)
        flat = len(columns) == 1
        squares = [each.sum(1)] if flat else [each[:, own].sum(1) for own in columns]
        norms = torch.stack(squares, dim=1).sqrt_()
        bounds = norms.new_tensor(grouped.bounds)
        hard = self.style == "hard"
        factors = (bounds / norms).clamp(max=1.0) if hard else bounds / (norms + self.stability)
        finite = norms.isfinite().all(1)
        factors = torch.where(finite[:, None], factors, 0)
        return grouped._with(
            norms=norms[:, 0] if flat else norms,
            factors=factors[:, 0] if flat else factors,
            non_finite=len(finite) - int(finite.sum()),
            _cancelling=grouped._found_cancelling(grads, each, factors, bounds),
        )

    def of(self, name: str) -> ClippedSum:
        """With the factors of the parameter's group alone."""
        apart = self._cancelling.get(name)
        if self.factors is None or (self.factors.dim() == 1 and apart is None):
            return self
        factors = self.factors if self.factors.dim() == 1 else self.factors[:, self._group_of[name]]
        return self._with(factors=factors, _apart=apart)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[*shape]``; of a parameter alone, if nothing was prepared."""
        if self.factors is None:
            prepared = self.prepare({"": grad})
            return prepared.of("").reduce(grad)
        factors = self.factors.to(grad.device)
        if self._apart is None and not self.non_finite:
            return grad.weighted_sum(factors)
        kept = factors > 0  # zero times NaN would be NaN
        if self._apart is None:
            return grad.select(kept).weighted_sum(factors[kept])
        index, norms = (found.to(grad.device) for found in self._apart)
        kept[index] = False
        total = grad.select(kept).weighted_sum(factors[kept])
        return total + capped_sum(grad.select(index), factors[index], norms)

    def _found_cancelling(
        self, grads: Mapping[str, PerSampleGrad], squares: Tensor, factors: Tensor, bounds: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Samples of which a sum could get more than they may, and the norms found of them, by parameter."""
        # What is one term is scaled to its bound, and cannot get more.
        found = {name: terms for name, grad in grads.items() if (terms := term_norms(grad)) is not None}
        if not found:
            return {}
        group_of = torch.tensor([self._group_of[name] for name in found], device=squares.device)
        terms = torch.stack([each.to(squares.device) for each in found.values()], dim=1)
        allowed = terms.new_tensor([_EXCESS / torch.finfo(each.dtype).eps for each in found.values()])
        factors = factors[:, group_of]
        loud = (factors > 0) & ~(factors * terms <= allowed * bounds[group_of])
        if not loud.any():
            return {}
        columns = {
            name: (loud[:, i].nonzero()[:, 0], squares[:, [*grads].index(name)])
            for i, name in enumerate(found)
        }
        return {
            name: (where, square[where].sqrt()) for name, (where, square) in columns.items() if len(where)
        }

    def _group(self, name: str) -> str:
        layer = name.rpartition(".")[0]
        if not isinstance(self.max_norm, Mapping):
            return layer if self.per_layer else ""
        if self.per_layer:
            found = layer if layer in self.max_norm else None
        else:
            found = next((pattern for pattern in self.max_norm if fnmatchcase(name, pattern)), None)
        if found is None:
            rest = "every layer needs one" if self.per_layer else 'the pattern "*", last, takes the rest'
            raise UsageError(f"max_norm has no bound for {name}; {rest}")
        return found

    def _with(self, **found: object) -> ClippedSum:
        twin = copy.copy(self)
        vars(twin).update(found)
        return twin
