"""What an entry of the zoo is, and what is done to any model before it is checked."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SAMPLES = 3

Call = Callable[[], Any]


@dataclass(frozen=True)
class Entry:
    """A whole model that somebody else wrote, at a small size.

    Args:
        name: what the model is called in its library.
        source: the library.
        build: makes the model, in eval mode with random weights, and a call of it on :data:`SAMPLES` samples.
    """

    name: str
    source: str
    build: Callable[[], tuple[nn.Module, Call]]

    def __str__(self) -> str:
        return f"{self.source}/{self.name}"


def settled(model: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """The model in eval mode and float64, at weights where every gradient is a number worth comparing.

    Libraries initialise layer scales, class tokens and the last layer of a residual branch with zeros or nearly so,
    behind which every gradient is zero and any answer right: nothing stays constant. The statistics of batch
    normalisation become those of the batch, without which activations shrink from layer to layer; not as small as
    those of a channel that is the same in all samples, with which they would explode.
    """
    model.eval().double()
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and bool((p - p.flatten()[0]).abs().max() < 1e-4):
                p.add_(torch.randn_like(p), alpha=0.1)
        normalisations = [part for part in model.modules() if isinstance(part, _BatchNorm)]
        if normalisations:
            momenta = [part.momentum for part in normalisations]
            for part in normalisations:
                part.train().momentum = 1.0
            call()
            for part, momentum in zip(normalisations, momenta, strict=True):
                part.eval().momentum = momentum
                part.running_var.clamp_(min=float(part.running_var.mean()) / 10)
    return model, call


def floating_outputs(outputs: Any) -> Iterator[Tensor]:
    """Of nested outputs, the floating ones that have the samples on axis 0 and depend on something trainable."""
    if isinstance(outputs, Tensor):
        if (
            outputs.dim()
            and len(outputs) == SAMPLES
            and outputs.is_floating_point()
            and outputs.requires_grad
        ):
            yield outputs
    elif isinstance(outputs, Mapping | list | tuple):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from floating_outputs(part)


def own_losses(outputs: Any) -> Tensor:
    """A random projection of each sample's own rows of all outputs, ``[SAMPLES]``."""
    losses = [
        (part * torch.randn_like(part)).flatten(1).sum(1) / part[0].numel() ** 0.5
        for part in floating_outputs(outputs)
    ]
    if not losses:
        raise ValueError("no output has the samples on axis 0")
    return torch.stack([own.double() for own in losses]).sum(0)


def images(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(SAMPLES, channels, size, size, dtype=torch.double)


def token_ids(vocabulary: int, length: int = 7) -> Tensor:
    """Random ids above those that libraries reserve (padding, begin, end)."""
    return torch.randint(5, vocabulary, (SAMPLES, length))
