"""What oneDNN's LSTM, which torch takes on a CPU, keeps for its own backward: the gates.

Reading them spares the product of matrices they come from. Where they lie is not documented, so nothing is taken on
trust: some are computed anew, and the memories that follow from all of them must be those that the hidden states show.
Otherwise nothing was found, and the gates are computed as for any other kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbatch.rules.recurrent_cells import LSTM, State, Trace
from gradbatch.rules.recurrent_steps import Weights, memories, states_from

# Gates and hidden states lie between -1 and 1. Kernels round differently; another place holds another number.
_CLOSE = 1e-4
_EVERY = 16  # steps
# Rows of gates begin at multiples of so many bytes, but not of so many elements.
_ALIGNED, _ALIASED = 64, 256


def kept_trace(
    kept: Mapping[str, Tensor], weights: Weights, input: Tensor, state: State, reverse: bool
) -> Trace | None:
    """What a direction of an LSTM computed; ``None`` if the gates were not found.

    Args:
        kept: by oneDNN's node: ``result0`` are the hidden states ``[T, B, H]``, ``result3`` is its workspace.
        weights: of the direction.
        input: ``[T, B, D]``, in the order in which the direction takes it.
        state: before the first step.
        reverse: whether it takes the last step first.
    """
    output = kept["result0"]
    if output.dtype != torch.float32 or input.dtype != torch.float32:
        return None
    gates = _gates(kept["result3"], (*output.shape[:2], len(weights.hh)))
    if gates is None:
        return None
    hidden = states_from(state[0], len(output), output.flip(0) if reverse else output)
    opened = gates.chunk(4, -1)[3].clamp_min(torch.finfo(gates.dtype).tiny)
    trace = Trace(LSTM, gates, gates, hidden, memories(gates, state[1]), hidden[1:] / opened)
    return trace if _is_right(trace, weights, input) else None


def _is_right(trace: Trace, weights: Weights, input: Tensor) -> bool:
    assert trace.memory is not None and trace.squashed is not None
    previous = trace.hidden[-2]
    again = F.linear(input[-1], weights.ih, weights.bias_ih) + F.linear(previous, weights.hh, weights.bias_hh)
    LSTM.activate(again, again)
    steps = list(range(len(input) - 1, -1, -_EVERY))
    return _is_close(trace.gates[-1], again) and _is_close(
        trace.squashed[steps], trace.memory[1:][steps].tanh()
    )


def _gates(workspace: Tensor, shape: tuple[int, int, int]) -> Tensor | None:
    """The workspace begins with them, ``[T, B, G]``: a row for each step and sequence, and something between rows."""
    steps, batch, gates = shape
    unit = _ALIGNED // torch.float32.itemsize
    row = -(-gates // unit) * unit
    row += unit if row % _ALIASED == 0 else 0
    bytes_of_gates = steps * batch * row * torch.float32.itemsize
    if workspace.dtype != torch.uint8 or workspace.numel() < bytes_of_gates:
        return None
    rows = workspace[:bytes_of_gates].view(torch.float32).view(steps, batch, row)
    return rows[..., :gates].contiguous()  # read often, and fastest without gaps


def _is_close(first: Tensor, second: Tensor) -> bool:
    return bool((first - second).abs_().max() <= _CLOSE)
