r"""Ownership: which sample does each element of an output gradient belong to?

Not guessed from shapes, but measured. The gradients are taken with the samples' losses weighted by 1, and again
weighted by powers of two that spell the sample's number:

.. math::
    \frac{\partial \sum_n 2^{d_n} \ell_n}{\partial y_i} \Big/ \frac{\partial \sum_n \ell_n}{\partial y_i}
    = 2^{d_{n(i)}}

for an element :math:`y_i` that belongs to sample :math:`n(i)` alone; powers of two pass through floating-point
arithmetic without rounding. Every regular layout (a batch axis anywhere, rows in either order) is tried against that
ratio, element by element. Where none fits, the element is shared by several samples or they lie irregularly: refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbatch.rules import SampleLayout

Differentiate = Callable[[Tensor], Sequence[Sequence[Tensor | None]]]
"""From weights of the losses ``[N]`` to the gradients of each call's outputs, in the outputs' shapes."""


@dataclass(frozen=True)
class Site:
    """The outputs of one call, as far as ownership is concerned.

    Args:
        lead: leading axes on which the samples may lie, for each output; ``None``: they must lie on axis 0.
    """

    lead: Sequence[int] | None


@dataclass(frozen=True)
class Precision:
    """What two gradients of one element may differ by for reasons of rounding.

    Args:
        digits: powers of two that one pass may use before values leave the dtype's range.
        relative: of the element.
        absolute: of the largest element of the same sample; sums that cancel are no better than that.
    """

    digits: int
    relative: float
    absolute: float


# Kernels block by alignment, so that even exact scalings may change the last digits.
PRECISION = {
    torch.float64: Precision(512, 1e-9, 1e-13),
    torch.float32: Precision(64, 1e-4, 1e-5),
    torch.bfloat16: Precision(64, 1e-2, 4e-3),
    torch.float16: Precision(8, 1e-2, 1e-3),
}
EQUALISED = 64.0
ATTEMPTS = 6


@dataclass
class Ownership:
    """Result of :func:`find_owners`, one entry a site.

    Args:
        layouts: where the samples lie; ``None`` where no regular layout explains the gradients.
        gradients: of the unweighted sum of the losses; ``None`` where no gradient arrived.
    """

    layouts: list[SampleLayout | None]
    gradients: list[list[Tensor | None]]


def find_owners(
    differentiate: Differentiate,
    sites: Sequence[Site],
    samples: int,
    weight_like: Tensor,
    dtypes: set[torch.dtype],
) -> Ownership:
    """Find where the samples lie in the output gradients of every call.

    Args:
        differentiate: runs one pruned backward pass.
        sites: the calls.
        samples: ``N``, at least 1.
        weight_like: a tensor with the dtype and device of the losses' weights.
        dtypes: of the outputs.

    Returns:
        Layouts and gradients.
    """
    precision = min(
        (PRECISION[d] for d in {*dtypes, weight_like.dtype} if d in PRECISION), key=lambda p: p.digits
    )
    tags = _tags(samples, precision.digits)
    base = torch.zeros(samples, dtype=torch.float64)  # exponents
    dead = torch.zeros(samples, dtype=torch.bool)

    def weights(exponents: Tensor, mask: Tensor | None = None) -> Tensor:
        values = torch.exp2(exponents)
        if mask is not None:
            values = values * mask
        return values.to(weight_like)

    for _ in range(ATTEMPTS):
        plain = differentiate(weights(base))
        tagged = [differentiate(weights(base + tag)) for tag in tags]
        plain = _without_zeros(plain, tagged)
        layouts = [
            _layout(site, plain[i], [(tag, run[i]) for tag, run in zip(tags, tagged, strict=True)], samples)
            for i, site in enumerate(sites)
        ]
        if samples == 1 or any(layout is None for layout in layouts):
            break
        loudness = _loudness(plain, layouts, samples)
        quiet = (loudness == 0) & ~dead
        if quiet.any():
            # Nothing there, or drowned by a louder sample in a sum: ask the quiet ones alone.
            alone = max(
                (_largest(g) for run in differentiate(weights(base, quiet)) for g in run), default=0.0
            )
            if alone == 0:
                dead |= quiet
            else:
                loudness = loudness.masked_fill(quiet, alone)
        seen = loudness > 0
        if not seen.any() or float(loudness[seen].max() / loudness[seen].min()) <= EQUALISED:
            break
        step = torch.where(seen, loudness, torch.ones_like(loudness)).log2().round()
        # A third of the dtype's range for the base, the rest for the tags and for the model.
        limit = math.log2(torch.finfo(weight_like.dtype).max) / 3
        base = (base - step).clamp(-limit, limit)
    return Ownership(layouts, _unweighted(plain, layouts, base))


def _tags(samples: int, digits: int) -> list[Tensor]:
    """Exponents that together spell each sample's number, ``[N]`` each."""
    numbers = torch.arange(samples)
    result: list[Tensor] = []
    while digits ** len(result) < samples:
        result.append((numbers % digits).double())
        numbers = numbers // digits
    return result


def _without_zeros(
    plain: Sequence[Sequence[Tensor | None]], tagged: Sequence[Sequence[Sequence[Tensor | None]]]
) -> list[list[Tensor | None]]:
    """Replace by ``None`` what is exactly zero in all passes: it belongs to nobody, wherever it lies."""

    def is_zero(place: tuple[int, int], gradient: Tensor) -> bool:
        runs = [gradient, *(run[place[0]][place[1]] for run in tagged)]
        return not any(run is not None and run.any() for run in runs)

    return [
        [None if g is None or is_zero((i, j), g) else g for j, g in enumerate(outputs)]
        for i, outputs in enumerate(plain)
    ]


def _layout(
    site: Site,
    plain: Sequence[Tensor | None],
    tagged: Sequence[tuple[Tensor, Sequence[Tensor | None]]],
    samples: int,
) -> SampleLayout | None:
    """The first regular layout that explains all outputs of a call; ``None`` if there is none."""
    present = [i for i, gradient in enumerate(plain) if gradient is not None]
    leads = [1 if site.lead is None else site.lead[i] for i in present]
    shapes = [plain[i].shape for i in present]  # type: ignore[union-attr]
    for layout in _candidates(shapes, leads, samples):
        if site.lead is None and samples == 1 and any(shape[0] != 1 for shape in shapes):
            continue  # one sample of many rows, or no batch axis at all? The rule did not say.
        if all(
            _explains(layout, plain[i], tag, run[i])  # type: ignore[arg-type]
            for i in present
            for tag, run in tagged
        ):
            return layout
    return None


def _candidates(shapes: Sequence[torch.Size], leads: Sequence[int], samples: int) -> Iterator[SampleLayout]:
    """Regular layouts that fit the shapes, the usual ones first."""
    if not shapes:
        yield SampleLayout(samples)
        return
    if samples == 1:
        axis = 0 if all(leads) else None
        if axis is None and any(leads):
            return
        yield SampleLayout(1, axis, shapes[0][0] if axis == 0 else 1)
        return
    for axis in range(min(leads)):
        if any(axis >= len(shape) or shape[axis] % samples for shape in shapes):
            continue
        rows = math.gcd(*(shape[axis] // samples for shape in shapes))
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        for stride in dict.fromkeys((rows, *divisors)):
            yield SampleLayout(samples, axis, stride)


def _explains(layout: SampleLayout, plain: Tensor, tag: Tensor, tagged: Tensor | None) -> bool:
    """Whether each element of ``tagged`` is the element of ``plain`` times its owner's weight."""
    if tagged is None:
        return False
    precision = PRECISION.get(plain.dtype, PRECISION[torch.float16])
    plain, tagged = (layout.sample_first(gradient).flatten(1) for gradient in (plain, tagged))
    scaled = (tagged * torch.exp2(-tag).to(plain).unsqueeze(1)).to(
        torch.promote_types(plain.dtype, torch.float32)
    )
    plain = plain.to(scaled)
    known = plain.isfinite() & scaled.isfinite()
    if not known.all():
        if not (known & (plain != 0)).any():
            return False  # nothing finite to tell the owners by
        plain, scaled = plain.where(known, 0.0), scaled.where(known, 0.0)
    size = plain.abs()
    smallest = torch.finfo(tagged.dtype).tiny * 1024  # below it, scaling loses digits
    allowed = precision.relative * size + precision.absolute * size.amax(1, keepdim=True) + smallest
    return bool(((scaled - plain).abs() <= allowed).all())


def _loudness(
    plain: Sequence[Sequence[Tensor | None]], layouts: Sequence[SampleLayout | None], samples: int
) -> Tensor:
    """Largest finite element of each sample in any gradient, ``[N]``."""
    result = torch.zeros(samples, dtype=torch.float64)
    for outputs, layout in zip(plain, layouts, strict=True):
        for gradient in outputs:
            if gradient is not None and layout is not None:
                size = _finite_size(layout.sample_first(gradient).flatten(1)).amax(1)
                result = torch.maximum(result, size.to(result))
    return result


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None or not gradient.numel() else float(_finite_size(gradient).max())


def _finite_size(gradient: Tensor) -> Tensor:
    return gradient.abs().nan_to_num(0.0, 0.0, 0.0)


def _unweighted(
    plain: Sequence[Sequence[Tensor | None]], layouts: Sequence[SampleLayout | None], exponents: Tensor
) -> list[list[Tensor | None]]:
    """Take the equalising weights out of the gradients again; exact, since they are powers of two."""

    def unweigh(gradient: Tensor | None, layout: SampleLayout | None) -> Tensor | None:
        if gradient is None or layout is None or layout.axis is None:
            return gradient
        factors = torch.exp2(-exponents)[layout.owner(gradient.shape[layout.axis])].to(gradient)
        return gradient * factors.view(-1, *(1,) * (gradient.dim() - layout.axis - 1))

    if not exponents.any():
        return [list(outputs) for outputs in plain]
    return [[unweigh(g, layout) for g in outputs] for outputs, layout in zip(plain, layouts, strict=True)]
