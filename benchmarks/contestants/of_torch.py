"""What torch has by itself: a plain step, and ``torch.func.vmap`` of ``grad``."""

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.cases import Batch
from benchmarks.contestants.base import Contestant, Step
from benchmarks.quantities import FROM_GRADS, QUANTITIES, Answer


class Plain(Contestant):
    """Forward and backward of the mean loss: what everything is compared with."""

    name, offers = "plain", frozenset()

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        def step() -> Answer:
            model.zero_grad()
            batch.losses(model).mean().backward()
            return {}

        return step


class Vmap(Contestant):
    """The gradient of one sample's loss, batched; stands for computing all gradients and then what was wanted."""

    name, offers = "vmap", frozenset(QUANTITIES)

    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = functional_call(model, parameters, (x.unsqueeze(0),))
            return batch.loss(outputs, y.unsqueeze(0))[0]

        per_sample, reduce = vmap(grad(loss), in_dims=(None, 0, 0)), FROM_GRADS[quantity]

        def step() -> Answer:
            parameters = {name: p.detach() for name, p in model.named_parameters()}
            return reduce(per_sample(parameters, batch.inputs, batch.labels))

        return step
