"""What gradients of tagged losses say of one call: whose its outputs are.

Regular layouts are tried against one pass after another. As long as some explain all of them, the gradients of those
passes need not be kept. Where none does, the sample is read off the ratio of the gradients, row by row or element by
element, and tried likewise; that takes all passes at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.capture.layouts import OwnerMap, Owners, Site, is_finite
from gradbatch.capture.regular import candidates, exponent_of, narrowed
from gradbatch.capture.tags import PRECISION, Tags, resolution

Outputs = list[Tensor | None]
"""Gradients of the outputs of a call; ``None`` where none arrived."""


class Evidence:
    """Of one call, pass by pass.

    Args:
        site: the call.
        plain: its gradients of the sum of the losses.
        tags: of the samples.
        samples: ``N``.
        heard: outputs that are known not to be zero in all passes.
        keep: whether the gradients of all passes are kept, whatever they say.

    Attributes:
        plain: as given, without what is zero.
        finite: whether all that arrived so far is.
    """

    def __init__(
        self,
        site: Site,
        plain: Outputs,
        tags: Tags,
        samples: int,
        heard: frozenset[int] = frozenset(),
        keep: bool = False,
    ) -> None:
        self._site, self._tags, self._samples = site, tags, samples
        self._given, self._heard, self._keep = plain, heard, keep
        self.finite = _is_finite(plain)
        # What is zero belongs to nobody, wherever it lies.
        self.plain = [g if j in heard or _is_heard(g) else None for j, g in enumerate(plain)]
        self._present = [j for j, gradient in enumerate(self.plain) if gradient is not None]
        self._kept: dict[int, Outputs] = {}
        shapes = [real.shape for real in self._real(self.plain)]
        leads = [1 if site.lead is None else site.lead[j] for j in self._present]
        told = self.finite or samples == 1
        self._left = list(candidates(shapes, leads, site.lead is None, samples)) if told else []

    def add(self, number: int, weighted: Outputs) -> None:
        """Take in what one more tagged pass brought."""
        self.finite = self.finite and _is_finite(weighted)
        self._heard |= {j for j, g in enumerate(weighted) if self.plain[j] is None and _is_heard(g)}
        whole = all(weighted[j] is not None for j in self._present)
        if self._left and self.finite and whole:
            plain, others = self._real(self.plain), self._real(weighted)
            self._left = narrowed(self._left, plain, others, self._tags, number)
        else:
            self._left = []
        if self._keep or not self._left:
            self._kept[number] = weighted

    @property
    def lacks(self) -> bool:
        """Whether all passes are to be taken in once more, and kept (see :meth:`again`)."""
        unheard = not self._heard.issubset(self._present)
        short = not self._left and len(self._kept) < len(self._tags.exponents)
        return self.finite and self._samples > 1 and (unheard or short)

    def again(self) -> Evidence:
        """The same call, to take in all passes once more."""
        return Evidence(self._site, self._given, self._tags, self._samples, self._heard, keep=True)

    def owners(self) -> tuple[Owners | None, bool]:
        """Where the samples lie, and whether nothing else explains the gradients; once nothing is lacking."""
        if not self.finite and self._samples > 1:
            return None, False  # no ratio tells whose that is
        if self._left or self._samples == 1 or len(self._present) != 1:
            first = self._left[0] if self._left else None
            return first, bool(self._present) and len(self._left) < 2
        passes = [self.plain, *(self._kept[number] for number in sorted(self._kept))]
        gradients = [real for outputs in passes for real in self._real(outputs)]
        if len(gradients) < len(passes):
            return None, False
        plain = self.plain[self._present[0]]
        assert plain is not None
        return _irregular(self._site, gradients, plain.dim(), self._tags, self._samples), False

    def _real(self, outputs: Outputs) -> list[Tensor]:
        present = [g for j in self._present if (g := outputs[j]) is not None]
        return [torch.view_as_real(g) if g.is_complex() else g for g in present]


def _is_heard(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _is_finite(outputs: Outputs) -> bool:
    return all(is_finite(g) for g in outputs if g is not None)


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
    owner = tags.sample([exponent_of((up.gather(1, place) / pivot).squeeze(1)) for up in tagged[::2]])
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
