"""Operands of an operation: what they are computed in, and parts of them."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gradbatch.plans.convolutions import Patches
from gradbatch.plans.costs import Sizes
from gradbatch.plans.slabs import Operand

AnyOperand = TypeVar("AnyOperand", bound=Operand)
_AS_IT_IS = nullcontext()


def window_of(operand: Operand) -> int:
    """Elements of the window that patches are read with; 0 for a tensor."""
    return math.prod(operand.window.kernel) if isinstance(operand, Patches) else 0


def strip_sizes(operand: Operand) -> tuple[int, int]:
    """How many strips patches can be cut into, and how many elements of a sample are copied for that; or 1 and 0."""
    return operand.strip_sizes() if isinstance(operand, Patches) else (1, 0)


@cache
def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that operands of these are computed in: the widest of them, at least float32."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Leave autocast, which would compute products in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _AS_IT_IS


def sizes_of(
    left: Tensor,
    right: Operand,
    others: tuple[Tensor, Operand] | None = None,
    count: int = 1,
    shared: bool = False,
) -> Sizes:
    """The sizes that an operation's plans depend on; arguments as for ``Planner.plan``."""
    samples, groups, outputs, positions = left.shape
    dtypes, window = {left.dtype, right.dtype}, window_of(right)
    strips, stripped = strip_sizes(right)
    samples2, positions2 = samples, positions
    if others is not None:
        left2, right2 = others
        samples2, _, _, positions2 = left2.shape
        dtypes, window = dtypes | {left2.dtype, right2.dtype}, max(window, window_of(right2))
    return Sizes(
        n=samples,
        g=groups,
        p=outputs,
        d=right.shape[2],
        t=positions,
        m=samples2,
        s=positions2,
        k=count,
        itemsize=accumulation_dtype(*dtypes).itemsize,
        pair=others is not None,
        window=window,
        strips=strips,
        stripped=stripped,
        cuda=left.device.type == "cuda",
        shared=shared,
    )


def select(operand: AnyOperand, index: Tensor) -> AnyOperand:
    """Take the samples at ``index``."""
    chosen = operand[index] if isinstance(operand, Tensor) else operand.select(index)
    return cast(AnyOperand, chosen)


def promoted(*operands: Any) -> Any:
    """Cast tensors and patches to the dtype they are computed in; each keeps its type."""
    dtypes = [operand.dtype for operand in operands]
    dtype = accumulation_dtype(*dtypes)
    if dtypes.count(dtype) == len(dtypes):
        return operands
    return [operand.to(dtype) for operand in operands]


def widened(left: Tensor, right: Operand) -> tuple[Tensor, Operand]:
    """Operands in float64, where the device has that."""
    return (left, right) if left.device.type == "mps" else (left.double(), right.to(torch.float64))
