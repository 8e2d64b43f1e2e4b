"""gradbatch, by its public interface."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

import gradbatch
from benchmarks.cases import Batch
from benchmarks.contestants.base import Contestant, Step
from benchmarks.quantities import QUANTITIES, Answer, clip_coefficients

ASKED: dict[str, gradbatch.Quantity] = {
    "BatchGrad": gradbatch.BatchGrad(),
    "BatchL2Grad": gradbatch.BatchL2Grad(),
    "BatchDotGrad": gradbatch.BatchDotGrad(),
    "SumGradSquared": gradbatch.SumGradSquared(),
    "Variance": gradbatch.Variance(),
}


@dataclass(frozen=True, eq=False)
class KeptNorm(gradbatch.Quantity):
    """Squared norms that keep the structures they were computed of, for sums weighted by what follows from them."""

    kept: list[gradbatch.PerSampleGrad] = field(default_factory=list)
    name: ClassVar[str] = "kept_norm"
    additive: ClassVar[bool] = True

    def reduce(self, grad: gradbatch.PerSampleGrad) -> Tensor:
        self.kept.append(grad)
        return grad.squared_norm()


def clipped_sum(model: nn.Module, losses: Tensor) -> Answer:
    """Norms and the sum weighted by them, in one backward pass."""
    norms = KeptNorm()
    found = gradbatch.backward(model, losses, norms)[norms]
    return weighted_sums(found, norms.kept, clip_coefficients(found.total()))


def weighted_sums(
    names: Iterable[str], kept: Iterable[gradbatch.PerSampleGrad], coefficients: Tensor
) -> Answer:
    """The second half of the clipped sum."""
    return {name: grad.weighted_sum(coefficients) for name, grad in zip(names, kept, strict=True)}


class GradBatch(Contestant):
    """One ``gradbatch.backward`` a step."""

    # From the third step on, where the samples lie is remembered.
    name, offers, warm_up = "gradbatch", frozenset(QUANTITIES), 3

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        gradbatch.extend(model)
        if quantity == "clipped sum":
            return lambda: clipped_sum(model, batch.losses(model))
        asked = ASKED[quantity]

        def step() -> Answer:
            result = gradbatch.backward(model, batch.losses(model), asked)[asked]
            return {"total": result.total()} if asked.additive else dict(result)

        return step
