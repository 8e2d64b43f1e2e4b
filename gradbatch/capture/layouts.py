"""Where the samples lie in gradients that were taken with tagged weights: regularly, by rows, or by elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbatch.capture.tags import PRECISION, Precision, Tags, resolution
from gradbatch.rules import RowLayout, SampleLayout


@dataclass(frozen=True)
class Site:
    """The outputs of one call, as far as ownership is concerned.

    Args:
        lead: leading axes on which the samples may lie, for each output; ``None``: they must lie on axis 0.
        rows: leading axes whose rows are expected to belong to one sample each, where the samples lie irregularly.
        elements: whether single elements may, where not even rows do.
    """

    lead: Sequence[int] | None
    rows: int = 1
    elements: bool = False


@dataclass(frozen=True)
class OwnerMap:
    """Samples that lie irregularly: the owner of each element.

    Args:
        owner: the sample, int64, of the gradient's shape; -1 where the gradient is zero.
        samples: ``N``.
    """

    owner: Tensor
    samples: int

    def rows(self, lead: int) -> RowLayout | None:
        """The layout of the rows of the first ``lead`` axes; ``None`` if some row belongs to several samples."""
        flat = self.owner.reshape(math.prod(self.owner.shape[:lead]), -1)
        if not flat.shape[1]:
            return None
        owner = flat.amax(1)
        if not bool(((flat == owner.unsqueeze(1)) | (flat < 0)).all()):
            return None
        order = owner.argsort(stable=True)
        order = order[int((owner < 0).sum()) :]
        counts = torch.bincount(owner[order], minlength=self.samples)
        index = owner.new_full((self.samples, max(1, int(counts.max()))), -1)
        place = torch.arange(len(order), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
        index[owner[order], place] = order
        return RowLayout(index, lead)


Owners = SampleLayout | OwnerMap
# How many elements are looked at before a layout is tried on all, and how large they are, of the largest one.
PIVOTS = 64
PIVOTAL = 1e-3
RESOLVED = 2.0**12


def owners_of(
    site: Site, runs: Sequence[Sequence[Tensor | None]], tags: Tags, samples: int
) -> tuple[Owners | None, bool]:
    """Where the samples lie in the outputs of a call: regularly, or else by rows or elements of its one output.

    Returns:
        The owners, and whether they are the only ones that explain the gradients.
    """
    present = [j for j, gradient in enumerate(runs[0]) if gradient is not None]
    passes = [[gradient for outputs in runs if (gradient := outputs[j]) is not None] for j in present]
    if any(len(gradients) < len(runs) for gradients in passes):
        return None, False
    leads = [1 if site.lead is None else site.lead[j] for j in present]
    if samples > 1 and not all(is_finite(g) for gradients in passes for g in gradients):
        return None, False  # no ratio tells whose that is
    real = [[torch.view_as_real(g) if g.is_complex() else g for g in gradients] for gradients in passes]
    regular, only = _layout(real, leads, site.lead is None, tags, samples)
    if regular is not None or samples == 1 or len(present) != 1:
        return regular, only
    return _irregular(site, real[0], passes[0][0].dim(), tags, samples), False


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are; a finite sum shows it without a temporary."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _irregular(
    site: Site, gradients: Sequence[Tensor], axes: int, tags: Tags, samples: int
) -> OwnerMap | None:
    """Owners of rows, or else of elements, of an output with so many axes (a complex one has one more here)."""
    found = _decoded(gradients, site.rows, tags) if site.rows <= axes else None
    if found is None and site.elements and site.rows != axes:
        found = _decoded(gradients, axes, tags)
    if found is None:
        return None
    return OwnerMap(found[..., 0] if gradients[0].dim() > axes else found, samples)


def _decoded(gradients: Sequence[Tensor], lead: int, tags: Tags) -> Tensor | None:
    """Read the owner of each row off its largest element, and check that it explains all of the row."""
    plain, *tagged = (
        g.reshape(math.prod(g.shape[:lead]), -1).to(torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    )
    if not plain.numel():
        return None
    precision = PRECISION.get(gradients[0].dtype, PRECISION[torch.float16])
    least = resolution(plain.dtype)
    loudest = torch.stack([t.abs().amax(1) for t in (plain, *tagged)]).amax(0)
    place = plain.abs().argmax(1, keepdim=True)
    pivot = plain.gather(1, place)
    owner = tags.sample([_exponent((up.gather(1, place) / pivot).squeeze(1)) for up in tagged[::2]])
    silent = loudest == 0
    if bool(((owner < 0) & ~silent).any()):
        return None
    safe = owner.clamp_min(0)
    size = plain.abs()
    peak = size.new_zeros(len(tags.numbers)).scatter_reduce_(0, safe, size.amax(1), "amax")
    for t, exponents in zip(tagged, tags.exponents, strict=True):
        unweighted = t * torch.exp2(-exponents).to(t)[safe].unsqueeze(1)
        smaller = torch.minimum(size, unweighted.abs())
        allowed = precision.relative * smaller + precision.absolute * peak[safe].unsqueeze(1) + least
        if not bool(((plain - unweighted).abs() <= allowed).all()):
            return None
    owner = owner.masked_fill(silent, -1)
    shape = gradients[0].shape
    return owner.view((*shape[:lead], *(1,) * (len(shape) - lead))).expand(shape)


def _layout(
    passes: Sequence[Sequence[Tensor]], leads: Sequence[int], first_axis: bool, tags: Tags, samples: int
) -> tuple[SampleLayout | None, bool]:
    """The first regular layout that explains all outputs of a call, if there is one, and whether no other does."""
    first = [gradients[0] for gradients in passes]
    pivots = [_pivots(gradients, tags) for gradients in passes] if samples > 1 else []
    found: SampleLayout | None = None
    only = bool(passes)
    for layout in _candidates([gradient.shape for gradient in first], leads, samples):
        if first_axis and samples == 1 and any(len(gradient) != 1 for gradient in first):
            continue  # one sample of many rows, or no batch axis at all? The rule did not say.
        if any(not _owns(layout, g.shape, *pivot) for g, pivot in zip(first, pivots, strict=False)):
            continue
        if not all(_explains(layout, gradients, tags.exponents) for gradients in passes):
            continue
        if found is not None:
            return found, False
        found = layout
    return found, only


def _pivots(gradients: Sequence[Tensor], tags: Tags) -> tuple[Tensor, Tensor]:
    """Some large elements, by their places, with their owners: a layout that contradicts them need not be tried."""
    plain = gradients[0].reshape(-1)
    size = plain.abs()
    width = max(1, len(size) // PIVOTS)
    chunks = size[: len(size) // width * width].view(-1, width)
    place = chunks.argmax(1) + torch.arange(len(chunks), device=plain.device) * width
    if len(size):
        # Next to the smallest numbers of the dtype a ratio says nothing.
        place = place[size[place] > max(PIVOTAL * float(size.max()), RESOLVED * resolution(size.dtype))]
    ratios = [up.reshape(-1)[place] / plain[place] for up in gradients[1::2]]
    owner = tags.sample([_exponent(ratio) for ratio in ratios])
    return place[owner >= 0], owner[owner >= 0]


def _exponent(ratio: Tensor) -> Tensor:
    """The nearest power of two, by its exponent; negative where it is none."""
    return ratio.nan_to_num(0.0, 0.0, 0.0).clamp_min(0.25).log2().round().long()


def _owns(layout: SampleLayout, shape: torch.Size, place: Tensor, owner: Tensor) -> bool:
    """Whether elements at some places belong to these samples in a layout."""
    if layout.axis is None:
        return True
    row = place // math.prod(shape[layout.axis + 1 :]) % shape[layout.axis]
    return torch.equal(row // layout.stride % layout.samples, owner)


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


def _explains(layout: SampleLayout, gradients: Sequence[Tensor], tags: Sequence[Tensor]) -> bool:
    """Whether each element is the same in all passes, once its owner's weight is taken out."""
    plain, *tagged = (by_sample(layout, gradient) for gradient in gradients)
    precision, least = PRECISION.get(plain.dtype, PRECISION[torch.float16]), resolution(plain.dtype)
    wide = torch.promote_types(plain.dtype, torch.float32)
    for weighted, tag in zip(tagged, tags, strict=True):
        unweighted = weighted * torch.exp2(-tag).to(weighted).unsqueeze(1)
        if not _agree(plain.to(wide), unweighted.to(wide), precision, least):
            return False
    return True


def by_sample(layout: SampleLayout, gradient: Tensor) -> Tensor:
    """``[N, elements of a sample]``; one element where the call returns a number a sample."""
    return layout.sample_first(gradient).unsqueeze(-1).flatten(1)


def _agree(first: Tensor, second: Tensor, precision: Precision, least: float) -> bool:
    """Whether two gradients ``[N, elements]`` are the same to rounding."""
    if torch.equal(first, second):
        return True  # as it is where kernels are exact; the rest would need several temporaries
    size = torch.minimum(first.abs(), second.abs())
    allowed = precision.relative * size + precision.absolute * size.amax(1, keepdim=True) + least
    return bool(((first - second).abs() <= allowed).all())


def element_owners(owners: Owners, gradient: Tensor) -> Tensor:
    """Owner of each element, broadcastable to the gradient."""
    if isinstance(owners, OwnerMap):
        return owners.owner
    if owners.axis is None:
        return torch.zeros((), dtype=torch.long, device=gradient.device)
    owner = owners.owner(gradient.shape[owners.axis]).to(gradient.device)
    return owner.view(-1, *(1,) * (gradient.dim() - owners.axis - 1))


def words(owners: Owners | RowLayout) -> str:
    """Where the samples lie, in words."""
    if isinstance(owners, OwnerMap):
        return "irregular elements"
    if isinstance(owners, RowLayout):
        return "irregular rows"
    if owners.axis is None:
        return "one sample"
    return f"axis {owners.axis}" + (f", {owners.stride} rows each" if owners.stride > 1 else "")
