"""What is in the arguments and results of a call: tensors, nested in anything, and plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

PLAIN_TYPES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)


def is_plain(value: Any) -> bool:
    """Whether a value holds no tensor: numbers, text, and what torch knows of the kind."""
    # By exact type first: this runs for every attribute in every call.
    return type(value) in PLAIN_TYPES or (
        isinstance(value, enum.Enum) or (type(value) is tuple and all(map(is_plain, value)))
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested tuples, lists, dicts and objects with attributes such as dataclasses."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif type(value) in PLAIN_TYPES:
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            _collect(getattr(value, entry.name, None), found)


def outputs_of(output: Any) -> Sequence[Tensor]:
    """The tensors that a forward returned, in nested tuples too; none if it returned anything else."""
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, (tuple, list)):
        return []
    found: list[Tensor] = []
    for item in output:
        inner = outputs_of(item)
        if not inner and item is not None:
            return []
        found.extend(inner)
    return found
