"""Networks drawn at random, made to confuse whoever guesses from shapes which axis runs over the samples.

Sizes collide (positions, channels and samples are often equal), axes are permuted, rows flattened in either order,
layers shared, weights computed, results changed in place, samples dead, silent or loud. A drawn network is a function
of its seed and its sizes alone, so that it can be run again on other inputs, and on one sample at a time. What it is
drawn from stands in ``tests/random_steps``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.random_steps import (
    arrangements as arrangements,
    coupling as coupling,
    functions as functions,
    layers as layers,
    raw_parameters as raw_parameters,
    routing as routing,
    sequences as sequences,
    weights as weights,
)
from tests.random_steps.registry import COUPLING, STEPS


class RandomNetwork(nn.Module):
    """A network whose steps are drawn anew, and alike, in each forward; layers are made in the first.

    Args:
        seed: of the steps and the weights.
        samples: a size to collide with, ``N`` of most batches.
        positions: ``T``.
        channels: of the input ``[N, T, channels]``.
        steps: names of what to draw from, or of what to do.
        dtype: of the layers.
        in_order: take all the steps one after another, and draw their details alone.
    """

    def __init__(
        self,
        seed: int,
        samples: int,
        positions: int,
        channels: int,
        steps: Sequence[str],
        dtype: torch.dtype,
        in_order: bool = False,
    ) -> None:
        super().__init__()
        self.dtype, self.steps, self.in_order = dtype, steps, in_order
        self.seed, self.samples, self.positions, self.channels = seed, samples, positions, channels
        self.layers, self.raw = nn.ModuleDict(), nn.ParameterDict()
        self.drawn: list[str] = []

    def forward(self, input: Tensor, which: Tensor) -> Tensor:
        """From ``[N, T, C]``, and the numbers ``[N]`` of the samples, to ``[N, features]``."""
        self.draw, self.drawn, self.made = random.Random(self.seed), [], []
        hidden, self.which, self.saved = input, which, []
        # Nobody sees a coupling below which nothing is trained.
        self.freezes = not set(self.steps) & set(COUPLING)
        count = len(self.steps) if self.in_order else self.draw.randint(2, 7)
        for number in range(count):
            name = self.steps[number] if self.in_order else self.draw.choice(self.steps)
            self.drawn.append(name)
            self.saved.append(hidden)
            hidden = (STEPS.get(name) or COUPLING[name])(self, hidden)
            assert hidden.dim() == 3 and hidden.shape[:2] == input.shape[:2], name
        # Of its own, and not frozen: some parameter always has a gradient.
        channels, outputs = hidden.shape[-1], self.size()
        self.freezes = False
        return self.layer(f"head_{channels}_{outputs}", lambda: nn.Linear(channels, outputs))(hidden).flatten(
            1
        )

    def layer(self, key: str, make: Callable[[], nn.Module]) -> nn.Module:
        """A layer of its own for each call, or one that an earlier call made from the same key."""
        name = self._name(key)
        frozen = self.draw.random() < 0.04 and self.freezes
        if name not in self.layers:
            with torch.random.fork_rng():
                torch.manual_seed(1000 * self.seed + len(self.made))
                layer = make()
                for parameter in layer.parameters():
                    if parameter.dim() == 1:
                        nn.init.normal_(parameter, 0.5)
                # Batch norm is only independent of the other samples in eval mode.
                self.layers[name] = layer.to(self.dtype).eval()
                if frozen:
                    layer.requires_grad_(False)
        return self.layers[name]

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter that belongs to no layer, of its own or one that an earlier step made of this shape."""
        name = self._name("raw" + "x".join(map(str, shape)))
        if name not in self.raw:
            generator = torch.Generator().manual_seed(1000 * self.seed + len(self.made))
            values = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
            self.raw[name] = nn.Parameter(values.to(self.dtype))
        return self.raw[name]

    def _name(self, key: str) -> str:
        shared = [name for name in self.made if name.split("__")[0] == key]
        if shared and self.draw.random() < 0.4:
            return self.draw.choice(shared)
        self.made.append(f"{key}__{len(self.made)}")
        return self.made[-1]

    def size(self) -> int:
        """A number of channels that likely collides with another size."""
        return self.draw.choice([self.samples, self.positions, self.channels, 2, 4, 6])

    def ids(self, count: int) -> Tensor:
        """Whole numbers below ``count`` for each sample and position, ``[N, T]``."""
        numbers = self.which.unsqueeze(1) * self.positions + torch.arange(self.positions)
        return numbers * 7 % count

    def make_linear(self, inputs: int, outputs: int | None = None) -> nn.Module:
        """A linear layer."""
        outputs = self.size() if outputs is None else outputs
        bias = self.draw.random() < 0.7
        return self.layer(f"linear_{inputs}_{outputs}_{bias}", lambda: nn.Linear(inputs, outputs, bias=bias))

    def linear(self, hidden: Tensor, outputs: int | None = None) -> Tensor:
        """The output of a linear layer, which is called in one way or another."""
        layer = self.make_linear(hidden.shape[-1], outputs)
        return layer(input=hidden) if self.draw.random() < 0.2 else layer(hidden)
