"""Clipped sums of per-sample gradients in ``p.grad``: the part of private training that touches single samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from gradbatch.api import Reduction, backward, compute
from gradbatch.errors import UsageError
from gradbatch.plans.contractions import Planner
from gradbatch.quantities import ClippedSum
from gradbatch.quantities.clipping import Style
from gradbatch.requests import allows_coupling, check_losses, check_request
from gradbatch.selection import select

Coupling = Literal["refuse", "allow"]


class Clipped:
    """What was clipped, and by how much: private numbers, for debugging or with noise of their own.

    Attributes:
        norms: of the samples' gradients before clipping, ``[N]``, or ``[N, K]`` for ``K`` groups of parameters.
        factors: what they were multiplied by, of the same shape; zero where the norm is not finite.
        groups: names of the groups: patterns, or paths of layers; one, ``""``, if there are no groups.
        bounds: the bound of each group.
        non_finite: how many samples were left out because their norm is not finite.
    """

    norms: Tensor
    factors: Tensor
    groups: tuple[str, ...]
    bounds: tuple[float, ...]
    non_finite: int

    def fill(self, quantity: ClippedSum, loss_scale: float = 1.0) -> Clipped:
        """Take over what a backward pass found; done once, by gradbatch."""
        assert quantity.norms is not None and quantity.factors is not None
        self.norms, self.factors = quantity.norms / loss_scale, quantity.factors
        self.groups, self.non_finite = quantity.groups, quantity.non_finite
        self.bounds = tuple(bound / loss_scale for bound in quantity.bounds)
        return self

    def __getattr__(self, name: str) -> object:
        if name in Clipped.__annotations__:
            raise UsageError("what was clipped is known when the with block ends; read it there")
        raise AttributeError(name)

    def __repr__(self) -> str:
        if "norms" not in vars(self):
            return "Clipped(not computed yet)"
        cut = int((self.factors < 1).reshape(len(self.factors), len(self.groups)).any(1).sum())
        return f"Clipped({len(self.norms)} samples, {cut} of them cut, {self.non_finite} not finite)"


def clipped_gradients(
    model: nn.Module,
    losses: Tensor,
    max_norm: float | Mapping[str, float] = 1.0,
    *,
    per_layer: bool = False,
    style: Style = "hard",
    stability: float = 0.01,
    parameters: str | Iterable[str] | None = None,
    sample_ids: Tensor | None = None,
    loss_scale: float | None = None,
    retain_graph: bool = False,
    samples_coupled: Coupling = "refuse",
    planner: Planner | None = None,
) -> Clipped:
    r"""Add the sum of the clipped per-sample gradients to ``p.grad``.

    .. math:: \sum_n \min\left(1, \frac{C}{\lVert g_n \rVert}\right) g_n

    A sample more or less moves this sum, over all parameters together, by at most ``max_norm`` (the root of the sum of
    the squared bounds, with groups), up to the rounding of a norm and a product in the gradients' dtype, which is at
    least float32; where a gradient is far smaller than the terms that it is added up from, up to 2⁻¹⁰ of it. It is a
    sum, not a mean, and there is no noise in it: :func:`make_private` adds that.

    Args:
        model: an extended model.
        losses: ``[N]``, one a sample; an empty tensor needs no graph.
        max_norm, per_layer, style, stability: as for :class:`~gradbatch.ClippedSum`.
        parameters: name pattern or patterns of the parameters; the norm goes over these alone, and no other parameter's
            ``p.grad`` is touched. By default, all that are trainable.
        sample_ids: as for :func:`gradbatch.backward`: with the user of each loss it is users that are clipped.
        loss_scale: gradients are computed of ``loss_scale * losses``; norms, bounds and sums are those of ``losses``.
            By default a power of two, at least 1, that brings the smallest bound to 1: if the square of a norm around
            the bound underflows, the norm is found too small. In float16, more may be needed.
        retain_graph: keep the graph for a further backward pass.
        samples_coupled, planner: as for :func:`gradbatch.backward`. ``"allow"`` bounds nothing if samples are coupled.

    Returns:
        Norms and factors of the samples.

    Raises:
        GradBatchError: as :func:`gradbatch.backward`; then ``p.grad`` is as it was.

    Edge cases: no samples: the sum is zero. A sample whose gradient is not finite adds nothing and is counted.
    ``p.grad`` is in the parameter's dtype: where that is half precision, sums over micro-batches are rounded each time.

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch import privacy
        >>> model = gradbatch.extend(torch.nn.Linear(2, 1, bias=False))
        >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).squeeze(1)
        >>> privacy.clipped_gradients(model, losses, max_norm=1.0)
        Clipped(2 samples, 1 of them cut, 0 not finite)
        >>> model.weight.grad
        tensor([[0.6000, 1.3000]])

    References:
        Deep Learning with Differential Privacy (Abadi et al., 2016), https://arxiv.org/abs/1607.00133
    """
    quantity = ClippedSum(max_norm, per_layer, style, stability)
    clipped, sums = clipped_sums(
        model, losses, quantity, parameters, sample_ids, loss_scale, retain_graph, samples_coupled, planner
    )
    for name, parameter in model.named_parameters():
        if name in sums:
            _add(parameter, sums[name])
    return clipped


@contextmanager
def clipping(
    model: nn.Module,
    max_norm: float | Mapping[str, float] = 1.0,
    *,
    loss_reduction: Reduction | None = None,
    per_layer: bool = False,
    style: Style = "hard",
    stability: float = 0.01,
    parameters: str | Iterable[str] | None = None,
    sample_ids: Tensor | None = None,
    samples_coupled: Coupling = "refuse",
    planner: Planner | None = None,
) -> Iterator[Clipped]:
    """Let your own ``loss.backward()`` leave the clipped sum in ``p.grad``.

    Inside, call the model and run the backward pass of a scalar loss, also of several micro-batches one after another.
    When the block is left, ``p.grad`` is what it was before, plus the sum of the clipped gradients; what the backward
    pass itself put there is gone. :func:`clipped_gradients` is faster, checks the losses too, and should be preferred.

    Args:
        model: an extended model.
        max_norm, per_layer, style, stability, parameters: as for :func:`clipped_gradients`. Where ``parameters`` leaves
            some out, these get their ordinary gradient, unclipped.
        loss_reduction, sample_ids, samples_coupled, planner: as for :func:`gradbatch.compute`.

    Yields:
        Norms and factors, to be read once the block is left.

    Raises:
        GradBatchError: as :func:`gradbatch.compute`. Then, and if the block itself raises, ``p.grad`` is as before it.

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch import privacy
        >>> model = gradbatch.extend(torch.nn.Linear(2, 1, bias=False))
        >>> with privacy.clipping(model, max_norm=1.0, loss_reduction="mean") as clipped:
        ...     model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).mean().backward()
        >>> model.weight.grad, clipped.norms
        (tensor([[0.6000, 1.3000]]), tensor([5.0000, 0.5000]))
    """
    quantity = ClippedSum(max_norm, per_layer, style, stability)
    parameters = parameters if parameters is None or isinstance(parameters, str) else list(parameters)
    check_request(model, [quantity])
    chosen = select(model, parameters, allows_coupling(samples_coupled)).aliases
    before = {parameter: parameter.grad for parameter in chosen}
    clipped = Clipped()
    try:
        for parameter in before:
            parameter.grad = None
        with compute(
            model,
            quantity,
            loss_reduction=loss_reduction,
            parameters=parameters,
            sample_ids=sample_ids,
            samples_coupled=samples_coupled,
            planner=planner,
        ) as results:
            yield clipped
        sums = {parameter: results[ClippedSum][parameter] for parameter in before}
    finally:
        for parameter, grad in before.items():
            parameter.grad = grad
    for parameter, total in sums.items():
        _add(parameter, total)
    clipped.fill(_quantity_of(results[ClippedSum].quantity))


def clipped_sums(
    model: nn.Module,
    losses: Tensor,
    quantity: ClippedSum,
    parameters: str | Iterable[str] | None = None,
    sample_ids: Tensor | None = None,
    loss_scale: float | None = None,
    retain_graph: bool = False,
    samples_coupled: Coupling = "refuse",
    planner: Planner | None = None,
) -> tuple[Clipped, dict[str, Tensor]]:
    """The sums of :func:`clipped_gradients` by name, in at least float32; ``p.grad`` is left alone."""
    if loss_scale is None:
        loss_scale = _scale_for(quantity)
    if not 0 < loss_scale < math.inf:
        raise UsageError(f"loss_scale is {loss_scale}; it is a positive number, best a power of two")
    if isinstance(losses, Tensor) and losses.shape == (0,):
        return _nothing(model, losses, quantity, parameters, allows_coupling(samples_coupled))
    check_losses(losses)
    if loss_scale != 1:
        quantity, losses = _scaled(quantity, loss_scale), losses * loss_scale
    results = backward(
        model,
        losses,
        quantity,
        parameters=parameters,
        retain_graph=retain_graph,
        sample_ids=sample_ids,
        samples_coupled=samples_coupled,
        planner=planner,
    )[ClippedSum]
    sums = dict(results)
    if loss_scale != 1:
        torch._foreach_div_(list(sums.values()), loss_scale)
    return Clipped().fill(_quantity_of(results.quantity), loss_scale), sums


def _nothing(
    model: nn.Module,
    losses: Tensor,
    quantity: ClippedSum,
    parameters: str | Iterable[str] | None,
    coupled: bool,
) -> tuple[Clipped, dict[str, Tensor]]:
    # An empty draw is a step like any other, and not every model takes an empty batch.
    check_request(model, [quantity])
    selection = select(model, parameters, coupled)
    clipped, grouped = Clipped(), quantity.grouped(selection.names.parameters.values())
    clipped.groups, clipped.bounds, clipped.non_finite = grouped.groups, grouped.bounds, 0
    groups = len(grouped.groups)
    clipped.norms = clipped.factors = losses.detach().new_zeros((0,) if groups == 1 else (0, groups))
    names = selection.names.parameters
    zeros = {
        n: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p, n in names.items()
    }
    return clipped, zeros


def _scale_for(quantity: ClippedSum) -> float:
    bound = quantity.max_norm
    smallest = min(bound.values()) if isinstance(bound, Mapping) else bound
    return 2.0 ** max(0, -math.floor(math.log2(smallest)))


def _scaled(quantity: ClippedSum, scale: float) -> ClippedSum:
    bound = quantity.max_norm
    scaled = {k: v * scale for k, v in bound.items()} if isinstance(bound, Mapping) else bound * scale
    return replace(quantity, max_norm=scaled, stability=quantity.stability * scale)


def _quantity_of(quantity: object) -> ClippedSum:
    assert isinstance(quantity, ClippedSum)
    return quantity


@torch.no_grad()
def _add(parameter: nn.Parameter, total: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = total.to(parameter.dtype)
    else:
        parameter.grad += total.to(parameter.dtype)
