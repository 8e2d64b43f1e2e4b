r"""Recurrent layers and cells: one outer product a time step.

A recurrent layer multiplies its input and its previous hidden state with weights, once a time step, so that

.. math:: g_n = \sum_t \delta_{nt}\, r_{nt}^\top

with the gradients :math:`\delta` of the gates before their nonlinearity. The layer does not reveal these, and neither
does its fused backward. So the rule computes the gates again, from the arguments, the weights and the hidden states
that the layer returned, and goes back through the steps by the formulas of :mod:`gradbatch.rules.recurrent_cells`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.factors.outer_product import with_common_left
from gradbatch.rules.axes import full, total
from gradbatch.rules.call import Call
from gradbatch.rules.linear import features_by_position
from gradbatch.rules.recurrent_cells import GRU, LSTM, Relu, State, Steps, Tanh, Trace
from gradbatch.rules.recurrent_onednn import kept_trace
from gradbatch.rules.recurrent_sequences import (
    arrange,
    lengths_of,
    numbers_of,
    sequence_first,
    state_first,
    tensors_of,
    turned,
)
from gradbatch.rules.recurrent_steps import Weights, backward, forward
from gradbatch.rules.registry import layer_rule


def declines(module: Any) -> str | None:
    """Dropout between layers draws a mask that nobody keeps, so the layer cannot be replayed."""
    if module.training and getattr(module, "dropout", 0) > 0 and module.num_layers > 1:
        return f"{type(module).__name__} with dropout between its layers: the mask that it drew is not known"
    return None


# Not LSTMCell: its new memory lies on the way to its hidden state, so a gradient that arrives at the memory has that of
# the hidden state in it. Its products are read off the graph.
@layer_rule(
    nn.RNNCell,
    nn.GRUCell,
    feature_axes=lambda _, output_dim: output_dim - 1,
    arrange=arrange,
    reads_outputs=True,
    by_row=True,
)
@layer_rule(
    nn.RNN,
    nn.LSTM,
    nn.GRU,
    feature_axes=lambda _, output_dim: output_dim - 1,
    arrange=arrange,
    declines=declines,
    reads_outputs=True,
)
def recurrent(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Gradients of the gates on the left, what the weights were multiplied with on the right."""
    lengths = lengths_of(call.arguments["input"])
    layers = _forward(call, lengths)
    while not any(direction.is_wanted for direction in layers[0]):
        del layers[0]  # it was there for the inputs of those above
    _backward(call, layers, lengths)
    for direction in (direction for layer in layers for direction in layer if direction.is_wanted):
        for deltas, factors in direction.products:
            left = _by_sample(call, deltas)
            sums = total(left.squeeze(1), (2,))
            wanted = [kind for kind in factors if f"weight_{kind}{direction.suffix}" in call.needs]
            grads = with_common_left(left, [_by_sample(call, factors[kind]) for kind in wanted])
            for kind, grad in zip(wanted, grads, strict=True):
                yield f"weight_{kind}{direction.suffix}", grad
            for name in (f"bias_{kind}{direction.suffix}" for kind in factors):
                if name in call.needs:
                    yield name, Dense(sums.clone())


def _by_sample(call: Call, steps: Tensor) -> Tensor:
    """``[T, B, G]`` to an operand of an outer product, ``[N, 1, G, positions]``."""
    return features_by_position(call.layout.sample_first(steps.transpose(0, 1)))


# ---------------------------------------------------------------------- all layers, there and back


@dataclass
class _Direction:
    """A direction of a layer.

    Args:
        suffix: what the names of its parameters end in.
        row: of its states among those of the layer.
        is_wanted: whether one of its parameters needs a gradient.
        weights: the parameters' values.
        input: ``[T, B, D]``, in the order in which it takes the steps.
        trace: what it computed.
        products: once it went back, the gradients of products with weights, ``[T, B, G]``, and what these had been
            multiplied with, ``[T, B, D]``, by the kind of weight.
    """

    suffix: str
    row: int
    is_wanted: bool
    weights: Weights
    input: Tensor
    trace: Trace
    products: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)

    def back(self, grads: Tensor, memory_grads: Tensor | None) -> Tensor:
        """Go back from the gradients of all states; returns those of the input's part of the gates, ``[T, B, G]``."""
        deltas, hidden_deltas = backward(self.trace, self.weights, grads, memory_grads)
        input, previous = {"ih": self.input}, {"hh": self.trace.hidden[:-1]}
        is_one = deltas is hidden_deltas
        self.products = (
            [(deltas, input | previous)] if is_one else [(deltas, input), (hidden_deltas, previous)]
        )
        if self.weights.hr is not None:
            self.products.append((grads, {"hr": self.trace.unprojected}))
        return deltas


def _forward(call: Call, lengths: Tensor | None) -> list[list[_Direction]]:
    """Run all layers again, each from its hidden states where they are known."""
    module, sequence = call.module, _input(call)
    names, states = _suffixes(module), _initial_states(call, sequence)
    over = None if lengths is None else (numbers_of(sequence) >= lengths).unsqueeze(2)
    layers: list[list[_Direction]] = []
    for suffixes in names:
        is_last = len(layers) == len(names) - 1
        output = _output(call, sequence.dtype) if is_last else None
        outputs = [None] * len(suffixes) if output is None else output.chunk(len(suffixes), -1)
        layer: list[_Direction] = []
        for suffix, known in zip(suffixes, outputs, strict=True):
            row = len(layers) * len(suffixes) + len(layer)
            input, state = turned(sequence, suffix, lengths), tuple(each[:, row] for each in states)
            weights, kept = _weights(module, suffix, sequence.dtype), _kept(call, suffix)
            trace = kept_trace(kept, weights, input, state, suffix.endswith("_reverse")) if kept else None
            if trace is None:
                known = None if known is None else turned(known, suffix, lengths)
                trace = forward(_kind(module), weights, input, state, known, over)
            is_wanted = any(name.endswith(suffix) for name in call.needs)
            layer.append(_Direction(suffix, row, is_wanted, weights, input, trace))
        layers.append(layer)
        if not is_last:
            sequence = torch.cat([turned(d.trace.hidden[1:], d.suffix, lengths) for d in layer], -1)
    return layers


def _backward(call: Call, layers: list[list[_Direction]], lengths: Tensor | None) -> None:
    """Go back through the layers from the gradients of the call's outputs."""
    arriving, *final = _grad_outputs(call, layers[0][0].input)
    for layer in reversed(layers):
        below = []
        for direction, outside in zip(layer, arriving.chunk(len(layer), -1), strict=True):
            if layer is layers[0] and not direction.is_wanted:
                continue
            finals = [grad[:, direction.row] for grad in final]
            grads = turned(outside, direction.suffix, lengths).clone(memory_format=torch.contiguous_format)
            _add_final(grads, finals[0], lengths)
            memory_grads = None
            if len(finals) > 1 and finals[1].any():
                memory_grads = finals[1].new_zeros(len(grads), *finals[1].shape)
                _add_final(memory_grads, finals[1], lengths)
            deltas = direction.back(grads, memory_grads)
            if layer is not layers[0]:
                below.append(turned(deltas @ direction.weights.ih, direction.suffix, lengths))
        arriving = sum(below[1:], below[0]) if below else arriving


def _add_final(grads: Tensor, final: Tensor, lengths: Tensor | None) -> None:
    """Add the gradient of a final state, ``[B, H]``, to that of the last step of each sequence, in place."""
    if lengths is None:
        grads[-1] += final
    else:
        grads[lengths - 1, torch.arange(len(final), device=final.device)] += final


# ---------------------------------------------------------------------- what a layer consists of


def _kind(module: Any) -> type[Steps]:
    if isinstance(module, nn.LSTM):
        return LSTM
    if isinstance(module, nn.GRU | nn.GRUCell):
        return GRU
    # nn.RNN goes by its mode, "RNN_RELU", and has a nonlinearity for show.
    name = module.mode if isinstance(module, nn.RNN) else module.nonlinearity
    return Relu if name.lower().endswith("relu") else Tanh


def _suffixes(module: Any) -> list[list[str]]:
    """What the names of the parameters end in: for each layer, for each direction."""
    if isinstance(module, nn.RNNCellBase):
        return [[""]]
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [[f"_l{layer}{direction}" for direction in directions] for layer in range(module.num_layers)]


def _weights(module: Any, suffix: str, dtype: torch.dtype) -> Weights:
    def own(name: str) -> Any:
        parameter = getattr(module, name + suffix, None)
        return None if parameter is None else parameter.detach().to(dtype)

    return Weights(*map(own, ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")))


def _kept(call: Call, suffix: str) -> Mapping[str, Tensor] | None:
    """What the kernel of a direction keeps, if anything."""
    return next((kept for name, kept in call.kept.items() if name.endswith(suffix)), None)


# ---------------------------------------------------------------------- arguments and results, steps first


def _input(call: Call) -> Tensor:
    """The input in at least float32, ``[T, B, D]``; a cell's is one step."""
    module, input = call.module, call.arguments["input"]
    if isinstance(module, nn.RNNCellBase):
        return full(state_first(module, input, input).unsqueeze(0))
    data = input.data if isinstance(input, PackedSequence) else input
    return full(sequence_first(module, input, data)).transpose(0, 1)


def _output(call: Call, dtype: torch.dtype) -> Tensor | None:
    """The hidden states of the last layer, ``[T, B, D * H]``, if they are known in a dtype."""
    if not call.outputs or call.outputs[0].dtype != dtype:
        return None
    output = call.outputs[0]
    return output.unsqueeze(0) if isinstance(call.module, nn.RNNCellBase) else output.transpose(0, 1)


def _initial_states(call: Call, sequence: Tensor) -> State:
    """The states before the first step, ``[B, L * D, H]`` each, in the dtype of the sequence."""
    module, given = call.module, call.arguments.get("hx")
    is_cell, has_memory = isinstance(module, nn.RNNCellBase), isinstance(module, nn.LSTM)
    if given is None:
        rows = sum(map(len, _suffixes(module)))
        sizes = (getattr(module, "proj_size", 0) or module.hidden_size, module.hidden_size)
        return tuple(sequence.new_zeros(sequence.shape[1], rows, size) for size in sizes[: 1 + has_memory])
    states = [
        state_first(module, call.arguments["input"], state) for state in (given if has_memory else [given])
    ]
    return tuple((state.unsqueeze(1) if is_cell else state).to(sequence.dtype) for state in states)


def _grad_outputs(call: Call, sequence: Tensor) -> list[Tensor]:
    """Gradients of all hidden states, ``[T, B, D * H]``, and of the final states, ``[B, L * D, H]`` each."""
    grads, input = call.raw_grad_output, call.arguments["input"]
    if isinstance(call.module, nn.RNNCellBase):
        final = grads.unsqueeze(1).to(sequence.dtype)
        return [torch.zeros_like(final).transpose(0, 1), final]
    states = grads[tensors_of(input) :] if isinstance(input, PackedSequence) else grads[1:]
    return [grad.to(sequence.dtype) for grad in (grads[0].transpose(0, 1), *states)]
