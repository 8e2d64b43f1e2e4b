"""Gradients that are materialised once and kept for several operations: whether that pays, and in which order."""

import math
from collections.abc import Sequence

from torch import Tensor

from gradbatch.plans.choice import KEEP, RECYCLED
from gradbatch.plans.contractions import Planner
from gradbatch.plans.convolutions import STRIPS
from gradbatch.plans.costs import FLOPS_FETCHED, FLOPS_READ
from gradbatch.plans.operands import accumulation_dtype, promoted, sizes_of
from gradbatch.plans.slabs import Operand, shape_of, stripped


def growth(left: Tensor, right: Operand) -> int:
    """Bytes by which materialised gradients are larger than the operands that they stand for; at least 0."""
    itemsize = accumulation_dtype(left.dtype, right.dtype).itemsize
    return max(0, math.prod(shape_of(left, right)) * itemsize - left.nbytes - right.nbytes)


def pays_to_keep(
    planner: Planner, operations: Sequence[str], left: Tensor, right: Operand, room: int
) -> bool:
    """Whether several operations are faster from gradients that are materialised once and kept.

    They are not kept where plans are forced.

    Args:
        planner: decides how each operation is evaluated.
        operations: keys of :data:`gradbatch.plans.choice.PLANS`.
        left, right: the operands.
        room: bytes by which what is kept may be larger than the operands.
    """
    if planner.force or growth(left, right) > room:
        return False
    sizes = sizes_of(left, right)
    elements = sizes.n * sizes.g * sizes.p * sizes.d
    kept = elements * sizes.itemsize
    fetched = 0 if sizes.cuda or kept <= RECYCLED else FLOPS_FETCHED * elements
    apart = sum([planner.ranked(name, sizes)[0].time for name in operations])
    return planner.ranked(KEEP, sizes)[0].time + fetched + FLOPS_READ * elements * len(operations) < apart


def keep(planner: Planner, left: Tensor, right: Operand) -> tuple[list[Tensor], bool]:
    """Per-sample gradients in the order of elements that is the fastest.

    Returns: strips, ``[N, G, P, *]`` each, and whether their two axes of elements have the channels last; or
    ``[N, G, P, D]`` alone.
    """
    left, right = promoted(left, right)
    plan = planner.candidates(KEEP, left, right)[1][0]
    return stripped(left, right, plan.tile, plan.kernel), STRIPS.get(plan.kernel, False)
