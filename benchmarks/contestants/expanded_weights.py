"""ExpandedWeights, which torch keeps in ``torch.nn.utils``."""

from torch import nn

from benchmarks.cases import Batch
from benchmarks.contestants.base import Contestant, Step, per_sample_attribute
from benchmarks.quantities import FROM_GRADS, Answer


class ExpandedWeights(Contestant):
    """``call_for_per_sample_grads``."""

    name, offers, derives = "ExpandedWeights", frozenset({"BatchGrad"}), True

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

        reduce = FROM_GRADS[quantity]

        def step() -> Answer:
            model.zero_grad()
            batch.losses(call_for_per_sample_grads(model, batch_size=len(batch))).sum().backward()
            return reduce(per_sample_attribute(model, "grad_sample"))

        return step
