"""BackPACK: one extension a quantity."""

import warnings

from torch import nn

from benchmarks.cases import Batch
from benchmarks.contestants.base import Contestant, Step, per_sample_attribute
from benchmarks.quantities import FROM_GRADS, Answer


class BackPACK(Contestant):
    """The extension of the quantity's name; what has none follows from its per-sample gradients."""

    name = "BackPACK"
    offers, derives = frozenset({"BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"}), True

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        import backpack
        from backpack import extensions

        extended = backpack.extend(model)
        extension = {
            "BatchL2Grad": extensions.BatchL2Grad,
            "SumGradSquared": extensions.SumGradSquared,
            "Variance": extensions.Variance,
        }.get(quantity, extensions.BatchGrad)()

        def step() -> Answer:
            extended.zero_grad()
            # Of a mean it would compute everything divided by N or its square.
            loss = batch.losses(extended).sum()
            with backpack.backpack(extension), warnings.catch_warnings():
                # It warns of a layer that it has nothing for; per_sample_attribute says so for each parameter.
                warnings.simplefilter("ignore")
                loss.backward()
            found = per_sample_attribute(extended, extension.savefield)
            if quantity == "BatchL2Grad":
                return {"total": sum(found.values())}
            return found if quantity in self.offers else FROM_GRADS[quantity](found)

        return step
