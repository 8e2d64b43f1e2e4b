"""Private training with one mistake in it each: what an audit has to find.

What patches returns the options that ``canaries.released`` is to be called with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbatch import ClippedSum, PerSampleGrad, privacy
from gradbatch.privacy import private
from tests.privacy.runs import seeded


class Scaled(privacy.GaussianNoise):
    """Noise with another standard deviation than was asked for."""

    def __init__(self, scale: float) -> None:
        super().__init__(seeded())
        self.scale = scale

    def add_to(self, tensors: Any, std: Any) -> None:
        stds = [std] * len(tensors) if isinstance(std, float | int) else std
        super().add_to(tensors, [self.scale * each for each in stds])


class Repeated(privacy.GaussianNoise):
    """The same noise in each step: a generator that is seeded where it is used."""

    def add_to(self, tensors: Any, std: Any) -> None:
        self.generator = seeded()
        super().add_to(tensors, std)


def noise_in_parts(patch: pytest.MonkeyPatch, scale: float, part: int) -> dict[str, Any]:
    """Noise of ``scale`` clipping norms with every part of so many records, and none with the batch."""
    clip, noise = private.clipped_sums, privacy.GaussianNoise(seeded())

    def clip_and_noise(*args: Any, **options: Any) -> Any:
        clipped, sums = clip(*args, **options)
        noise.add_to(sums.values(), scale)
        return clipped, sums

    patch.setattr(private, "clipped_sums", clip_and_noise)
    return {"noise": Scaled(0.0), "part": part}


def batches_clipped(patch: pytest.MonkeyPatch, divisor: float = 1.0) -> dict[str, Any]:
    """The sum of a batch over ``divisor`` is cut to the clipping norm, in place of each sample's gradient."""
    prepare = ClippedSum.prepare

    def of_the_batch(self: ClippedSum, grads: Mapping[str, PerSampleGrad]) -> ClippedSum:
        prepared = prepare(self, grads)
        norm = torch.cat([grad.sum().flatten() for grad in grads.values()]).norm() / divisor
        return prepared._with(factors=torch.ones_like(prepared.factors) * (self.max_norm / norm).clamp(max=1))

    patch.setattr(ClippedSum, "prepare", of_the_batch)
    return {}


def layer_left_out(patch: pytest.MonkeyPatch, layer: str, scaled: bool) -> dict[str, Any]:
    """A layer does not count in the norms; its gradients are scaled like the others, or not at all."""
    prepare, of = ClippedSum.prepare, ClippedSum.of

    def of_the_others(self: ClippedSum, grads: Mapping[str, PerSampleGrad]) -> ClippedSum:
        return prepare(self, {name: grad for name, grad in grads.items() if not name.startswith(layer)})

    def unclipped(self: ClippedSum, name: str) -> ClippedSum:
        if scaled or not name.startswith(layer):
            return of(self, name)
        return self._with(factors=torch.ones_like(self.factors))

    patch.setattr(ClippedSum, "prepare", of_the_others)
    patch.setattr(ClippedSum, "of", unclipped)
    return {}


def shuffled(patch: pytest.MonkeyPatch, order: Tensor) -> None:
    """Batches cut from a permutation: ``order [T, n]`` has the records of each."""
    batches = iter(order.tolist())
    draw: Callable[[Any], list[int]] = lambda _: next(batches)  # noqa: E731
    patch.setattr(privacy.PoissonSampler, "draw", draw)
