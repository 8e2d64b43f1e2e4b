"""Steps that move samples, positions and channels about, change results in place, or cut gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.random_steps.registry import STOPPING, marked, step

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


@step
def in_place(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    changes = [torch.relu_, torch.tanh_, lambda h: h.mul_(2.0), lambda h: h.add_(1.0)]
    return network.draw.choice(changes)(hidden)


@step
def nested_views(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    view = hidden.transpose(0, 1)
    view.mul_(2.0)
    view[0] += 1.0
    return hidden


@step
def slice_assign(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    where = [(slice(None), 0), (..., 0), (slice(None), slice(None, 1), slice(None, 1))]
    hidden[network.draw.choice(where)] = 0.5
    return hidden


@marked(STOPPING)
def kill(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    hidden[network.which % network.samples == network.draw.randrange(network.samples)] = 0.25
    return hidden


@step
def residual(network: RandomNetwork, hidden: Tensor) -> Tensor:
    for earlier in reversed(network.saved[:-1]):
        if earlier.shape == hidden.shape:
            return hidden + earlier
    return hidden + network.make_linear(hidden.shape[-1], hidden.shape[-1])(hidden)


@step
def residual_in_place(network: RandomNetwork, hidden: Tensor) -> Tensor:
    result = network.make_linear(hidden.shape[-1], hidden.shape[-1])(hidden)
    result += hidden
    return result


@step
def swap(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden.transpose(0, 1)).transpose(0, 1)


@step
def rows(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:2], -1)


@step
def columns(network: RandomNetwork, hidden: Tensor) -> Tensor:
    samples, positions, channels = hidden.shape
    result = network.linear(hidden.transpose(0, 1).reshape(-1, channels))
    return result.view(positions, samples, -1).transpose(0, 1)


@step
def siamese(network: RandomNetwork, hidden: Tensor) -> Tensor:
    both = network.linear(torch.cat([hidden, hidden.flip(1)]))
    one, other = both.chunk(2)
    return one * other.tanh()


@step
def constants(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return hidden * torch.linspace(0.5, 1.5, network.positions, dtype=hidden.dtype).view(-1, 1)


@step
def detached_factor(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden) * hidden.detach().mean(-1, keepdim=True)


@marked(STOPPING)
def detached(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden.detach())


@step
def checkpointed(network: RandomNetwork, hidden: Tensor) -> Tensor:
    layer = network.make_linear(hidden.shape[-1])
    return checkpoint(lambda h: torch.tanh(layer(h)), hidden, use_reentrant=False)


@step
def unused(network: RandomNetwork, hidden: Tensor) -> Tensor:
    network.linear(hidden)
    return hidden


@step
def two_outputs(network: RandomNetwork, hidden: Tensor) -> Tensor:
    parts = network.make_linear(hidden.shape[-1], 4)(hidden).chunk(2, -1)
    return parts[network.draw.randrange(2)].exp().clamp(max=2.0)


@step
def roll(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden.roll(1, 0)).roll(-1, 0)


@step
def shuffle(network: RandomNetwork, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(network.seed))
    return network.linear(rows[order])[order.argsort()].view(*hidden.shape[:2], -1)


@step
def split_samples(network: RandomNetwork, hidden: Tensor) -> Tensor:
    layer = network.make_linear(hidden.shape[-1])
    return torch.cat([layer(part) for part in hidden.split(1)])


@step
def loop_over_samples(network: RandomNetwork, hidden: Tensor) -> Tensor:
    weight = network.parameter(hidden.shape[-1], network.size())
    return torch.stack([sample @ weight for sample in hidden])


@step
def loop_over_positions(network: RandomNetwork, hidden: Tensor) -> Tensor:
    layer = network.make_linear(hidden.shape[-1])
    return torch.stack([layer(hidden[:, t]) for t in range(network.positions)], 1)


@step
def samples_in_groups(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """Every sample a group of one convolution over a single row."""
    samples, _, channels = hidden.shape
    weight = network.parameter(network.size(), channels, 3)
    # One position too many: torch's own backward fails where there is but one.
    folded = F.pad(hidden.mT.reshape(1, samples * channels, -1), (1, 2))
    result = F.conv1d(folded, weight.repeat(samples, 1, 1), groups=samples)[..., :-1]
    return result.reshape(samples, len(weight), -1).mT


@step
def windows(network: RandomNetwork, hidden: Tensor) -> Tensor:
    padded = F.pad(hidden, (0, 0, 1, 1))
    return network.linear(padded.unfold(1, 3, 1).flatten(2))


@step
def samples_in_channels(network: RandomNetwork, hidden: Tensor) -> Tensor:
    weight = network.parameter(network.positions, network.positions)
    flat = hidden.permute(1, 0, 2).reshape(network.positions, -1)
    return (weight @ flat).view(network.positions, *hidden.shape[::2]).transpose(0, 1)


@step
def sum_over_positions(network: RandomNetwork, hidden: Tensor) -> Tensor:
    return network.linear(hidden).cumsum(1)


@step
def centred_over_positions(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden)
    # Half of it: what is exactly zero but for rounding has gradients of rounding errors.
    return hidden - 0.5 * hidden.mean(1, keepdim=True)


@step
def batch_in_two_parts(network: RandomNetwork, hidden: Tensor) -> Tensor:
    layer, half = network.make_linear(hidden.shape[-1]), (len(hidden) + 1) // 2
    return torch.cat([layer(hidden[:half]), layer(hidden[half:])])


@step
def in_place_in_a_view(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden = network.linear(hidden).clone()
    hidden[:, :1] *= network.parameter(hidden.shape[-1])
    hidden[..., -1].add_(network.parameter(network.positions))
    return hidden
