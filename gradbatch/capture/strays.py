"""Gradients of the user's backward where none was measured: chance, rounding, a NaN of a sample's, or a stranger's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbatch.capture.explanation import unowned
from gradbatch.capture.layouts import Owners
from gradbatch.capture.tags import PRECISION
from gradbatch.errors import UnsupportedLayer
from gradbatch.rules import Layout, SampleLayout

NONE = torch.zeros(0)
"""Stands for no unseen elements at all, where nothing had to be measured."""


def unseen_in(gradient: Tensor | None) -> Tensor | None:
    """Elements of a measured gradient that the model's outputs do not depend on; ``None``: on none of them."""
    with torch.no_grad():
        return None if gradient is None else gradient == 0


@dataclass(frozen=True)
class Place:
    """Where a gradient arrives.

    Args:
        name: of the layer.
        samples: ``N``.
        unseen: elements that had no gradient when they were measured; ``None``: all of them.
        owners: where the samples lie in it.
        broken: samples whose own loss is not finite, if any.
    """

    name: str
    samples: int
    unseen: Tensor | None
    owners: Owners | Layout
    broken: Tensor | None

    def without_strays(self, gradient: Tensor, others: Sequence[Tensor]) -> Tensor | None:
        """What of a gradient the samples own; ``None``: nothing.

        Args:
            gradient: as it arrived.
            others: that arrived in the same forward, to tell what is large.

        Raises:
            CoupledSamples: there is something that nobody is known to own.
            UnsupportedLayer: so is something that is not finite.
        """
        part = gradient if self.unseen is None else gradient.where(self.unseen, 0)
        lost = ~part.isfinite()
        if self.broken is not None and bool(self.broken.any() & lost.any()):
            # A derivative of zero, as of a saturated sigmoid, times a loss that is not finite: a NaN of that sample.
            lost = self._of_nobody(lost, self.broken)
        # What no output depends on has no gradient, whatever becomes of zero times NaN.
        gradient = gradient.masked_fill(lost, 0)
        part = part.where(part.isfinite(), 0)
        by_chance = isinstance(self.owners, SampleLayout) and self.unseen is not None and _are_few(part)
        if not by_chance and not self._is_rounding(part, [gradient, *others]):
            raise unowned(self.name, self.samples)
        return None if self.unseen is None and self.samples > 1 else gradient

    def _of_nobody(self, lost: Tensor, broken: Tensor) -> Tensor:
        """Which elements that are neither finite nor measured belong to none of the broken samples."""
        if self.samples == 1:
            return torch.zeros_like(lost)
        if self.unseen is None or not isinstance(self.owners, SampleLayout):
            raise UnsupportedLayer(
                f"{self.name}: gradients that are not finite arrived where none was measured, so nobody knows whether "
                f"they are of the samples {broken.nonzero().flatten().tolist()}, whose losses are not finite. Leave "
                "these out of the batch, or use gradbatch.backward(model, losses, ...) with one loss a sample"
            )
        axis = self.owners.axis
        if axis is None:
            return lost & ~broken.to(lost.device)
        rows = broken[self.owners.owner(lost.shape[axis]).to(broken.device)].to(lost.device)
        return lost & ~rows.view(-1, *(1,) * (lost.dim() - axis - 1))

    def _is_rounding(self, part: Tensor, others: Sequence[Tensor]) -> bool:
        """Whether a part of a gradient is zero but for rounding: sums that cancel are exactly zero at times only.

        Where it is kept, as part of a gradient whose owners are known from the rest of it, an operation may have
        enlarged the rounding error, as a normalisation does; where it is left out, it may not. What it is compared
        with is seen or is refused itself.
        """
        if not part.any():
            return True
        dtype = part.real.dtype if part.is_complex() else part.dtype
        precision = PRECISION.get(dtype, PRECISION[torch.float16])
        largest = max(float(other.abs().nan_to_num(0.0, 0.0, 0.0).max()) for other in others if other.numel())
        allowed = precision.absolute if self.unseen is None else precision.relative
        return float(part.abs().max()) <= allowed * largest


def _are_few(part: Tensor) -> bool:
    """Whether so few elements are not zero that those may have been exactly zero by chance when they were measured.

    Sums of terms of both signs are so in about one of ``1 / eps`` cases, somewhat more often where they are alike.
    Whose such an element is follows from the elements around it, where the samples lie regularly.
    """
    chance = 4 * torch.finfo(part.dtype).eps * part.numel() + min(8, part.numel() // 64)
    return int(part.count_nonzero()) <= chance
