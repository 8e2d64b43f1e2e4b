r"""Recurrent layers and cells: one outer product a time step, from a single backward pass through a replay.

A recurrent layer multiplies its input and its previous hidden state with weights, once a time step, so that

.. math:: g_n = \sum_t \delta_{nt}\, r_{nt}^\top

with the gradients :math:`\delta` of the gates before their nonlinearity. The layer does not reveal these, and neither
does its fused backward. So the rule replays it step by step from its arguments and weights, and asks autograd once for
the gradients of all gates of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradbatch.factors import Dense, OuterProduct, PerSampleGrad
from gradbatch.rules.axes import by_position, full, total
from gradbatch.rules.call import Call
from gradbatch.rules.linear import features_by_position
from gradbatch.rules.registry import layer_rule

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]


def arrange(module: Any, arguments: Mapping[str, Any], index: int, tensor: Tensor) -> Tensor:
    """Bring an output of a recurrent layer, or the gradient of one, to sequences first.

    Args:
        module: the layer or cell.
        arguments: of its forward, by name.
        index: number of the output, counted through nested tuples.
        tensor: that output, or its gradient.

    Returns:
        ``[B, T, H]`` for the hidden states of all steps, where packed sequences are in the order that they had before
        and padded with zeros; ``[B, L * D, H]`` for final states; ``[B, H]`` for those of a cell.

    Edge cases: an unbatched call has ``B = 1``; the bookkeeping of a packed output is returned as it is.
    """
    input = arguments["input"]
    if isinstance(input, PackedSequence) and 0 < index < _tensors_of(input):
        return tensor
    if index == 0 and not isinstance(module, nn.RNNCellBase):
        return _sequence_first(module, input, tensor)
    return _state_first(module, input, tensor)


def declines(module: Any) -> str | None:
    """Dropout between layers draws a mask that nobody keeps, so the layer cannot be replayed."""
    if module.training and getattr(module, "dropout", 0) > 0 and module.num_layers > 1:
        return f"{type(module).__name__} with dropout between its layers: the mask that it drew is not known"
    return None


# Not LSTMCell: its new memory lies on the way to its hidden state, so a gradient that arrives at the memory has that of
# the hidden state in it. Its products are read off the graph.
@layer_rule(
    nn.RNN,
    nn.LSTM,
    nn.GRU,
    nn.RNNCell,
    nn.GRUCell,
    feature_axes=lambda _, output_dim: output_dim - 1,
    arrange=arrange,
    declines=declines,
)
def recurrent(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Gradients of the gates on the left, what the weights were multiplied with on the right."""
    with torch.enable_grad():
        runs, outputs = _replay(call)
        steps = [step for run in runs for step in run.watched]
        found = iter(torch.autograd.grad(outputs, steps, _grad_outputs(call, outputs[0].dtype)))
    for run in runs:
        for kind, deltas, factors in run.products(found):
            delta, factor = call.layout.sample_first(deltas), call.layout.sample_first(factors)
            weight, bias = f"weight_{kind}{run.suffix}", f"bias_{kind}{run.suffix}"
            if weight in call.needs:
                shape = (delta.shape[-1], factor.shape[-1])
                yield weight, OuterProduct(features_by_position(delta), features_by_position(factor), shape)
            if bias in call.needs:
                yield bias, Dense(total(by_position(delta, 1), (1,)))


# ---------------------------------------------------------------------- one step of each kind of layer


def _lstm(gates: Tensor, hidden_gates: Tensor, state: State) -> State:
    i, f, g, o = (gates + hidden_gates).chunk(4, -1)
    memory = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def _gru(gates: Tensor, hidden_gates: Tensor, state: State) -> State:
    size = state[0].shape[-1]
    both, own = gates.split((2 * size, size), -1)
    hidden_both, hidden_own = hidden_gates.split((2 * size, size), -1)
    reset, update = (both + hidden_both).sigmoid().chunk(2, -1)
    new = (own + reset * hidden_own).tanh()
    return (new + update * (state[0] - new),)


def _elman(nonlinearity: Callable[[Tensor], Tensor]) -> Cell:
    return lambda gates, hidden_gates, state: (nonlinearity(gates + hidden_gates),)


def _cell(module: Any) -> Cell:
    if isinstance(module, nn.LSTM):
        return _lstm
    if isinstance(module, nn.GRU | nn.GRUCell):
        return _gru
    # nn.RNN goes by its mode, "RNN_RELU", and has a nonlinearity for show.
    name = module.mode if isinstance(module, nn.RNN) else module.nonlinearity
    return _elman(torch.relu if name.lower().endswith("relu") else torch.tanh)


# ---------------------------------------------------------------------- one direction of one layer


@dataclass
class _Run:
    """What a direction of a layer read and computed, step by step in the order in which it takes them.

    Args:
        suffix: what the names of its parameters end in.
        input: ``[B, T, D]``.
        initial: the hidden state that it starts from, ``[B, H]``.
        state: the latest states, ``[B, H]`` each; in the end, the final ones.
        gates: the input's part of the gates before the nonlinearity, ``[B, G]`` a step.
        hidden_gates: the hidden state's part; empty where only their sum matters, so that the gradients are the same.
        hidden: the hidden state after each step, ``[B, H]``.
        unprojected: the hidden state before its projection; empty without one.
        projected: and after it.
    """

    suffix: str
    input: Tensor
    initial: Tensor
    state: State
    gates: list[Tensor]
    hidden_gates: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    unprojected: list[Tensor] = field(default_factory=list)
    projected: list[Tensor] = field(default_factory=list)

    @property
    def watched(self) -> list[Tensor]:
        """The tensors whose gradients :meth:`products` wants, in this order."""
        return [*self.gates, *self.hidden_gates, *self.projected]

    def products(self, found: Iterator[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Kind of weight, gradients of its products ``[B, T, G]``, and what it was multiplied with ``[B, T, D]``."""
        gates = _stack(next(found) for _ in self.gates)
        hidden_gates = _stack(next(found) for _ in self.hidden_gates) if self.hidden_gates else gates
        yield "ih", gates, self.input.detach()
        yield "hh", hidden_gates, _stack([self.initial, *self.hidden[:-1]]).detach()
        if self.projected:
            yield "hr", _stack(next(found) for _ in self.projected), _stack(self.unprojected).detach()


def _run(module: Any, suffix: str, input: Tensor, state: State, alive: Tensor | None, watch: bool) -> _Run:
    """Replay a direction of a layer.

    Args:
        module: the layer or cell.
        suffix: what the names of the direction's parameters end in.
        input: ``[B, T, D]``, in the order in which the direction takes it.
        state: the initial states, ``[B, H]`` each.
        alive: ``[B, T, 1]``, false where a sequence is over and keeps its state; ``None`` if all are equally long.
        watch: whether the gradients of its gates will be wanted.
    """

    def own(name: str) -> Any:
        parameter = getattr(module, name + suffix, None)
        return None if parameter is None else parameter.detach().to(input.dtype)

    cell, separate = _cell(module), isinstance(module, nn.GRU | nn.GRUCell)
    weight_hh, bias_hh, weight_hr = own("weight_hh"), own("bias_hh"), own("weight_hr")
    gates = F.linear(input, own("weight_ih"), own("bias_ih"))
    run = _Run(suffix, input, state[0], state, [_watch(step, watch) for step in gates.unbind(1)])
    for t, step in enumerate(run.gates):
        hidden_gates = F.linear(run.state[0], weight_hh, bias_hh)
        if separate:
            run.hidden_gates.append(_watch(hidden_gates, watch))
        state = cell(step, hidden_gates, run.state)
        if weight_hr is not None:
            run.unprojected.append(state[0])
            run.projected.append(F.linear(state[0], weight_hr))
            state = (run.projected[-1], *state[1:])
        if alive is not None:
            state = tuple(
                torch.where(alive[:, t], new, old) for new, old in zip(state, run.state, strict=True)
            )
        run.state = state
        run.hidden.append(state[0])
    return run


def _watch(tensor: Tensor, watch: bool) -> Tensor:
    return tensor.requires_grad_() if watch else tensor


def _stack(steps: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(steps), 1)


# ---------------------------------------------------------------------- all layers


def _replay(call: Call) -> tuple[list[_Run], list[Tensor]]:
    """Replay the whole layer.

    Returns:
        The directions with parameters that need a gradient, and the outputs as :func:`_grad_outputs` has their
        gradients.
    """
    module, input = call.module, call.arguments["input"]
    is_cell = isinstance(module, nn.RNNCellBase)
    if is_cell:
        sequence = full(_state_first(module, input, input).unsqueeze(1))
    else:
        data = input.data if isinstance(input, PackedSequence) else input
        sequence = full(_sequence_first(module, input, data))
    alive = _alive(input) if isinstance(input, PackedSequence) else None
    initial = _initial_states(call, sequence)
    watched: list[_Run] = []
    final: list[State] = []
    for suffixes in _suffixes(module):
        hidden = []
        for suffix in suffixes:
            backwards = suffix.endswith("_reverse")
            steps = _reversed(sequence, alive) if backwards else sequence
            state = tuple(states[:, len(final)] for states in initial)
            watch = any(name.endswith(suffix) for name in call.needs)
            run = _run(module, suffix, steps, state, alive, watch)
            if watch:
                watched.append(run)
            final.append(run.state)
            hidden.append(_reversed(_stack(run.hidden), alive) if backwards else _stack(run.hidden))
        sequence = torch.cat(hidden, -1)
    finals = [_stack(states) for states in zip(*final, strict=True)]
    return watched, finals if is_cell else [sequence, *finals]


def _suffixes(module: Any) -> list[list[str]]:
    """What the names of the parameters end in: for each layer, for each direction."""
    if isinstance(module, nn.RNNCellBase):
        return [[""]]
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [[f"_l{layer}{direction}" for direction in directions] for layer in range(module.num_layers)]


def _initial_states(call: Call, sequence: Tensor) -> State:
    """The states before the first step, ``[B, L * D, H]`` each, in the dtype of the replay."""
    module, given = call.module, call.arguments.get("hx")
    is_cell, has_memory = isinstance(module, nn.RNNCellBase), isinstance(module, nn.LSTM)
    if given is None:
        rows = sum(map(len, _suffixes(module)))
        sizes = (getattr(module, "proj_size", 0) or module.hidden_size, module.hidden_size)
        return tuple(sequence.new_zeros(len(sequence), rows, size) for size in sizes[: 1 + has_memory])
    states = [
        _state_first(module, call.arguments["input"], state) for state in (given if has_memory else [given])
    ]
    return tuple((state.unsqueeze(1) if is_cell else state).to(sequence.dtype) for state in states)


def _grad_outputs(call: Call, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the outputs of :func:`_replay`: without a packed output's bookkeeping, a cell's ``[B, 1, H]``."""
    grads, input = call.raw_grad_output, call.arguments["input"]
    if isinstance(call.module, nn.RNNCellBase):
        grads = [grad.unsqueeze(1) for grad in (grads if isinstance(grads, tuple) else (grads,))]
    elif isinstance(input, PackedSequence):
        grads = [grads[0], *grads[_tensors_of(input) :]]
    return [grad.to(dtype) for grad in grads]


# ---------------------------------------------------------------------- sequences first


def _sequence_first(module: Any, input: Any, tensor: Tensor) -> Tensor:
    """``[B, T, H]`` of the input of a layer, or of its output."""
    if isinstance(input, PackedSequence):
        padded, _ = pad_packed_sequence(PackedSequence(tensor, *input[1:]), batch_first=True)
        return padded
    if input.dim() == 2:
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _state_first(module: Any, input: Any, tensor: Tensor) -> Tensor:
    """``[B, L * D, H]`` of initial or final states; those of packed sequences are in the order before packing.

    Edge cases: what a cell takes and returns is ``[B, H]``.
    """
    if isinstance(module, nn.RNNCellBase):
        return tensor.unsqueeze(0) if input.dim() == 1 else tensor
    is_batched = isinstance(input, PackedSequence) or input.dim() == 3
    return tensor.transpose(0, 1) if is_batched else tensor.unsqueeze(0)


def _tensors_of(packed: PackedSequence) -> int:
    """How many tensors a packed sequence consists of: data, batch sizes, and orders unless it came sorted."""
    return sum(isinstance(part, Tensor) for part in packed)


def _alive(packed: PackedSequence) -> Tensor | None:
    """``[B, T, 1]``, true within each sequence; ``None`` if all are equally long."""
    ones = packed.data.new_ones(len(packed.data), 1, dtype=torch.bool)
    alive, _ = pad_packed_sequence(PackedSequence(ones, *packed[1:]), batch_first=True)
    return None if alive.numel() == len(ones) else alive


def _reversed(sequence: Tensor, alive: Tensor | None) -> Tensor:
    """Turn each sequence of ``[B, T, H]`` around within its own length."""
    if alive is None:
        return sequence.flip(1)
    steps = torch.arange(sequence.shape[1], device=sequence.device).view(1, -1, 1)
    index = torch.where(alive, alive.sum(1, keepdim=True) - 1 - steps, steps)
    return sequence.gather(1, index.expand_as(sequence))
