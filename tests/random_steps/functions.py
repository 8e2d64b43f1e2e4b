"""Steps that call the functions of layers with parameters of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.random_steps.registry import step

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


@step
def functional_linear(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    bias = network.parameter(out) if network.draw.random() < 0.5 else None
    return F.linear(hidden, network.parameter(out, channels), bias)


@step
def functional_head(network: RandomNetwork, hidden: Tensor) -> Tensor:
    layer = network.make_linear(hidden.shape[-1], hidden.shape[-1])
    return F.linear(torch.tanh(layer(hidden)), layer.weight)


@step
def functional_convolution(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    bias = network.parameter(out) if network.draw.random() < 0.5 else None
    return F.conv1d(hidden.mT, network.parameter(out, channels, 3), bias, padding=1).mT


@step
def functional_grouped_convolution(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, bias = hidden.shape[-1], None
    images = F.pad(hidden.mT.unsqueeze(2), (0, 1))
    weight = network.parameter(2 * channels, 1, 1, 2)
    if network.draw.random() < 0.5:
        bias = network.parameter(2 * channels)
    return F.conv2d(images, weight, bias, groups=channels).squeeze(2).mT


@step
def functional_transposed_convolution(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    if network.draw.random() < 0.5:
        return F.conv_transpose1d(hidden.mT, network.parameter(channels, 2, 3), padding=1).mT
    weight = network.parameter(channels, 1, 1, 2)
    return F.conv_transpose2d(hidden.mT.unsqueeze(2), weight, groups=channels)[:, :, 0, 1:].mT


@step
def functional_norm(network: RandomNetwork, hidden: Tensor) -> Tensor:
    positions, channels = hidden.shape[1:]
    weight, bias = network.parameter(channels), network.parameter(channels)
    table = network.parameter(positions, channels)
    mean, variance = torch.zeros(channels).to(hidden), torch.ones(channels).to(hidden)
    ways = [
        lambda: F.layer_norm(hidden, (channels,), weight, bias),
        lambda: F.layer_norm(hidden, (positions, channels), table),
        lambda: F.group_norm(hidden.mT, 1, weight, bias).mT,
        lambda: F.rms_norm(hidden, (channels,), weight),
        lambda: F.batch_norm(hidden.mT, mean, variance, weight, bias).mT,
        lambda: F.instance_norm(hidden.mT, weight=weight, bias=bias).mT if positions > 1 else hidden * weight,
    ]
    return network.draw.choice(ways)()


@step
def functional_embedding_bag(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, table = hidden.shape[-1], network.parameter(5, hidden.shape[-1])
    ids = (network.ids(5).flatten().unsqueeze(1) + torch.tensor([0, 3, 1])) % 5
    weights = hidden.reshape(-1, channels)[:, :1].expand(-1, 3).tanh()
    if network.draw.random() < 0.5:
        bags = F.embedding_bag(ids, table, mode="sum", per_sample_weights=weights)
    else:
        bags = F.embedding_bag(ids, table, mode=network.draw.choice(["sum", "mean", "max"]))
    return hidden + bags.view(hidden.shape)


@step
def functional_bilinear(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    return F.bilinear(hidden, hidden.tanh(), network.parameter(out, channels, channels))


@step
def functional_prelu(network: RandomNetwork, hidden: Tensor) -> Tensor:
    if network.draw.random() < 0.5:
        return F.prelu(hidden, network.parameter(1))
    return F.prelu(hidden.mT, network.parameter(hidden.shape[-1])).mT


@step
def functional_checkpointed(network: RandomNetwork, hidden: Tensor) -> Tensor:
    weight = network.parameter(hidden.shape[-1], hidden.shape[-1])
    scale = network.parameter(hidden.shape[-1])

    def block(h: Tensor) -> Tensor:
        return torch.tanh(F.linear(h, weight) * scale) @ weight

    return checkpoint(block, hidden, use_reentrant=False)


@step
def spectrum(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """Mixes positions by a filter of the spectrum, real or complex."""
    positions, channels = hidden.shape[1:]
    frequencies = positions // 2 + 1
    spectrum = torch.fft.rfft(hidden, dim=1)
    kernel, filters = network.parameter(positions), network.parameter(frequencies, channels, 2)
    ways = [
        lambda: spectrum * torch.view_as_complex(filters),
        lambda: spectrum * torch.fft.rfft(kernel).unsqueeze(-1),
        lambda: spectrum * filters[..., 0],
        lambda: spectrum * torch.complex(filters[..., 0], filters[..., 1]),
    ]
    return torch.fft.irfft(network.draw.choice(ways)(), positions, dim=1)


@step
def distances(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """To learned centres."""
    centres = network.parameter(3, hidden.shape[-1])
    ways = [
        lambda: (hidden.unsqueeze(2) - centres).square().sum(-1),
        lambda: torch.cdist(hidden, centres.expand(len(hidden), -1, -1)),
        lambda: F.cosine_similarity(hidden.unsqueeze(2), centres, dim=-1),
        lambda: F.normalize(hidden, dim=-1) @ F.normalize(centres, dim=-1).mT,
        lambda: (hidden @ centres.mT).softmax(-1) @ centres,
    ]
    return network.draw.choice(ways)()
