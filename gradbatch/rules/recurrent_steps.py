"""All steps of one direction of a recurrent layer: forward, and back by the formulas of its cells.

Tensors have the steps first, ``[T, B, *]``; those of a single step are ``[B, *]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbatch.rules.recurrent_cells import State, Steps, Trace

_AT_ONCE = 2**16  # elements


@dataclass(frozen=True)
class Weights:
    """Of a direction: ``ih [G, D]`` and ``hh [G, H]`` with their biases ``[G]``, and the projection ``hr``, if any."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    hr: Tensor | None


def forward(
    kind: type[Steps],
    weights: Weights,
    input: Tensor,
    state: State,
    output: Tensor | None = None,
    over: Tensor | None = None,
) -> Trace:
    """Take all steps of a direction; in one product of matrices if the hidden states are known.

    Args:
        kind: of cell.
        weights: of the direction.
        input: ``[T, B, D]``, in the order in which the direction takes it.
        state: before the first step.
        output: the hidden states after each step, ``[T, B, H]``, if they are known.
        over: true where a sequence is over, ``[T, B, 1]``; ``None`` if all are equally long. The hidden states are zero
            there.
    """
    hidden = states_from(state[0], len(input), output)
    if output is not None and kind.shows_gates:
        return Trace(kind, hidden[1:], hidden[1:], hidden)
    bias_ih, bias_hh = weights.bias_ih, weights.bias_hh
    if bias_ih is not None and bias_hh is not None and not kind.splits_gates:
        bias_ih = bias_ih + bias_hh
    gates = hidden_gates = F.linear(input, weights.ih, bias_ih).contiguous()
    if kind.splits_gates:
        hidden_gates = torch.zeros_like(gates) if bias_hh is None else bias_hh.repeat(*gates.shape[:-1], 1)
    if output is None:
        _take_steps(kind, weights, gates, hidden_gates, state, hidden, over)
    else:
        hidden_gates.view(-1, len(weights.hh)).addmm_(hidden[:-1].flatten(0, 1), weights.hh.mT)
        kind.activate(gates, hidden_gates)
    if len(state) == 1:
        return Trace(kind, gates, hidden_gates, hidden)
    memory = memories(gates, state[1])
    return Trace(kind, gates, hidden_gates, hidden, memory, memory[1:].tanh())


def _take_steps(
    kind: type[Steps],
    weights: Weights,
    gates: Tensor,
    hidden_gates: Tensor,
    state: State,
    hidden: Tensor,
    over: Tensor | None,
) -> None:
    """Complete gates and hidden states step by step, in place."""
    for t in range(len(gates)):
        hidden_gates[t].addmm_(state[0], weights.hh.mT)
        kind.activate(gates[t], hidden_gates[t])
        state = kind.advance(gates[t], state)
        if weights.hr is not None:
            state = (F.linear(state[0], weights.hr), *state[1:])
        if over is not None:
            state = tuple(each.masked_fill(over[t], 0) for each in state)
        hidden[t + 1] = state[0]


def states_from(first: Tensor, steps: int, rest: Tensor | None) -> Tensor:
    """States with the first one in front, ``[T + 1, B, H]``; room for the others where they are not known.

    Those of a sequence lie next to each other: they will be a factor of its gradients.
    """
    states = first.new_empty(len(first), steps + 1, *first.shape[1:]).transpose(0, 1)
    states[0] = first
    if rest is not None:
        states[1:] = rest
    return states


def memories(gates: Tensor, first: Tensor) -> Tensor:
    """Memory of an LSTM before the first step and after each, ``[T + 1, B, H]``, by its gates behind nonlinearities."""
    memory = first.new_empty(len(gates) + 1, *first.shape)
    memory[0] = first
    states = memory.unbind(0)
    i, f, g, _ = gates.chunk(4, -1)
    torch.mul(i, g, out=memory[1:])
    for forget, before, after in zip(f.unbind(0), states, states[1:], strict=False):
        after.addcmul_(forget, before)
    return memory


def backward(
    trace: Trace, weights: Weights, grads: Tensor, memory_grads: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Go all steps back.

    Args:
        trace: of a direction.
        weights: its own.
        grads: what arrives at the hidden states from outside, ``[T, B, H]``. What arrives by way of later steps is
            added, in place.
        memory_grads: what arrives at the memories from outside, likewise; ``None``: nothing.

    Returns:
        Gradients of the input's part of the gates, and of the hidden state's, ``[T, B, G]``; those of a sequence lie
        next to each other. One tensor where they are the same.
    """
    after, length = grads.unbind(0), len(grads)
    memory_grad = torch.zeros_like(after[0] if trace.memory is None else trace.memory[0])
    shape = (grads.shape[1], length, trace.gates.shape[-1])
    input_deltas = hidden_deltas = grads.new_empty(shape).transpose(0, 1)
    if trace.kind.splits_gates:
        hidden_deltas = torch.empty_like(input_deltas)
    # What is computed for many steps at once is so for few enough to stay in a cache until they are taken.
    size = max(1, _AT_ONCE // max(1, trace.gates[0].numel()))
    for last in range(len(after), 0, -size):
        first = max(0, last - size)
        steps = trace.kind(trace, first, last)
        deltas = steps.hidden_deltas.unbind(0)
        for t in reversed(range(first, last)):
            if memory_grads is not None:
                memory_grad += memory_grads[t]
            grad = after[t] if weights.hr is None else after[t] @ weights.hr
            before = after[t - 1] if t else None
            steps.back(t - first, grad, memory_grad, before)
            if before is not None:
                before.addmm_(deltas[t - first], weights.hh)
        hidden_deltas[first:last] = steps.hidden_deltas
        if trace.kind.splits_gates:
            input_deltas[first:last] = steps.input_deltas
    return input_deltas, hidden_deltas
