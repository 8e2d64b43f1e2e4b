"""Steps that are calls of a layer which has a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_steps.registry import RANDOM, marked, step

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


@step
def linear(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden)


@step
def linear_over_positions(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.make_linear(network.positions, network.positions)(hidden.mT).mT


@step
def convolution(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    layer = network.layer(f"conv_{channels}_{out}", lambda: nn.Conv1d(channels, out, 3, padding=1))
    return layer(hidden.transpose(1, 2)).transpose(1, 2)


@step
def grouped(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    layer = network.layer(
        f"depthwise_{channels}", lambda: nn.Conv2d(channels, 2 * channels, (1, 2), groups=channels)
    )
    images = hidden.movedim(-1, 1).unsqueeze(2)
    return layer(F.pad(images, (0, 1))).squeeze(2).movedim(1, -1)


@step
def transposed_convolution(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    layer = network.layer(
        f"transposed_{channels}", lambda: nn.ConvTranspose1d(channels, channels, 2, stride=2, groups=channels)
    )
    return layer(hidden.mT)[..., ::2].mT


@step
def norm(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    kind = network.draw.choice(["layer", "rms", "group", "instance", "batch"])
    if kind == "layer":
        return network.layer(f"layernorm_{channels}", lambda: nn.LayerNorm(channels))(hidden)
    if kind == "rms":
        return network.layer(f"rmsnorm_{channels}", lambda: nn.RMSNorm(channels))(hidden)
    if kind == "group":
        layer = network.layer(f"groupnorm_{channels}", lambda: nn.GroupNorm(1, channels))
    elif kind == "instance" and network.positions > 1:
        layer = network.layer(f"instance_{channels}", lambda: nn.InstanceNorm1d(channels, affine=True))
    else:
        layer = network.layer(f"batch_{channels}", lambda: nn.BatchNorm1d(channels))
    return layer(hidden.mT).mT


@step
def prelu(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.layer("prelu", nn.PReLU)(hidden)


@step
def bilinear(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    layer = network.layer(f"bilinear_{channels}_{out}", lambda: nn.Bilinear(channels, channels, out))
    return layer(hidden, hidden.tanh())


@step
def embedding(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    layer = network.layer(f"embedding_{channels}", lambda: nn.Embedding(5, channels, padding_idx=1))
    ids = network.ids(5)
    if network.draw.random() < 0.5:
        return hidden + layer(ids.T).transpose(0, 1)
    return hidden + layer(ids)


@step
def bag(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, mode = hidden.shape[-1], network.draw.choice(["sum", "mean", "max"])
    layer = network.layer(f"bag_{channels}_{mode}", lambda: nn.EmbeddingBag(5, channels, mode=mode))
    ids = (network.ids(5).flatten().unsqueeze(1) + torch.tensor([0, 3, 1])) % 5
    return hidden + layer(ids).view(*hidden.shape)


@step
def pool(network: RandomNetwork, hidden: Tensor) -> Tensor:
    pooled = network.linear(hidden.mean(1))
    return pooled.unsqueeze(1).expand(-1, network.positions, -1)


@step
def tied(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]

    def pair() -> nn.Module:
        first, second = nn.Linear(channels, channels), nn.Linear(channels, channels)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)

    return network.layer(f"tied_{channels}", pair)(hidden)


@step
def activation(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.draw.choice([torch.tanh, torch.relu, F.gelu, torch.sigmoid, torch.square])(hidden)


@marked(RANDOM)
def dropout(network: RandomNetwork, hidden: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(network.seed)
        return F.dropout(hidden, 0.3)
