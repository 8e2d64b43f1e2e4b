"""Steps whose data decide which parameters are used, by which rows, and in what order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.random_steps.registry import step

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


def _choices(network: RandomNetwork, rows: Tensor, experts: int) -> Tensor:
    """An expert for each row, by its data."""
    return (rows.detach().sum(-1).nan_to_num().mul(3).long().abs()) % experts


@step
def experts(network: RandomNetwork, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, 1)
    layers = [network.make_linear(hidden.shape[-1], 3) for _ in range(3)]
    choices, result = _choices(network, rows, 3), hidden.new_zeros(len(rows), 3)
    for expert, layer in enumerate(layers):
        index = (choices == expert).nonzero().squeeze(1)
        result = result.index_add(0, index, layer(rows.index_select(0, index)))
    return result.view(*hidden.shape[:2], 3)


@step
def gated_experts(network: RandomNetwork, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, 1)
    gates = network.linear(rows, 3).softmax(-1)
    values, chosen = gates.topk(2, -1)
    result = torch.zeros_like(rows)
    for expert in range(3):
        layer = network.make_linear(hidden.shape[-1], hidden.shape[-1])
        row, place = (chosen == expert).nonzero(as_tuple=True)
        if len(row):
            result.index_add_(0, row, layer(rows[row]) * values[row, place].unsqueeze(-1))
    return result.view(hidden.shape)


@step
def sorted_experts(network: RandomNetwork, hidden: Tensor) -> Tensor:
    rows, weight = hidden.flatten(0, 1), network.parameter(3, hidden.shape[-1], 2)
    choices = _choices(network, rows, 3)
    order = choices.argsort(stable=True)
    parts = rows[order].split(torch.bincount(choices, minlength=3).tolist())
    joined = torch.cat([part @ single for part, single in zip(parts, weight, strict=True)])
    return joined[order.argsort()].view(*hidden.shape[:2], 2)


@step
def expert_weights(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A weight looked up for each row or sample."""
    rows, weight = hidden.flatten(0, 1), network.parameter(3, hidden.shape[-1], 2)
    if network.draw.random() < 0.5:
        found = torch.bmm(rows.unsqueeze(1), weight[_choices(network, rows, 3)])
        return found.view(*hidden.shape[:2], 2)
    return hidden @ weight[_choices(network, hidden.mean(1), 3)]


@step
def sorted_positions(network: RandomNetwork, hidden: Tensor) -> Tensor:
    values, order = hidden.sort(1)
    if network.draw.random() < 0.5:
        return network.linear(values)
    return network.linear(values, hidden.shape[-1]).gather(1, order.argsort(1))


@step
def sorted_samples(network: RandomNetwork, hidden: Tensor) -> Tensor:
    order = hidden.detach().sum((1, 2)).nan_to_num().argsort()
    return network.linear(hidden[order])[order.argsort()]


@step
def largest_positions(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """The two loudest positions of each sample alone."""
    kept = min(2, network.positions)
    place = hidden.detach().abs().sum(-1).topk(kept, 1).indices
    place = place.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    changed = network.linear(hidden.gather(1, place), hidden.shape[-1])
    return hidden.scatter(1, place, changed)


@step
def ragged(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """Real positions of all samples in one tensor of rows, and back."""
    real = torch.arange(network.positions) <= (network.which % network.positions).unsqueeze(1)
    rows = network.linear(hidden[real])
    result = hidden.new_zeros(*hidden.shape[:2], rows.shape[-1])
    if network.draw.random() < 0.5:
        result[real] = rows
        return result
    return result.masked_scatter(real.unsqueeze(-1), rows)


@step
def ragged_mean(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """The mean over each sample's real positions, by adding rows up."""
    real = torch.arange(network.positions) <= (network.which % network.positions).unsqueeze(1)
    sample, _ = real.nonzero(as_tuple=True)
    rows = network.linear(hidden[real]).tanh()
    total = rows.new_zeros(len(hidden), rows.shape[-1]).index_add(0, sample, rows)
    return (total / real.sum(1, keepdim=True)).unsqueeze(1).expand(-1, network.positions, -1)


@step
def loop_over_ragged_samples(network: RandomNetwork, hidden: Tensor) -> Tensor:
    layer, pooled = network.make_linear(hidden.shape[-1]), []
    for sample, number in zip(hidden, network.which.tolist(), strict=True):
        pooled.append(layer(sample[: 1 + number % network.positions]).mean(0))
    return torch.stack(pooled).unsqueeze(1).expand(-1, network.positions, -1)


@step
def branches(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """One of two layers for each sample, by its number."""
    first, second = (network.make_linear(hidden.shape[-1], 3) for _ in range(2))
    return torch.stack(
        [(first if n % 2 else second)(h) for h, n in zip(hidden, network.which.tolist(), strict=True)]
    )


@step
def some_samples(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A layer for samples of even numbers alone."""
    index = (network.which % 2 == 0).nonzero().squeeze(1)
    changed = network.linear(hidden[index], hidden.shape[-1])
    return (
        hidden.index_copy(0, index, changed)
        if network.draw.random() < 0.5
        else hidden.index_add(0, index, changed)
    )


@step
def some_positions(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A parameter on rows chosen by their data."""
    loud, scale = hidden.detach().sum(-1) > 0, network.parameter(hidden.shape[-1])
    result = hidden.clone()
    result[loud] = result[loud] * scale
    return result


@step
def graph_of_neighbours(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """Messages along edges between positions of the same sample."""
    samples, positions, _ = hidden.shape
    rows = network.linear(hidden.flatten(0, 1))
    start = torch.arange(samples * positions)
    end = start // positions * positions + (start + 1) % positions
    return (rows + torch.zeros_like(rows).index_add(0, end, rows[start].tanh())).view(samples, positions, -1)
