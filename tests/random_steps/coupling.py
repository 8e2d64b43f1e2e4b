"""Steps in which samples depend on each other: each right after parameters, without which nothing would be coupled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_steps.registry import coupling

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


@coupling
def centred_over_the_batch(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    return hidden - 0.5 * hidden.mean(0, keepdim=True)


@coupling
def batch_statistic(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    return network.linear(hidden) * network.linear(hidden.mean(0)).mean()


@coupling
def sum_over_the_batch(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden).cumsum(0)


@coupling
def attention_over_the_batch(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    channels = hidden.shape[-1]
    layer = network.layer(f"wrong_axis_{channels}", lambda: nn.MultiheadAttention(channels, 1))
    return layer(hidden, hidden, hidden, need_weights=False)[0]


@coupling
def one_sequence(network: RandomNetwork, hidden: Tensor) -> Tensor:
    flat = network.linear(hidden).flatten(0, 1).unsqueeze(0)
    return F.scaled_dot_product_attention(flat, flat, flat.tanh()).view(*hidden.shape[:2], -1)


@coupling
def batch_norm_of_the_batch(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    weight = network.parameter(hidden.shape[-1]) if network.draw.random() < 0.5 else None
    if len(hidden) * network.positions == 1:
        return hidden  # torch refuses a single value
    return F.batch_norm(hidden.mT, None, None, weight, training=True, eps=0.1).mT


@coupling
def contrast(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    flat = hidden.flatten(1).tanh()
    return hidden * (flat @ flat.T).log_softmax(1).diagonal().view(-1, 1, 1)


@coupling
def neighbour(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    return hidden + 0.5 * hidden.roll(1, 0).tanh()


@coupling
def mixed_up(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    return torch.lerp(hidden, hidden.flip(0), 0.25)


@coupling
def size_of_the_batch(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    return hidden / (1 + hidden.norm())


@coupling
def weight_of_the_batch(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A weight that is computed from all samples' data."""
    hidden = network.linear(hidden)
    code = hidden.mean((0, 1))
    return F.linear(hidden, network.linear(code, 2 * hidden.shape[-1]).view(2, -1).tanh())


@coupling
def wrong_axis(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A recurrent layer that takes samples for time steps."""
    hidden = network.linear(hidden)
    channels = hidden.shape[-1]
    return network.layer(f"wrong_time_{channels}", lambda: nn.GRU(channels, 3))(hidden)[0]
