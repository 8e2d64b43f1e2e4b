"""Broadcasting: what an operation contributes element by element, summed over the elements of each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.rules.axes import full, total
from gradbatch.rules.call import SampleLayout


def summed_to(values: Tensor, owners: SampleLayout | Tensor, samples: int, shape: Sequence[int]) -> Tensor:
    """Sum each sample's elements to a shape that broadcasts to that of ``values``, ``[N, *shape]``.

    Args:
        values: contributions, in the shape of the operation's output.
        owners: where the samples lie in it: a layout, or the owner of each element (-1: nobody), broadcastable.
        samples: ``N``.
        shape: of the operand.

    Edge cases: an operand that has the sample axis itself gets zeros in the rows of the other samples.
    """
    if isinstance(owners, Tensor):
        return _summed_by_element(values, owners, samples, shape)
    if owners.axis is None:
        return total_to(values, shape).unsqueeze(0)
    axis, missing = owners.axis, values.dim() - len(shape)
    if axis >= missing and shape[axis - missing] != 1:
        owner = owners.owner(values.shape[axis]).to(values.device)
        owner = owner.view(-1, *(1,) * (values.dim() - axis - 1))
        return summed_to(values, owner, samples, shape)
    first = owners.sample_first(values)
    if first.dim() == values.dim():
        first = first.unsqueeze(axis + 1)
    # The sample axis is in front and its rows where it was, so the axes are those of the operand, one further on.
    axes = [
        a for a in range(values.dim()) if a < missing or (shape[a - missing] == 1 and first.shape[a + 1] != 1)
    ]
    return total(first, tuple(a + 1 for a in axes)).reshape(samples, *shape)


def summed_over_repetitions(
    values: Tensor, owners: SampleLayout | Tensor, samples: int, shape: Sequence[int]
) -> Tensor:
    """Sum each sample's elements to a shape that ``repeat`` took to that of ``values``, ``[N, *shape]``.

    Args:
        values, owners, samples, shape: as for :func:`summed_to`.
    """
    shape = torch.Size(shape)
    once = (1,) * (values.dim() - len(shape)) + shape
    # Each axis in two, [repetitions, size]: broadcast over the first, and the operand's own along the second.
    axes = [
        n for size, length in zip(once, values.shape, strict=True) for n in (length // max(1, size), size)
    ]
    axis = owners.axis if isinstance(owners, SampleLayout) else None
    if isinstance(owners, SampleLayout) and axis is not None:
        if once[axis] and owners.stride % once[axis] == 0:  # each repetition is one sample's
            owners = SampleLayout(samples, 2 * axis, owners.stride // once[axis])
        else:
            owner = owners.owner(values.shape[axis]).to(values.device)
            owners = owner.view(-1, *(1,) * (values.dim() - axis - 1))
    if isinstance(owners, Tensor):
        owners = owners.expand(values.shape).reshape(axes)
    apart = [n for size in once for n in (1, size)]
    return summed_to(values.reshape(axes), owners, samples, apart).reshape(samples, *shape)


def _summed_by_element(values: Tensor, owners: Tensor, samples: int, shape: Sequence[int]) -> Tensor:
    elements = math.prod(shape)
    place = torch.arange(elements, device=values.device).view(tuple(shape)).expand(values.shape)
    owners = owners.expand(values.shape)
    index = (owners.clamp_min(0) * elements + place).reshape(-1)
    values = full(torch.where(owners < 0, torch.zeros_like(values), values)).reshape(-1)
    sums = values.new_zeros(samples * elements).index_add_(0, index, values)
    return sums.view(samples, *shape)


def total_to(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum to a shape that broadcasts to that of ``values``, in at least float32."""
    missing = values.dim() - len(shape)
    axes = [
        a for a in range(values.dim()) if a < missing or (shape[a - missing] == 1 and values.shape[a] != 1)
    ]
    return total(values, tuple(axes)).reshape(tuple(shape))
