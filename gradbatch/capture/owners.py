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
from functools import cache

import torch
from torch import Tensor

from gradbatch.capture.evidence import Evidence, Outputs
from gradbatch.capture.filled import filled, without_dead, without_zeros
from gradbatch.capture.layouts import Gradients, OwnerMap, Owners, Site, by_sample, is_finite, largest, sizes
from gradbatch.capture.tags import PRECISION, RESOLVED, Precision, Tags, resolution
from gradbatch.rules import SampleLayout

Take = Callable[[int, Outputs], None]
"""Called with the number of a call and the gradients of its outputs, as soon as they are there."""

Differentiate = Callable[[Tensor, Take], None]
"""One pruned backward pass, from weights of the losses ``[N]``, which hands on the gradients of each call once."""

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
    every = {d for d in {*dtypes, weight_like.dtype} if d in PRECISION}
    precision = min((PRECISION[d] for d in every), key=lambda p: p.digits)
    least = RESOLVED * max(map(resolution, every))
    tags = Tags.spread(samples, precision.digits)
    # Exponents that the base may use, the tags being on top of them.
    limit = math.floor(math.log2(torch.finfo(weight_like.dtype).max)) - precision.digits
    base = torch.zeros(samples, dtype=torch.float64, device="cpu") if exponents is None else exponents
    dead = torch.zeros(samples, dtype=torch.bool, device="cpu")
    passes = _Passes(differentiate, sites, tags, samples, weight_like, follow and cache(follow))
    found: _Found | None = None
    plain: list[Outputs] = []
    for _ in range(ATTEMPTS):
        found, plain = None, []  # their gradients go before others come
        plain = passes.collected(base)
        shift = _shift_of(_largest_of(plain), precision) if samples > 1 else 0
        if shift:
            plain, base = [], (base + shift).clamp(-limit, limit)
            plain = passes.collected(base)
        found = passes.found(plain, base)
        if samples == 1:
            break
        loudness = found.loudness.amax(0) if len(sites) else torch.zeros_like(base)
        quiet = (loudness == 0) & ~dead
        if quiet.any():
            # Nothing there, or drowned by a louder sample in a sum: ask the quiet ones alone.
            alone = passes.largest(base, quiet)
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
    assert found is not None
    gradients = _unweighted(found.plain, found.owners, found.base)
    if base.any():
        # Weights are exact only as long as nothing leaves the dtype's range; without them nothing is lost.
        def put_in_place(i: int, exact: Outputs) -> None:
            gradients[i] = [
                _where_finite(g, weighted) for g, weighted in zip(exact, gradients[i], strict=True)
            ]

        passes.run(torch.zeros_like(base), put_in_place)
    present = found.loudness > 0
    for i, owner in enumerate(found.owners):
        present[i] |= owner is None or samples == 1
    return Ownership(found.owners, found.certain, gradients, base, found.finite, present)


@dataclass
class _Found:
    """What the passes with one base of weights say, one entry a site.

    Args:
        base: exponents of those weights, ``[N]``.
        plain: gradients of the losses with that base alone; ``None`` where they are zero.
        owners: where the samples lie.
        certain: whether nothing else explains the gradients.
        finite: whether all of them were, in all passes.
        loudness: the largest of each sample, ``[sites, N]``.
    """

    base: Tensor
    plain: Gradients
    owners: list[Owners | None]
    certain: list[bool]
    finite: list[bool]
    loudness: Tensor


@dataclass
class _Passes:
    """Backward passes from weighted losses, and what they bring together.

    The arguments are those of :func:`find_owners`, and the tags.
    """

    differentiate: Differentiate
    sites: Sequence[Site]
    tags: Tags
    samples: int
    like: Tensor
    follow: Follow | None

    def run(self, exponents: Tensor, take: Take, mask: Tensor | None = None) -> None:
        """Run one pass, with powers of two for weights."""
        weights = torch.exp2(exponents)
        self.differentiate((weights if mask is None else weights * mask).to(self.like), take)

    def collected(self, exponents: Tensor) -> list[Outputs]:
        """All gradients of one pass."""
        found: list[Outputs] = [[] for _ in self.sites]
        self.run(exponents, found.__setitem__)
        return found

    def largest(self, exponents: Tensor, mask: Tensor) -> float:
        """The largest gradient anywhere of some samples."""
        found = [0.0]
        self.run(exponents, lambda _, outputs: found.extend(map(largest, outputs)), mask)
        return max(found)

    def found(self, plain: list[Outputs], base: Tensor) -> _Found:
        """Run the tagged passes.

        Args:
            plain: what the pass without tags brought.
            base: exponents of its weights.
        """
        follow = self.follow if self.samples > 1 else None
        evidence = None if follow is not None and not _are_finite(plain) else self._evidence(plain, base)
        if follow is not None and (evidence is None or not all(e.finite for e in evidence)):
            return self._followed(plain, base, follow())
        assert evidence is not None
        return self._concluded(evidence, base, [e.plain for e in evidence], [e.finite for e in evidence])

    def _concluded(
        self, evidence: Sequence[Evidence], base: Tensor, plain: Gradients, finite: list[bool]
    ) -> _Found:
        told = [e.owners() for e in evidence]
        owners = [owner for owner, _ in told]
        loudness = _loudness([e.plain for e in evidence], owners, self.samples)
        return _Found(base, plain, owners, [only for _, only in told], finite, loudness)

    def _evidence(self, plain: Sequence[Outputs], base: Tensor) -> list[Evidence]:
        """What the tagged passes say of each site, whose gradients go again where that can be."""
        evidence = [
            Evidence(site, own, self.tags, self.samples) for site, own in zip(self.sites, plain, strict=True)
        ]
        wanted = set(range(len(evidence)))
        while wanted:
            for number, tag in enumerate(self.tags.exponents):

                def add(i: int, outputs: Outputs, number: int = number) -> None:
                    if i in wanted:  # noqa: B023
                        evidence[i].add(number, outputs)

                self.run(base + tag, add)
            wanted = {i for i, e in enumerate(evidence) if e.lacks}
            for i in wanted:
                evidence[i] = evidence[i].again()
        return evidence

    def _followed(self, plain: list[Outputs], base: Tensor, followed: Gradients) -> _Found:
        """The same with what is not finite filled in; all passes are kept."""
        exponents = [base, *(base + tag for tag in self.tags.exponents)]
        runs = [plain, *map(self.collected, exponents[1:])]
        finite = [_are_finite([gradients[i] for gradients in runs]) for i in range(len(self.sites))]
        raw = without_zeros([without_dead(gradients, followed) for gradients in runs])
        evidence = []
        for site, own, *tagged in zip(self.sites, *filled(raw, followed, exponents), strict=True):
            one = Evidence(site, own, self.tags, self.samples, keep=True)
            for number, outputs in enumerate(tagged):
                one.add(number, outputs)
            evidence.append(one)
        return self._concluded(evidence, base, raw[0], finite)


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


def _loudness(plain: Gradients, owners: Sequence[Owners | None], samples: int) -> Tensor:
    """Largest finite element of each sample in the gradients of each site, ``[sites, N]``."""
    result = torch.zeros(len(plain), samples, dtype=torch.float64, device="cpu")
    for row, outputs, owner in zip(result, plain, owners, strict=True):
        for gradient in outputs:
            if gradient is None or owner is None:
                continue
            if isinstance(owner, SampleLayout):
                loudest = sizes(by_sample(owner, gradient)).to(row)
            else:
                known = owner.owner.clamp_min(0).reshape(-1)
                flat = gradient.abs().reshape(-1).to(torch.float64)
                loudest = flat.new_zeros(samples).scatter_reduce_(0, known, flat, "amax").to(row)
            torch.maximum(row, loudest, out=row)
    return result


def _are_finite(runs: Gradients) -> bool:
    return all(is_finite(g) for outputs in runs for g in outputs if g is not None)


def _largest_of(gradients: Gradients) -> float:
    return max((largest(g) for outputs in gradients for g in outputs), default=0.0)


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
