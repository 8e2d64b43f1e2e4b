"""Where recurrent layers keep sequences, steps and states: brought to sequences first, packed ones too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence


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
    if isinstance(input, PackedSequence) and 0 < index < tensors_of(input):
        return tensor
    if index == 0 and not isinstance(module, nn.RNNCellBase):
        return sequence_first(module, input, tensor)
    return state_first(module, input, tensor)


def sequence_first(module: Any, input: Any, tensor: Tensor) -> Tensor:
    """``[B, T, H]`` of the input of a layer, or of its output."""
    if isinstance(input, PackedSequence):
        padded, _ = pad_packed_sequence(PackedSequence(tensor, *input[1:]), batch_first=True)
        return padded
    if input.dim() == 2:
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def state_first(module: Any, input: Any, tensor: Tensor) -> Tensor:
    """``[B, L * D, H]`` of initial or final states; those of packed sequences are in the order before packing.

    Edge cases: what a cell takes and returns is ``[B, H]``.
    """
    if isinstance(module, nn.RNNCellBase):
        return tensor.unsqueeze(0) if input.dim() == 1 else tensor
    is_batched = isinstance(input, PackedSequence) or input.dim() == 3
    return tensor.transpose(0, 1) if is_batched else tensor.unsqueeze(0)


def tensors_of(packed: PackedSequence) -> int:
    """How many tensors a packed sequence consists of: data, batch sizes, and orders unless it came sorted."""
    return sum(isinstance(part, Tensor) for part in packed)


def lengths_of(input: Any) -> Tensor | None:
    """How long each packed sequence is, ``[B]``; ``None`` if all are equally long."""
    if not isinstance(input, PackedSequence):
        return None
    numbers = torch.arange(len(input.data), device=input.data.device)
    _, lengths = pad_packed_sequence(PackedSequence(numbers, *input[1:]))
    return None if bool((lengths == lengths[0]).all()) else lengths.to(input.data.device)


def numbers_of(sequence: Tensor) -> Tensor:
    """Numbers of the steps, ``[T, 1]``."""
    return torch.arange(len(sequence), device=sequence.device).unsqueeze(1)


def turned(sequence: Tensor, suffix: str, lengths: Tensor | None) -> Tensor:
    """From the order of the steps ``[T, B, H]`` to that in which a direction takes them, or back.

    One that runs backwards turns each sequence around within its own length.
    """
    if not suffix.endswith("_reverse"):
        return sequence
    if lengths is None:
        return sequence.flip(0)
    steps = numbers_of(sequence)
    index = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return sequence.gather(0, index.unsqueeze(2).expand_as(sequence))
