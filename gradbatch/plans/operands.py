"""Operands of an operation: what they are computed in, and parts of them."""

import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gradbatch.plans.convolutions import Patches
from gradbatch.plans.slabs import Operand

AnyOperand = TypeVar("AnyOperand", bound=Operand)


def window_of(operand: Operand) -> int:
    """Elements of the window that patches are read with; 0 for a tensor."""
    return math.prod(operand.window.kernel) if isinstance(operand, Patches) else 0


def strip_sizes(operand: Operand) -> tuple[int, int]:
    """How many strips patches can be cut into, and how many elements of a sample are copied for that; or 1 and 0."""
    return operand.strip_sizes() if isinstance(operand, Patches) else (1, 0)


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that operands of these are computed in: the widest of them, at least float32."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def select(operand: AnyOperand, index: Tensor) -> AnyOperand:
    """Take the samples at ``index``."""
    chosen = operand[index] if isinstance(operand, Tensor) else operand.select(index)
    return cast(AnyOperand, chosen)


def promoted(*operands: Any) -> Any:
    """Cast tensors and patches to the dtype they are computed in; each keeps its type."""
    dtype = accumulation_dtype(*(operand.dtype for operand in operands))
    return [operand if operand.dtype == dtype else operand.to(dtype) for operand in operands]


def widened(left: Tensor, right: Operand) -> tuple[Tensor, Operand]:
    """Operands in float64, where the device has that."""
    return (left, right) if left.device.type == "mps" else (left.double(), right.to(torch.float64))
