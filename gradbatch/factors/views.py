"""Gradients of a view of a parameter as gradients of the parameter: the same numbers in another shape or order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from gradbatch.factors.base import PerSampleGrad
from gradbatch.factors.blocks import Blocks
from gradbatch.factors.dense import Dense
from gradbatch.factors.outer_product import OuterProduct
from gradbatch.factors.sums import Sum


def reshaped(grad: PerSampleGrad, shape: Sequence[int]) -> PerSampleGrad:
    """Gradients of ``view`` or ``reshape``: the elements stay in their order. The structure is kept where it can be.

    Args:
        grad: with respect to the view.
        shape: of what it is a view of.
    """
    if tuple(grad.shape) == tuple(shape):
        return grad
    if isinstance(grad, Sum):
        return Sum([reshaped(term, shape) for term in grad.terms]).with_planner(grad.planner)
    if isinstance(grad, OuterProduct):
        return OuterProduct(grad.left, grad.right, shape).with_planner(grad.planner)
    if isinstance(grad, Blocks):
        return Blocks(grad.blocks, shape).with_planner(grad.planner)
    return Dense(grad.dense().reshape(grad.num_samples, *shape)).with_planner(grad.planner)


def permuted(grad: PerSampleGrad, axes: Sequence[int]) -> PerSampleGrad:
    """Gradients with the parameter's axes in the order ``axes``; an outer product stays one where it can.

    Args:
        grad: with respect to some tensor.
        axes: of that tensor, in their new order.
    """
    shape = [grad.shape[axis] for axis in axes]
    moved = [axis for axis in axes if grad.shape[axis] != 1]
    if moved == sorted(moved):
        return reshaped(grad, shape)
    if isinstance(grad, Sum):
        return Sum([permuted(term, axes) for term in grad.terms]).with_planner(grad.planner)
    if isinstance(grad, OuterProduct) and isinstance(grad.right, Tensor) and _swaps_factors(grad, moved):
        return OuterProduct(grad.right, grad.left, shape).with_planner(grad.planner)
    return Dense(grad.dense().permute(0, *(axis + 1 for axis in axes))).with_planner(grad.planner)


def _swaps_factors(grad: OuterProduct, moved: Sequence[int]) -> bool:
    """Whether an order of axes keeps the groups in front, and puts the right factor's axes before the left one's."""
    groups, outputs, inputs = grad.factor_sizes
    axes = sorted(moved)
    for first in range(len(axes) + 1):
        for second in range(first, len(axes) + 1):
            parts = axes[:first], axes[first:second], axes[second:]
            if [math.prod(grad.shape[a] for a in part) for part in parts] == [groups, outputs, inputs]:
                return [*parts[0], *parts[2], *parts[1]] == list(moved)
    return False
