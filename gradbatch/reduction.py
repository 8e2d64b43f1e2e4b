"""From the per-sample gradients of all parameters to the quantities asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradbatch.factors import PerSampleGrad
from gradbatch.factors.base import full_precision
from gradbatch.quantities import Quantity
from gradbatch.quantities.calls import prepare, reduce


def reduce_all(
    grads: Mapping[str, PerSampleGrad],
    quantities: Sequence[Quantity],
    budget: int,
    earlier: Sequence[Mapping[str, Tensor]] = (),
) -> list[tuple[Quantity, dict[str, Tensor]]]:
    """Reduce the gradients of every parameter to every quantity.

    What several operations need is materialised once, where that is faster. Joint quantities need all parameters'
    gradients at once, so that what is kept for them adds up; it is at most ``budget``.

    Args:
        grads: by parameter name.
        quantities: what to compute.
        budget: bytes that may be kept.
        earlier: results of an earlier step, quantity by quantity, whose memory may be written to.

    Returns:
        The quantities, prepared, with their tensors by parameter name.
    """
    operations = [operation for quantity in quantities for operation in quantity.operations]
    tensors: list[dict[str, Tensor]] = [{} for _ in quantities]
    kept = dict(grads)
    joint = any(quantity.joint for quantity in quantities)
    if joint:
        room = budget
        for name, grad in grads.items():
            kept[name] = grad.keep(operations, room)
            if kept[name] is not grad:
                room -= grad.num_samples * grad.shape.numel() * grad.dtype.itemsize
        quantities = [prepare(quantity, kept) for quantity in quantities]
    for name, grad in kept.items():
        olds = [old.get(name) for old in earlier] or [None] * len(tensors)
        once = grad if joint else grad.keep(operations, budget)
        for into, quantity, old in zip(tensors, quantities, olds, strict=True):
            with full_precision(grad.device):
                into[name] = reduce(quantity, name, once, old)
    return list(zip(quantities, tensors, strict=True))
