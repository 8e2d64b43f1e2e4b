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
number is read off the ratio of the gradients, row by row or element by element, and tried likewise (see
:mod:`gradbatch.capture.layouts`). Where that fails too, some element is shared by several samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbatch.capture.elements import NOBODY
from gradbatch.capture.layouts import RESOLVED, OwnerMap, Owners, Site, by_sample, is_finite, owners_of
from gradbatch.capture.tags import PRECISION, Precision, Tags, resolution
from gradbatch.rules import SampleLayout

Gradients = Sequence[Sequence[Tensor | None]]
"""The gradients of each call's outputs, in the outputs' shapes; ``None`` where none arrived."""

Differentiate = Callable[[Tensor], Gradients]
"""One pruned backward pass: from weights of the losses ``[N]``."""

Follow = Callable[[], Gradients]
"""Whose each element is by the operations alone: maps in the gradients' shapes."""


# Samples whose largest gradients differ by more than this, or lie this close to the dtype's smallest number, are
# brought to one size before a sum is trusted not to hide a quiet one.
EQUALISED = 64.0
ATTEMPTS = 6


@dataclass
class Ownership:
    """Result of :func:`find_owners`, one entry a site.

    Args:
        owners: where the samples lie; ``None`` where an element belongs to several.
        certain: whether no other owners explain the gradients.
        gradients: of the unweighted sum of the losses; ``None`` where no gradient arrived.
        exponents: of the weights that made the samples equally loud, to start from next time.
        lasting: whether it says something of other batches too: what was not measured does not.
        present: which samples have a gradient there, ``[sites, N]``; all where an element belongs to several.
    """

    owners: list[Owners | None]
    certain: list[bool]
    gradients: list[list[Tensor | None]]
    exponents: Tensor
    lasting: list[bool]
    present: Tensor


def find_owners(
    differentiate: Differentiate,
    sites: Sequence[Site],
    samples: int,
    weight_like: Tensor,
    dtypes: set[torch.dtype],
    exponents: Tensor | None = None,
    follow: Follow | None = None,
) -> Ownership:
    """Find where the samples lie in the output gradients of every call.

    Args:
        differentiate: runs one pruned backward pass.
        sites: the calls.
        samples: ``N``, at least 1.
        weight_like: a tensor with the dtype and device of the losses' weights.
        dtypes: of the outputs.
        exponents: of the weights to begin with, from an earlier search on the same losses.
        follow: finds whose the elements are that are not finite, which no measurement tells.
    """
    precision = min(
        (PRECISION[d] for d in {*dtypes, weight_like.dtype} if d in PRECISION), key=lambda p: p.digits
    )
    least = RESOLVED * max(resolution(d) for d in {*dtypes, weight_like.dtype} if d in PRECISION)
    tags = Tags.spread(samples, precision.digits)
    # Exponents that the base may use, the tags being on top of them.
    limit = math.floor(math.log2(torch.finfo(weight_like.dtype).max)) - precision.digits
    base = torch.zeros(samples, dtype=torch.float64, device="cpu") if exponents is None else exponents
    dead = torch.zeros(samples, dtype=torch.bool, device="cpu")

    def run(exponents: Tensor, mask: Tensor | None = None) -> Gradients:
        weights = torch.exp2(exponents)
        return differentiate((weights if mask is None else weights * mask).to(weight_like))

    followed: Gradients | None = None
    for _ in range(ATTEMPTS):
        plain = run(base)
        peak = max((_largest(g) for outputs in plain for g in outputs), default=0.0)
        shift = _shift_of(peak, precision) if samples > 1 else 0
        if shift:
            base = (base + shift).clamp(-limit, limit)
            plain = run(base)
        raw = runs = _without_zeros([plain, *(run(base + tag) for tag in tags.exponents)])
        finite = [_is_finite([gradients[i] for gradients in runs]) for i in range(len(sites))]
        if samples > 1 and follow is not None and not all(finite):
            followed = follow() if followed is None else followed
            raw = _without_zeros([_without_dead(gradients, followed) for gradients in raw])
            runs = _filled(raw, followed, [base, *(base + tag for tag in tags.exponents)])
        found = [
            owners_of(site, [gradients[i] for gradients in runs], tags, samples)
            for i, site in enumerate(sites)
        ]
        owners = [owner for owner, _ in found]
        present = torch.ones(len(sites), samples, dtype=torch.bool, device="cpu")
        if samples == 1:
            break
        loudness = _loudness(runs[0], owners, samples)
        for i, owner in enumerate(owners):
            present[i] = (loudness[i] > 0) | (owner is None)
        loudness = loudness.amax(0) if len(loudness) else loudness.new_zeros(samples)
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
            loudness[seen].max() <= EQUALISED * loudness[seen].min() and loudness[seen].min() >= least
        ):
            break
        step = torch.where(seen, loudness, torch.ones_like(loudness)).log2().round()
        base = (base - step).clamp(-limit, limit)
    gradients = _unweighted(raw[0], owners, base)
    if base.any():
        # Weights are exact only as long as nothing leaves the dtype's range; without them nothing is lost.
        exact = run(torch.zeros_like(base))
        gradients = [
            [_where_finite(g, weighted) for g, weighted in zip(*outputs, strict=True)]
            for outputs in zip(exact, gradients, strict=True)
        ]
    certain = [only for _, only in found]
    return Ownership(owners, certain, gradients, base, finite, present)


def _is_finite(runs: Gradients) -> bool:
    return all(is_finite(g) for outputs in runs for g in outputs if g is not None)


def _without_dead(gradients: Gradients, followed: Gradients) -> Gradients:
    """Zeros where no loss reaches an element: whatever becomes of zero times NaN, nothing depends on it."""
    return [
        [
            g if g is None or owner is None else g.masked_fill(~g.isfinite() & (owner == NOBODY), 0)
            for g, owner in zip(*outputs, strict=True)
        ]
        for outputs in zip(gradients, followed, strict=True)
    ]


def _filled(runs: Sequence[Gradients], followed: Gradients, exponents: Sequence[Tensor]) -> list[Gradients]:
    """Put in place of what is not finite what a finite gradient of the same sample would be in each pass.

    What is finite must still agree with it, so that a layout is accepted only if both say the same.
    """

    def fill(i: int, j: int, number: int) -> Tensor | None:
        gradient, owner = runs[number][i][j], followed[i][j]
        if gradient is None or owner is None:
            return gradient
        unknown = ~torch.stack([g.isfinite() for run in runs if (g := run[i][j]) is not None]).all(0)
        weights = torch.exp2(exponents[number]).to(gradient)
        single = (owner >= 0) & (owner < len(weights))
        values = (_largest(runs[0][i][j]) or 1.0) * weights[owner.clamp(0, len(weights) - 1)]
        return torch.where(unknown & single, values, gradient)

    return [
        [[fill(i, j, number) for j in range(len(outputs))] for i, outputs in enumerate(gradients)]
        for number, gradients in enumerate(runs)
    ]


def _shift_of(peak: float, precision: Precision) -> int:
    """By which power of two the largest gradient is to be changed, before tags are put on top of it.

    They would take a large one out of the dtype's range. Of a small one in half precision little would be exact.
    """
    exponent = math.ceil(math.log2(peak)) if peak else 0
    if precision.peak is not None and peak:
        return precision.peak - exponent if abs(precision.peak - exponent) > 1 else 0
    return -exponent if peak > 2.0 ** (precision.digits // 2 - 1) else 0


def _where_finite(exact: Tensor | None, weighted: Tensor | None) -> Tensor | None:
    return weighted if exact is None or weighted is None else torch.where(exact.isfinite(), exact, weighted)


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


def _loudness(plain: Gradients, owners: Sequence[Owners | None], samples: int) -> Tensor:
    """Largest finite element of each sample in the gradients of each site, ``[sites, N]``."""
    result = torch.zeros(len(plain), samples, dtype=torch.float64, device="cpu")
    for row, outputs, owner in zip(result, plain, owners, strict=True):
        for gradient in outputs:
            if gradient is None or owner is None:
                continue
            if isinstance(owner, SampleLayout):
                sizes = _sizes(by_sample(owner, gradient)).to(row)
            else:
                known = owner.owner.clamp_min(0).reshape(-1)
                flat = gradient.abs().reshape(-1).to(torch.float64)
                sizes = flat.new_zeros(samples).scatter_reduce_(0, known, flat, "amax").to(row)
            torch.maximum(row, sizes, out=row)
    return result


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None or not gradient.numel() else float(_sizes(gradient.reshape(1, -1)))


def _sizes(rows: Tensor) -> Tensor:
    """Largest finite absolute value of each row, ``[N, elements]`` to ``[N]``."""
    sizes = torch.linalg.vector_norm(rows, torch.inf, 1)  # in one pass, without a temporary
    return sizes if sizes.isfinite().all() else rows.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)


def _unweighted(
    plain: Gradients, owners: Sequence[Owners | None], exponents: Tensor
) -> list[list[Tensor | None]]:
    """Take the weights out of the gradients again; exact, since they are powers of two."""

    def unweigh(gradient: Tensor | None, owner: Owners | None) -> Tensor | None:
        if gradient is None or owner is None:
            return gradient
        if isinstance(owner, OwnerMap):
            return gradient * torch.exp2(-exponents).to(gradient)[owner.owner.clamp_min(0)]
        if owner.axis is None:
            return gradient * float(torch.exp2(-exponents[0]))
        factors = torch.exp2(-exponents)[owner.owner(gradient.shape[owner.axis])].to(gradient)
        return gradient * factors.view(-1, *(1,) * (gradient.dim() - owner.axis - 1))

    if not exponents.any():
        return [list(outputs) for outputs in plain]
    return [[unweigh(g, owner) for g in outputs] for outputs, owner in zip(plain, owners, strict=True)]
