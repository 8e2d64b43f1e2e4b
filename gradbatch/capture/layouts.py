"""Where the samples lie in gradients: regularly, by rows, or by elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

Gradients = Sequence[Sequence[Tensor | None]]
"""The gradients of each call's outputs, in the outputs' shapes; ``None`` where none arrived."""


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are; a finite sum shows it without a temporary."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def largest(gradient: Tensor | None) -> float:
    """The largest finite absolute value; zero where there is none."""
    return 0.0 if gradient is None or not gradient.numel() else float(sizes(gradient.reshape(1, -1)))


def sizes(rows: Tensor) -> Tensor:
    """Largest finite absolute value of each row, ``[N, elements]`` to ``[N]``."""
    found = torch.linalg.vector_norm(rows, torch.inf, 1)  # in one pass, without a temporary
    return found if found.isfinite().all() else rows.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)


def by_sample(layout: SampleLayout, gradient: Tensor) -> Tensor:
    """``[N, elements of a sample]``; one element where the call returns a number a sample."""
    return layout.sample_first(gradient).unsqueeze(-1).flatten(1)


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
