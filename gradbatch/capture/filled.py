"""What is not finite in measured gradients, and what can be put in its place to measure the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.capture.elements import NOBODY
from gradbatch.capture.layouts import Gradients, largest


def without_dead(gradients: Gradients, followed: Gradients) -> Gradients:
    """Zeros where no loss reaches an element: whatever becomes of zero times NaN, nothing depends on it."""
    return [
        [
            g if g is None or owner is None else g.masked_fill(~g.isfinite() & (owner == NOBODY), 0)
            for g, owner in zip(*outputs, strict=True)
        ]
        for outputs in zip(gradients, followed, strict=True)
    ]


def filled(runs: Sequence[Gradients], followed: Gradients, exponents: Sequence[Tensor]) -> list[Gradients]:
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
        values = (largest(runs[0][i][j]) or 1.0) * weights[owner.clamp(0, len(weights) - 1)]
        return torch.where(unknown & single, values, gradient)

    return [
        [[fill(i, j, number) for j in range(len(outputs))] for i, outputs in enumerate(gradients)]
        for number, gradients in enumerate(runs)
    ]


def without_zeros(runs: Sequence[Gradients]) -> list[Gradients]:
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
