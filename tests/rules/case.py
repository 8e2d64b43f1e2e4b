"""What a case of a layer rule is: a layer with some options, and a batch for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import ORACLES, Gradients, projection
from tests.rules.arrangements import BATCH, Arranged, Arrangement

ANY_ORACLE = tuple(ORACLES)
# vmap cannot run layers that write to their buffers or weights, sort, or build bags of ids.
WITHOUT_VMAP = ("one hot", "loop")
# Where a layer counts over the batch, a sample's own gradient is that of a batch of one.
ONE_AT_A_TIME = ("loop",)


@dataclass(frozen=True)
class Case:
    """A layer with some options, and a batch for it.

    Args:
        name: for test ids.
        build: the layer; its parameters and buffers are then filled with random numbers.
        draw: ``n`` samples on axis 0, as the layer's arguments, in float64 or of ids.
        arrangement: where the layer finds the samples.
        keywords: names of the arguments that are passed by keyword.
        options: further arguments of the forward.
        training: the mode of the layer.
        oracles: the references that are right for it, the first is used.
        adds_up: whether the sum over samples is the gradient of the summed losses.
        rereads: whether the rule reads a tensor that the layer's own forward changes: refused after a second forward.
        fill: from random numbers to the parameters' values.
        stand_in: makes a layer that computes the same, for the oracles, where torch's own gradient is wrong.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], Sequence[Tensor]]
    arrangement: Arrangement = BATCH
    keywords: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    training: bool = True
    oracles: Sequence[str] = ANY_ORACLE
    adds_up: bool = True
    rereads: bool = False
    fill: Callable[[Tensor], Tensor] = torch.clone
    stand_in: Callable[[nn.Module], nn.Module] | None = None

    def model(self, device: torch.device, dtype: torch.dtype = torch.double) -> Arranged:
        """The layer as a model that takes and returns the samples first; the same numbers every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            layer = self.build()
            with torch.no_grad():
                for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                    if tensor.is_floating_point():
                        # Exact in every dtype, so that float32 is compared with the same numbers in float64.
                        values = self.fill(torch.randn(tensor.shape).bfloat16())
                        tensor.copy_(values.abs() + 0.5 if name == "running_var" else values)
        layer = layer.train(self.training).to(device, dtype)
        return Arranged(layer, self.arrangement, self.keywords, self.options)

    def batch(
        self, n: int, device: torch.device, dtype: torch.dtype = torch.double
    ) -> tuple[list[Tensor], Tensor]:
        """Inputs and a target for ``n`` samples; the same numbers every time, whatever the dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            inputs = [x.bfloat16() if x.is_floating_point() else x for x in self.draw(n)]
            inputs = [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs]
            with torch.no_grad():
                shape = self.model(device, dtype)(*inputs).shape
            return inputs, torch.randn(shape).bfloat16().to(device, dtype)

    def reference(self, inputs: Sequence[Tensor], target: Tensor, oracle: str | None = None) -> Gradients:
        """Per-sample gradients in float64, by the case's own oracle if no other is named."""
        model = self.model(target.device)
        if self.stand_in is not None:
            model.layer = self.stand_in(model.layer)
        exact = [x.double() if x.is_floating_point() else x for x in inputs]
        return ORACLES[oracle or self.oracles[0]](model, projection, exact, target.double())


def floats(*shape: int) -> Callable[[int], list[Tensor]]:
    return lambda n: [torch.randn(n, *shape, dtype=torch.double)]


def pairs_of_floats(first: Sequence[int], second: Sequence[int]) -> Callable[[int], list[Tensor]]:
    return lambda n: [torch.randn(n, *shape, dtype=torch.double) for shape in (first, second)]


def ids(vocabulary: int, *shape: int, dtype: torch.dtype = torch.long) -> Callable[[int], list[Tensor]]:
    return lambda n: [torch.randint(vocabulary, (n, *shape), dtype=dtype)]


def materialised(lazy: Callable[[], nn.Module], shape: Sequence[int]) -> nn.Module:
    """A lazy layer after its first forward, which turned it into what it stands for."""
    layer = lazy()
    layer(torch.randn(2, *shape))
    return layer
