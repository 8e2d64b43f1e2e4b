r"""Ownership: which sample does each element of an output gradient belong to?

Not guessed from shapes, but measured. The gradients are taken of the plain sum of the losses, and again with the losses
weighted by powers of two that spell the sample's number:

.. math::
    \frac{\partial \sum_n 2^{d_n} \ell_n}{\partial y_i} \Big/ 2^{d_{n(i)}}
    = \frac{\partial \sum_n \ell_n}{\partial y_i}

for an element :math:`y_i` that belongs to sample :math:`n(i)` alone; powers of two pass through floating-point
arithmetic without rounding. This is done with the numbers :math:`d_n` upwards and downwards, so that what another
sample contributes to the element is amplified on one side, and even a weak coupling shows. Every regular layout (a
batch axis anywhere, rows in either order) is tried against the equations, element by element. Where none fits, the
element is shared by several samples or they lie irregularly: refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbatch.rules import SampleLayout

Gradients = Sequence[Sequence[Tensor | None]]
"""The gradients of each call's outputs, in the outputs' shapes; ``None`` where none arrived."""

Differentiate = Callable[[Tensor], Gradients]
"""One pruned backward pass: from weights of the losses ``[N]``."""


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
    torch.float64: Precision(64, 1e-9, 1e-13),
    torch.float32: Precision(64, 1e-4, 1e-5),
    torch.bfloat16: Precision(64, 1e-2, 4e-3),
    torch.float16: Precision(8, 1e-2, 1e-3),
}
# Samples whose largest gradients differ by more than this, or lie this close to the dtype's smallest number, are
# brought to one size before a sum is trusted not to hide a quiet one.
EQUALISED = 64.0
RESOLVED = 2.0**12
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
    resolution = RESOLVED * max(_resolution(d) for d in {*dtypes, weight_like.dtype} if d in PRECISION)
    tags = _tags(samples, precision.digits)
    # Exponents that the base may use, the tags being on top of them.
    limit = math.floor(math.log2(torch.finfo(weight_like.dtype).max)) - precision.digits
    base = torch.zeros(samples, dtype=torch.float64, device="cpu")
    dead = torch.zeros(samples, dtype=torch.bool, device="cpu")

    def run(exponents: Tensor, mask: Tensor | None = None) -> Gradients:
        weights = torch.exp2(exponents)
        return differentiate((weights if mask is None else weights * mask).to(weight_like))

    for _ in range(ATTEMPTS):
        plain = run(base)
        peak = max((_largest(g) for outputs in plain for g in outputs), default=0.0)
        if samples > 1 and peak > 2.0 ** (precision.digits // 2 - 1):
            # The tags on top of it could leave the dtype's range.
            base = (base - math.ceil(math.log2(peak))).clamp(-limit, limit)
            plain = run(base)
        runs = _without_zeros([plain, *(run(base + tag) for tag in tags)])
        layouts = [
            _layout(site, [gradients[i] for gradients in runs], tags, samples) for i, site in enumerate(sites)
        ]
        if samples == 1 or any(layout is None for layout in layouts):
            break
        loudness = _loudness(runs[0], layouts, samples)
        quiet = (loudness == 0) & ~dead
        if quiet.any():
            # Nothing there, or drowned by a louder sample in a sum: ask the quiet ones alone.
            alone = max((_largest(g) for outputs in run(base, quiet) for g in outputs), default=0.0)
            if alone == 0:
                dead |= quiet
            else:
                loudness = loudness.masked_fill(quiet, alone)
        seen = loudness > 0
        if not seen.any() or (
            loudness[seen].max() <= EQUALISED * loudness[seen].min() and loudness[seen].min() >= resolution
        ):
            break
        step = torch.where(seen, loudness, torch.ones_like(loudness)).log2().round()
        base = (base - step).clamp(-limit, limit)
    gradients = _unweighted(runs[0], layouts, base)
    if base.any():
        # Weights are exact only as long as nothing leaves the dtype's range; without them nothing is lost.
        exact = run(torch.zeros_like(base))
        gradients = [
            [_where_finite(g, weighted) for g, weighted in zip(*outputs, strict=True)]
            for outputs in zip(exact, gradients, strict=True)
        ]
    return Ownership(layouts, gradients)


def _where_finite(exact: Tensor | None, weighted: Tensor | None) -> Tensor | None:
    return weighted if exact is None or weighted is None else torch.where(exact.isfinite(), exact, weighted)


def _resolution(dtype: torch.dtype) -> float:
    """Absolute difference that rounding makes next to the smallest numbers of a dtype."""
    return 4 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _tags(samples: int, digits: int) -> list[Tensor]:
    """Exponents ``[N]`` of the weighted passes: two of opposite direction for each digit of the samples' numbers.

    Spread over the range, so that couplings are amplified as far as possible, and shuffled, so that no regular
    coupling (a difference of neighbours) cancels in all passes.
    """
    count = 0
    while digits**count < samples:
        count += 1
    order = torch.randperm(samples, generator=torch.Generator("cpu").manual_seed(samples), device="cpu")
    numbers = order * (digits**count - 1) // max(samples - 1, 1)
    result: list[Tensor] = []
    for _ in range(count):
        digit = (numbers % digits).double()
        result += [digit, digits - 1 - digit]
        numbers = numbers // digits
    return result


def _without_zeros(runs: Sequence[Gradients]) -> list[Gradients]:
    """Replace by ``None`` what is exactly zero in all passes: it belongs to nobody, wherever it lies."""
    silent = {
        (i, j)
        for i, outputs in enumerate(runs[0])
        for j in range(len(outputs))
        if not any((g := gradients[i][j]) is not None and g.any() for gradients in runs)
    }
    return [
        [
            [None if (i, j) in silent else g for j, g in enumerate(outputs)]
            for i, outputs in enumerate(gradients)
        ]
        for gradients in runs
    ]


def _layout(
    site: Site, runs: Sequence[Sequence[Tensor | None]], tags: Sequence[Tensor], samples: int
) -> SampleLayout | None:
    """The first regular layout that explains all outputs of a call; ``None`` if there is none."""
    present = [j for j, gradient in enumerate(runs[0]) if gradient is not None]
    leads = [1 if site.lead is None else site.lead[j] for j in present]
    passes = [[outputs[j] for outputs in runs] for j in present]
    first = [gradients[0] for gradients in passes if gradients[0] is not None]
    unsure = [~gradient.isfinite() for gradient in first if not gradient.sum().isfinite()]
    found: SampleLayout | None = None
    for layout in _candidates([gradient.shape for gradient in first], leads, samples):
        if site.lead is None and samples == 1 and any(len(gradient) != 1 for gradient in first):
            continue  # one sample of many rows, or no batch axis at all? The rule did not say.
        if found is not None and all(
            torch.equal(_owners(layout, mask), _owners(found, mask)) for mask in unsure
        ):
            continue
        if all(_explains(layout, gradients, tags) for gradients in passes):
            if found is not None:
                return None  # the finite elements leave open which sample the others belong to
            found = layout
            if not any(mask.any() for mask in unsure):
                break
    return found


def _owners(layout: SampleLayout, mask: Tensor) -> Tensor:
    """Samples that the elements under a mask belong to."""
    if layout.axis is None:
        return mask.new_zeros(int(mask.sum()), dtype=torch.long)
    owner = layout.owner(mask.shape[layout.axis]).to(mask.device)
    return owner.view(-1, *(1,) * (mask.dim() - layout.axis - 1)).expand(mask.shape)[mask]


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


def _explains(layout: SampleLayout, gradients: Sequence[Tensor | None], tags: Sequence[Tensor]) -> bool:
    """Whether each element is the same in all passes, once its owner's weight is taken out."""
    if any(gradient is None for gradient in gradients):
        return False
    plain, *tagged = (_by_sample(layout, gradient) for gradient in gradients if gradient is not None)
    precision, resolution = PRECISION.get(plain.dtype, PRECISION[torch.float16]), _resolution(plain.dtype)
    wide = torch.promote_types(plain.dtype, torch.float32)
    for by_sample, tag in zip(tagged, tags, strict=True):
        unweighted = by_sample * torch.exp2(-tag).to(by_sample).unsqueeze(1)
        if not _agree(plain.to(wide), unweighted.to(wide), precision, resolution):
            return False
    return True


def _by_sample(layout: SampleLayout, gradient: Tensor) -> Tensor:
    """``[N, elements of a sample]``; one element where the call returns a number a sample."""
    return layout.sample_first(gradient).unsqueeze(-1).flatten(1)


def _agree(first: Tensor, second: Tensor, precision: Precision, resolution: float) -> bool:
    """Whether two gradients ``[N, elements]`` are the same to rounding, where they are finite."""
    if torch.equal(first, second) and bool(first.sum().isfinite()):
        return True  # as it is where kernels are exact; the rest would need several temporaries
    known = first.isfinite() & second.isfinite()
    if not known.all():
        if not (known & (first != 0)).any():
            return False  # nothing finite to tell the owners by
        first, second = first.where(known, 0.0), second.where(known, 0.0)
    size = torch.minimum(first.abs(), second.abs())
    allowed = precision.relative * size + precision.absolute * size.amax(1, keepdim=True) + resolution
    return bool(((first - second).abs() <= allowed).all())


def _loudness(plain: Gradients, layouts: Sequence[SampleLayout | None], samples: int) -> Tensor:
    """Largest finite element of each sample in any gradient, ``[N]``."""
    result = torch.zeros(samples, dtype=torch.float64, device="cpu")
    for outputs, layout in zip(plain, layouts, strict=True):
        for gradient in outputs:
            if gradient is not None and layout is not None:
                result = torch.maximum(result, _sizes(_by_sample(layout, gradient)).to(result))
    return result


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None or not gradient.numel() else float(_sizes(gradient.reshape(1, -1)))


def _sizes(rows: Tensor) -> Tensor:
    """Largest finite absolute value of each row, ``[N, elements]`` to ``[N]``."""
    sizes = torch.linalg.vector_norm(rows, torch.inf, 1)  # in one pass, without a temporary
    return sizes if sizes.isfinite().all() else rows.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)


def _unweighted(
    plain: Gradients, layouts: Sequence[SampleLayout | None], exponents: Tensor
) -> list[list[Tensor | None]]:
    """Take the weights out of the gradients again; exact, since they are powers of two."""

    def unweigh(gradient: Tensor | None, layout: SampleLayout | None) -> Tensor | None:
        if gradient is None or layout is None:
            return gradient
        if layout.axis is None:
            return gradient * float(torch.exp2(-exponents[0]))
        factors = torch.exp2(-exponents)[layout.owner(gradient.shape[layout.axis])].to(gradient)
        return gradient * factors.view(-1, *(1,) * (gradient.dim() - layout.axis - 1))

    if not exponents.any():
        return [list(outputs) for outputs in plain]
    return [[unweigh(g, layout) for g in outputs] for outputs, layout in zip(plain, layouts, strict=True)]
