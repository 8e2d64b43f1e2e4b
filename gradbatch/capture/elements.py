"""Maps from the elements of a tensor to samples, and how they are put together.

A map is an int64 tensor of the tensor's shape: a sample's number, ``NOBODY`` or ``SEVERAL``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

NOBODY = -1
# More than there are samples, and exact in float32.
SEVERAL = 2**32

Masks = dict[int, Tensor]
"""Some elements of the outputs of a node, or of its inputs, by their number."""


def union(first: Tensor, second: Tensor) -> Tensor:
    """Whose the elements of a sum of two gradients are."""
    shape, (first, second) = first.shape, _folded(first, second)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    return torch.where((low == NOBODY) | (low == high), high, SEVERAL).expand(shape)


def intersection(first: Tensor, second: Tensor) -> Tensor:
    """Whose elements can be, if two reasons each leave few."""
    shape, (first, second) = first.shape, _folded(first, second)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    return torch.where((high == SEVERAL) | (low == high), low, NOBODY).expand(shape)


def merged(owner: Tensor, axes: list[int]) -> Tensor:
    """Whose sums over some axes are, which are kept with size 1."""
    shape, (owner,) = [1 if a in axes else size for a, size in enumerate(owner.shape)], _folded(owner)
    if not axes:
        return owner.expand(shape)
    if not owner.numel():
        return owner.new_full(shape, NOBODY)
    low = owner.masked_fill(owner == NOBODY, SEVERAL).amin(axes, keepdim=True)
    high = owner.amax(axes, keepdim=True)
    return torch.where((high == NOBODY) | (low == high), high, SEVERAL).expand(shape)


def _folded(*owners: Tensor) -> list[Tensor]:
    """Maps without the axes along which all were expanded: they may be as large as logits of a whole vocabulary."""
    folded = list(owners)
    for axis in range(owners[0].dim()):
        if all(owner.stride(axis) == 0 and owner.shape[axis] for owner in owners):
            folded = [owner.narrow(axis, 0, 1) for owner in folded]
    return folded


def of_all(owners: Iterable[Tensor]) -> Tensor:
    """Whose the sum of all elements is, a tensor without axes."""
    return merged(torch.cat([merged(owner.reshape(-1), [0]) for owner in owners]), [0]).squeeze(0)


def of_lines(owner: Tensor, axis: int) -> Tensor:
    """Whose the sums over all axes but one are, ``[size of the axis]``."""
    return merged(owner, [a for a in range(owner.dim()) if a != axis]).reshape(-1)


def of_operand(owner: Tensor, shape: Sequence[int]) -> Tensor:
    """Whose the elements of an operand are that was broadcast to a map's shape."""
    added = owner.dim() - len(shape)
    if added >= 0 and all(size in (1, owner.shape[added + a]) for a, size in enumerate(shape)):
        repeated = [added + a for a, size in enumerate(shape) if size == 1]
        return merged(owner, [*range(added), *repeated]).reshape(shape)
    if owner.numel() == math.prod(shape):
        return owner.reshape(shape)
    return of_all([owner]).expand(*shape)


def along(line: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """A map of which each index of an axis is one sample's."""
    return line.view(-1, *(1,) * (len(shape) - axis - 1)).expand(*shape)


def owners_in(owners: Iterable[Tensor]) -> Tensor:
    """The samples to which elements belong, in order; ``SEVERAL`` comes last."""
    folded = torch.cat([_folded(owner)[0].reshape(-1) for owner in owners])
    several = folded == SEVERAL
    # Faster than to sort them.
    found = torch.bincount(folded.masked_fill(several, NOBODY) + 1).nonzero().squeeze(1) - 1
    last = [found.new_tensor([SEVERAL])] if bool(several.any()) else []
    return torch.cat([found[found != NOBODY], *last])


def place_in(known: Tensor, numbers: Tensor) -> Tensor:
    """Where numbers stand among sorted ones; behind them if they are none of them."""
    if not len(known):
        return torch.zeros_like(numbers)
    place = torch.searchsorted(known, numbers.contiguous()).clamp_max(len(known) - 1)
    return torch.where(known[place] == numbers, place, len(known))


def traced(owners: Mapping[int, Tensor], reached: Callable[[Masks], Masks]) -> dict[int, Tensor]:
    """Whose elements are, where it can only be asked which of them depend on some others.

    Each sample is in half of a few sets, no two samples in the same ones. So what depends on two samples is reached by
    more than half of the sets.

    Args:
        owners: of the others.
        reached: the elements that depend on some of them; empty where none do.
    """
    samples = owners_in(owners.values())
    several = {n: owner == SEVERAL for n, owner in owners.items()}
    mixed = bool((samples == SEVERAL).any())
    samples = samples[samples != SEVERAL]
    codes = _codes(len(samples), mixed).to(samples.device)
    place = {n: place_in(samples, owner) for n, owner in owners.items()}
    number: Masks = {}
    for digit in range(codes.shape[1]):
        chosen = torch.cat([codes[:, digit], codes.new_zeros(1)])  # nobody is in none
        for n, mask in reached({n: chosen[p] | several[n] for n, p in place.items()}).items():
            number[n] = number.get(n, 0) | mask.long() << digit
    powers = 2 ** torch.arange(codes.shape[1], device=samples.device)
    spelled, order = (codes * powers).sum(1).sort()
    samples = torch.cat([samples[order], samples.new_tensor([SEVERAL])])
    return {
        n: samples[place_in(spelled, found)].masked_fill(found == 0, NOBODY) for n, found in number.items()
    }


def _codes(count: int, mixed: bool) -> Tensor:
    """The sets that each of some samples is in, ``[count, sets]``; not in all of them, if others are in all."""
    size = 1 if count == 1 and not mixed else 2
    while math.comb(size, (size + 1) // 2) < count:
        size += 1
    codes = torch.zeros(count, size if count or mixed else 0, dtype=torch.bool, device="cpu")
    for code, members in zip(codes, combinations(range(size), (size + 1) // 2), strict=False):
        code[list(members)] = True
    return codes
