"""Steps that attend over positions or run over them in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.random_steps.registry import LEAKY, marked, step

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


def _lengths(network: RandomNetwork) -> Tensor:
    """How many positions of each sample are real, at least one."""
    return 1 + network.which % network.positions


def _padding(network: RandomNetwork) -> Tensor:
    return torch.arange(network.positions) >= _lengths(network).unsqueeze(1)


def _causal(network: RandomNetwork) -> Tensor:
    positions = network.positions
    return torch.ones(positions, positions, dtype=torch.bool).triu(1)


@step
def multihead_attention(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, first, bias = hidden.shape[-1], network.draw.random() < 0.5, network.draw.random() < 0.3
    heads = network.draw.choice([1, channels])

    def make() -> nn.Module:
        return nn.MultiheadAttention(channels, heads, batch_first=first, add_bias_kv=bias)

    layer = network.layer(f"attention_{channels}_{heads}_{first}_{bias}", make)
    padding = _padding(network) if network.draw.random() < 0.4 else None
    mask = _causal(network) if network.draw.random() < 0.4 else None
    hidden = hidden if first else hidden.transpose(0, 1)
    query = hidden if network.draw.random() < 0.6 else hidden.tanh()
    needs = network.draw.random() < 0.5
    found, _ = layer(query, hidden, hidden, key_padding_mask=padding, attn_mask=mask, need_weights=needs)
    return found if first else found.transpose(0, 1)


@step
def transformer(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, first = hidden.shape[-1], network.draw.random() < 0.5
    before = network.draw.random() < 0.5

    def make() -> nn.Module:
        options = {"dropout": 0.0, "batch_first": first, "norm_first": before}
        return nn.TransformerEncoderLayer(channels, 1, 4, **options)

    layer = network.layer(f"transformer_{channels}_{first}_{before}", make)
    mask = _padding(network) if network.draw.random() < 0.4 else None
    if first:
        return layer(hidden, src_key_padding_mask=mask)
    return layer(hidden.transpose(0, 1), src_key_padding_mask=mask).transpose(0, 1)


@step
def fused_attention(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    joined = network.make_linear(channels, 3 * channels)(hidden)
    query, key, value = joined.view(*hidden.shape[:2], 3, 1, channels).permute(2, 0, 3, 1, 4)
    causal = network.draw.random() < 0.5
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).squeeze(1)


@step
def attention_with_position_bias(network: RandomNetwork, hidden: Tensor) -> Tensor:
    positions = network.positions
    table = network.parameter(2 * positions - 1)
    distance = torch.arange(positions).unsqueeze(1) - torch.arange(positions) + positions - 1
    bias = network.draw.choice(
        [
            lambda: table[distance],
            lambda: network.parameter(positions, positions),
            lambda: table[distance].exp(),
        ]
    )()
    scores = hidden.tanh() @ hidden.mT.tanh() + bias
    return scores.masked_fill(_padding(network).unsqueeze(1), -torch.inf).softmax(-1) @ hidden


@step
def learned_query(network: RandomNetwork, hidden: Tensor) -> Tensor:
    samples, _, channels = hidden.shape
    query = network.parameter(1, 2, channels)
    if network.draw.random() < 0.5:
        pooled = F.scaled_dot_product_attention(query.expand(samples, -1, -1), hidden, hidden)
    else:
        pooled = (query @ hidden.mT).softmax(-1) @ hidden
    return hidden + pooled.sum(1, keepdim=True)


@step
def learned_keys(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A memory that all samples attend to."""
    keys, values = network.parameter(3, hidden.shape[-1]), network.parameter(3, network.size())
    return (hidden.tanh() @ keys.mT).softmax(-1) @ values


@marked(LEAKY)
def packed_attention(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """All samples in one sequence, kept apart by a mask."""
    samples, positions, _ = hidden.shape
    owner = torch.arange(samples).repeat_interleave(positions)
    apart = owner.unsqueeze(1) == owner
    flat = network.linear(hidden, 4).view(1, 1, samples * positions, 4)
    if network.draw.random() < 0.5:
        found = F.scaled_dot_product_attention(flat, flat.tanh(), flat, attn_mask=apart)
    else:
        scores = (flat @ flat.mT).tanh().masked_fill(~apart, -torch.inf)
        found = scores.softmax(-1) @ flat
    return found.view(samples, positions, 4)


@step
def recurrent(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out, first = hidden.shape[-1], network.size(), network.draw.random() < 0.5
    kind = network.draw.choice([nn.RNN, nn.LSTM, nn.GRU])
    options = {"batch_first": first, "bidirectional": network.draw.random() < 0.3}
    options |= {"num_layers": network.draw.choice([1, 1, 2]), "bias": network.draw.random() < 0.8}
    if kind is nn.LSTM and out > 1 and network.dtype == torch.float64 and network.draw.random() < 0.3:
        options["proj_size"] = 1  # torch warns of it in single precision
    key = f"{kind.__name__}_{channels}_{out}_" + "_".join(str(int(value)) for value in options.values())
    layer = network.layer(key, lambda: kind(channels, out, **options))
    found, state = layer(hidden if first else hidden.transpose(0, 1))
    if network.draw.random() < 0.4:
        last = state[0] if isinstance(state, tuple) else state
        return last.transpose(0, 1).flatten(1).unsqueeze(1).expand(-1, network.positions, -1)
    return found if first else found.transpose(0, 1)


@step
def recurrent_from_a_learned_state(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    layer = network.layer(f"started_{channels}_{out}", lambda: nn.GRU(channels, out, batch_first=True))
    start = network.parameter(1, 1, out)
    return layer(hidden, start.expand(-1, len(hidden), -1).contiguous())[0]


@step
def packed_sequence(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out, both = hidden.shape[-1], network.size(), network.draw.random() < 0.3
    kind = network.draw.choice([nn.RNN, nn.LSTM, nn.GRU])

    def make() -> nn.Module:
        return kind(channels, out, batch_first=True, bidirectional=both)

    layer = network.layer(f"packed{kind.__name__}_{channels}_{out}_{both}", make)
    packed = pack_padded_sequence(hidden, _lengths(network), batch_first=True, enforce_sorted=False)
    found, state = layer(packed)
    if network.draw.random() < 0.4:
        last = state[0] if isinstance(state, tuple) else state
        return last[-1].unsqueeze(1).expand(-1, network.positions, -1)
    return pad_packed_sequence(found, batch_first=True, total_length=network.positions)[0]


@step
def cell(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    kind = network.draw.choice([nn.RNNCell, nn.LSTMCell, nn.GRUCell])
    layer = network.layer(f"{kind.__name__}_{channels}_{out}", lambda: kind(channels, out))
    state, outputs = None, []
    for position in range(network.positions):
        state = layer(hidden[:, position], state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, 1)


@step
def own_recurrence(network: RandomNetwork, hidden: Tensor) -> Tensor:
    out = network.size()
    inward, onward = network.parameter(hidden.shape[-1], out), network.parameter(out, out)
    state, outputs = hidden.new_zeros(len(hidden), out), []
    for position in hidden.unbind(1):
        state = torch.tanh(position @ inward + state @ onward)
        outputs.append(state)
    return torch.stack(outputs, 1)


@step
def state_space(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A decaying sum over positions, with a rate a channel."""
    rate = network.parameter(hidden.shape[-1])
    state, outputs = torch.zeros_like(hidden[:, 0]), []
    for position in range(network.positions):
        state = state * rate.sigmoid() + hidden[:, position]
        outputs.append(state)
    return torch.stack(outputs, 1)
