"""Steps in which a parameter that belongs to no layer meets the samples: broadcast, looked up, written, multiplied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_steps.registry import step

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


def _broadcast(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A parameter that broadcasts against ``[N, T, C]`` in one way or another."""
    positions, channels = hidden.shape[1:]
    shapes = [(), (1,), (channels,), (positions, 1), (positions, channels), (1, positions, channels)]
    return network.parameter(*network.draw.choice([*shapes, (1, 1, channels), (1, 1, 1), (1, positions, 1)]))


@step
def add_parameter(network: RandomNetwork, hidden: Tensor) -> Tensor:
    other = _broadcast(network, hidden)
    ways = [
        lambda: hidden + other,
        lambda: other + hidden,
        lambda: other - hidden,
        lambda: hidden - 2 * other,
        lambda: torch.add(hidden, other, alpha=0.5),
        lambda: hidden.clone().add_(other),
    ]
    return network.draw.choice(ways)()


@step
def multiply_parameter(network: RandomNetwork, hidden: Tensor) -> Tensor:
    other = _broadcast(network, hidden)
    ways = [
        lambda: hidden * other,
        lambda: other * hidden,
        lambda: hidden / (2 + other.tanh()),
        lambda: hidden * (1 + other.sigmoid()),
        lambda: torch.maximum(hidden, other.expand(hidden.shape)),
        lambda: torch.where(hidden > 0, hidden, other),
        lambda: torch.lerp(hidden, hidden.tanh(), other),
        lambda: hidden.abs().add(0.1) ** (1 + other.tanh()),
        lambda: torch.addcmul(hidden, hidden.tanh(), other, value=0.5),
        lambda: hidden.clone().mul_(other),
    ]
    return network.draw.choice(ways)()


@step
def parameter_on_swapped_axes(network: RandomNetwork, hidden: Tensor) -> Tensor:
    swapped = hidden.transpose(0, 1)
    return (swapped * network.parameter(network.positions, 1, 1)).transpose(0, 1)


@step
def raw_scale(network: RandomNetwork, hidden: Tensor) -> Tensor:
    layer = network.make_linear(hidden.shape[-1], hidden.shape[-1])
    return layer(hidden) * layer.weight.diagonal()


@step
def class_token(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    token = network.parameter(*network.draw.choice([(1, 1, channels), (1, channels), (channels,)]))
    ways = [
        lambda: token.expand(len(hidden), 1, channels),
        lambda: token.view(1, 1, -1).repeat(len(hidden), 1, 1),
        lambda: hidden.new_zeros(len(hidden), 1, channels) + token,
    ]
    joined = network.linear(torch.cat([network.draw.choice(ways)(), hidden], 1))
    return joined[:, 1:] + joined[:, :1].tanh()


@step
def parameter_beside_channels(network: RandomNetwork, hidden: Tensor) -> Tensor:
    beside = network.parameter(network.positions, network.size())
    return torch.cat([hidden, beside.expand(len(hidden), -1, -1)], -1)


@step
def position_table(network: RandomNetwork, hidden: Tensor) -> Tensor:
    positions, channels = hidden.shape[1:]
    layer = network.layer(f"positions_{channels}", lambda: nn.Embedding(positions + 1, channels))
    ids, table = torch.arange(positions), layer.weight
    ways = [
        lambda: layer(ids),
        lambda: layer(ids.unsqueeze(0)),
        lambda: layer(ids.expand(len(hidden), -1)),
        lambda: table[:positions],
        lambda: table[1:].unsqueeze(0),
        lambda: table[ids],
        lambda: F.embedding(ids, table),
        lambda: network.parameter(1, positions + 1, channels)[:, 1:],
        lambda: network.linear(layer(ids), channels),
        lambda: table[:positions].cumsum(0),
    ]
    return hidden + network.draw.choice(ways)()


@step
def parameter_lookup(network: RandomNetwork, hidden: Tensor) -> Tensor:
    samples, positions, channels = hidden.shape
    table, loud = network.parameter(6, channels), (hidden.detach().sum(-1) > 0).long()
    ids = network.ids(5) + loud
    ways = [
        lambda: table[ids],
        lambda: table[ids, :],
        lambda: table[ids - 6],
        lambda: table.index_select(0, ids.flatten()).view(samples, positions, channels),
        lambda: F.embedding(ids, table),
        lambda: table.gather(0, ids.view(-1, 1).expand(-1, channels)).view(samples, positions, channels),
        lambda: table.mT[:, ids].movedim(0, -1),
        lambda: table.T.index_select(1, ids.flatten()).T.view(samples, positions, channels),
        lambda: F.one_hot(ids, 6).to(table.dtype) @ table,
        lambda: table.tanh()[ids],
        lambda: table.flatten().take(ids.unsqueeze(-1) * channels + torch.arange(channels)),
        lambda: table[ids[:, 0]].unsqueeze(1),
        lambda: table[ids.T].transpose(0, 1),
    ]
    return hidden + network.draw.choice(ways)()


@step
def filled_with_parameter(network: RandomNetwork, hidden: Tensor) -> Tensor:
    mask = hidden.detach() > 0.3
    scalar, vector = network.parameter(), network.parameter(hidden.shape[-1])
    ways = [
        lambda: hidden.masked_fill(mask, scalar),
        lambda: torch.where(mask, vector, hidden),
        lambda: torch.where(mask[..., :1], vector, hidden),
    ]
    return network.draw.choice(ways)()


@step
def assigned_parameter(network: RandomNetwork, hidden: Tensor) -> Tensor:
    hidden, choice = hidden.clone(), network.draw.randrange(6)
    vector, scalar = network.parameter(hidden.shape[-1]), network.parameter(1)
    if choice == 0:
        hidden[:, 0] = vector
    elif choice == 1:
        hidden[..., :1] = scalar * 2
    elif choice == 2:
        hidden[network.ids(3) == 0] = vector
    elif choice == 3:
        hidden[:, -1:] = network.linear(vector, hidden.shape[-1])
    elif choice == 4:
        hidden.transpose(0, 1)[0] = vector.tanh()
    else:
        hidden[:, 0] += vector
    return hidden


@step
def mix_of_earlier(network: RandomNetwork, hidden: Tensor) -> Tensor:
    weights = network.parameter(2).softmax(0)
    return weights[0] * hidden + weights[1] * hidden.tanh()


@step
def einsum(network: RandomNetwork, hidden: Tensor) -> Tensor:
    positions, channels, out = hidden.shape[1], hidden.shape[-1], network.size()
    equations = [
        ("ntc,cd->ntd", (channels, out)),
        ("ntc,dc->ntd", (out, channels)),
        ("ntc,tcd->ntd", (positions, channels, out)),
        ("ntc,ts->nsc", (positions, positions)),
        ("ntc,tc->ntc", (positions, channels)),
        ("ntc,hcd->nthd", (2, channels, out)),
        ("nsc,stcd->ntd", (positions, positions, channels, 2)),
        ("ntc,c->nt", (channels,)),
        ("ntc,d->ntcd", (2,)),
        ("ntc,tcd->tnd", (positions, channels, out)),
    ]
    equation, shape = network.draw.choice(equations)
    weight = network.parameter(*shape)
    operands, result = equation.split("->")
    if network.draw.random() < 0.4:
        one, other = operands.split(",")
        found = torch.einsum(f"{other},{one}->{result}", weight, hidden)
    else:
        found = torch.einsum(equation, hidden, weight)
    found = found.transpose(0, 1) if result.startswith("t") else found
    return found.reshape(*hidden.shape[:2], -1)


@step
def einsum_of_three(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    one, other = network.parameter(channels), network.parameter(channels, out)
    return torch.einsum("c,ntc,cd->ntd", one, hidden, other)


@step
def product_with_parameter(network: RandomNetwork, hidden: Tensor) -> Tensor:
    samples, positions, channels = hidden.shape
    rows, weight, out = hidden.reshape(-1, channels), network.parameter(channels, 3), 3
    left, bias = network.parameter(positions, positions), network.parameter(out)
    ways = [
        lambda: hidden @ weight,
        lambda: left @ hidden,
        lambda: left.mT @ hidden.tanh(),
        lambda: (weight.mT @ hidden.mT).mT,
        lambda: (weight.mT @ rows.mT).mT,
        lambda: torch.addmm(bias, rows, weight, beta=0.5, alpha=2.0),
        lambda: (hidden @ weight[:, 0]).unsqueeze(-1),
        lambda: torch.mv(rows, weight[:, 1]).unsqueeze(-1),
        lambda: torch.outer(rows.mean(1), bias),
        lambda: torch.tensordot(hidden, weight, 1),
        lambda: torch.stack([torch.stack([torch.dot(row, weight[:, 0]) for row in s]) for s in hidden]),
        lambda: torch.linalg.multi_dot([rows, weight, network.parameter(3, 2)]),
    ]
    return network.draw.choice(ways)().reshape(samples, positions, -1)


@step
def batched_product(network: RandomNetwork, hidden: Tensor) -> Tensor:
    samples, positions, channels = hidden.shape
    weight, bias = network.parameter(positions, channels, 2), network.parameter(positions, 1, 2)
    experts, rows = network.parameter(3, channels, 2), hidden.reshape(-1, channels)
    swapped = hidden.transpose(0, 1)
    ways = [
        lambda: torch.bmm(swapped, weight).transpose(0, 1),
        lambda: torch.bmm(weight.mT, swapped.mT).permute(2, 0, 1),
        lambda: torch.baddbmm(bias, swapped, weight, beta=0.5).transpose(0, 1),
        lambda: torch.bmm(rows.expand(3, -1, -1), experts).view(3, samples, positions, 2).tanh().sum(0),
        lambda: (hidden.unsqueeze(1) @ experts).tanh().mean(1),
        lambda: torch.bmm(hidden, experts[0].expand(samples, -1, -1)),
    ]
    return network.draw.choice(ways)()
