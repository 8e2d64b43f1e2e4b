"""Regular layouts (a batch axis anywhere, rows in either order), tried against gradients of tagged losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradbatch.capture.layouts import by_sample
from gradbatch.capture.tags import PRECISION, RESOLVED, Precision, Tags, resolution
from gradbatch.rules import SampleLayout

# How many elements are looked at before a layout is tried on all, and how large they are, of the largest one.
PIVOTS = 64
PIVOTAL = 1e-3


def candidates(
    shapes: Sequence[torch.Size], leads: Sequence[int], first_axis: bool, samples: int
) -> Iterator[SampleLayout]:
    """Regular layouts that fit the outputs of a call, the usual ones first.

    Args:
        shapes: of the outputs.
        leads: leading axes on which the samples may lie, for each.
        first_axis: whether they must lie on axis 0.
        samples: ``N``, at least 1.
    """
    if not shapes:
        yield SampleLayout(samples)
    elif samples == 1:
        axis = 0 if all(leads) else None
        if axis is None and any(leads):
            return
        if first_axis and any(shape[:1] != (1,) for shape in shapes):
            return  # one sample of many rows, or no batch axis at all? The rule did not say.
        yield SampleLayout(1, axis, shapes[0][0] if axis == 0 else 1)
    else:
        for axis in range(min(leads)):
            if any(axis >= len(shape) or shape[axis] % samples for shape in shapes):
                continue
            rows = math.gcd(*(shape[axis] // samples for shape in shapes))
            divisors = [d for d in range(1, rows + 1) if rows % d == 0]
            for stride in dict.fromkeys((rows, *divisors)):
                yield SampleLayout(samples, axis, stride)


def narrowed(
    layouts: Sequence[SampleLayout],
    plain: Sequence[Tensor],
    weighted: Sequence[Tensor],
    tags: Tags,
    number: int,
) -> list[SampleLayout]:
    """Those layouts that explain one more pass.

    Args:
        layouts: to be tried.
        plain: gradients of the sum of the losses, of all outputs of a call; real ones.
        weighted: the same of the losses with the tags as weights.
        tags: of the samples.
        number: of the pass among the tagged ones.
    """
    exponents = tags.exponents[number]
    left = list(layouts)
    if number % 2 == 0:  # upwards: what is loud stays so
        for one, other in zip(plain, weighted, strict=True):
            place, digit = _pivots(one, other, exponents)
            left = [layout for layout in left if _owns(layout, one.shape, place, exponents, digit)]
    return [
        layout
        for layout in left
        if all(_explains(layout, *pair, exponents) for pair in zip(plain, weighted, strict=True))
    ]


def _pivots(plain: Tensor, weighted: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Some large elements, by their places, with their exponents: what contradicts them need not be tried."""
    flat = plain.reshape(-1)
    size = flat.abs()
    width = max(1, len(size) // PIVOTS)
    chunks = size[: len(size) // width * width].view(-1, width)
    place = chunks.argmax(1) + torch.arange(len(chunks), device=flat.device) * width
    if len(size):
        # Next to the smallest numbers of the dtype a ratio says nothing.
        place = place[size[place] > max(PIVOTAL * float(size.max()), RESOLVED * resolution(size.dtype))]
    digit = exponent_of(weighted.reshape(-1)[place] / flat[place])
    known = torch.isin(digit, exponents.to(digit))
    return place[known], digit[known]


def exponent_of(ratio: Tensor) -> Tensor:
    """The nearest power of two, by its exponent; negative where it is none."""
    return ratio.nan_to_num(0.0, 0.0, 0.0).clamp_min(0.25).log2().round().long()


def _owns(layout: SampleLayout, shape: torch.Size, place: Tensor, exponents: Tensor, digit: Tensor) -> bool:
    """Whether elements at some places belong to samples with these exponents in a layout."""
    assert layout.axis is not None
    row = place // math.prod(shape[layout.axis + 1 :]) % shape[layout.axis]
    return torch.equal(exponents.to(digit)[row // layout.stride % layout.samples], digit)


def _explains(layout: SampleLayout, plain: Tensor, weighted: Tensor, exponents: Tensor) -> bool:
    """Whether each element is the same in both passes, once its owner's weight is taken out."""
    plain, weighted = by_sample(layout, plain), by_sample(layout, weighted)
    precision, least = PRECISION.get(plain.dtype, PRECISION[torch.float16]), resolution(plain.dtype)
    wide = torch.promote_types(plain.dtype, torch.float32)
    unweighted = weighted * torch.exp2(-exponents).to(weighted).unsqueeze(1)
    return _agree(plain.to(wide), unweighted.to(wide), precision, least)


def _agree(first: Tensor, second: Tensor, precision: Precision, least: float) -> bool:
    """Whether two gradients ``[N, elements]`` are the same to rounding."""
    if torch.equal(first, second):
        return True  # as it is where kernels are exact; the rest would need several temporaries
    size = torch.minimum(first.abs(), second.abs())
    allowed = precision.relative * size + precision.absolute * size.amax(1, keepdim=True) + least
    return bool(((first - second).abs() <= allowed).all())
