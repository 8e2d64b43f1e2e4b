"""gradbatch, by its public interface."""

from torch import nn

import gradbatch
from benchmarks.cases import Batch
from benchmarks.contestants.base import Contestant, Step
from benchmarks.quantities import CLIP, QUANTITIES, Answer

ASKED: dict[str, gradbatch.Quantity] = {
    "BatchGrad": gradbatch.BatchGrad(),
    "BatchL2Grad": gradbatch.BatchL2Grad(),
    "BatchDotGrad": gradbatch.BatchDotGrad(),
    "SumGradSquared": gradbatch.SumGradSquared(),
    "Variance": gradbatch.Variance(),
    "clipped sum": gradbatch.ClippedSum(CLIP),
}


class GradBatch(Contestant):
    """One ``gradbatch.backward`` a step, into the memory of the step before where the quantity is large."""

    # From the third step on, where the samples lie is remembered.
    name, offers, warm_up = "gradbatch", frozenset(QUANTITIES), 3

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        gradbatch.extend(model)
        asked, kept = ASKED[quantity], quantity == "BatchGrad"
        earlier: list[gradbatch.Results] = []

        def step() -> Answer:
            out = earlier.pop() if earlier else None
            losses = batch.losses(model)
            # As a training step: nothing goes back through the graph once more.
            results = gradbatch.backward(model, losses, asked, retain_graph=False, out=out)
            if kept:
                earlier.append(results)
            result = results[asked]
            return {"total": result.total()} if asked.additive else dict(result)

        return step
