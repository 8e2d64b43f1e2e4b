"""The two moves that every rule makes: gather the positions of a sample on one axis, and sum over them."""

import math

import torch
from torch import Tensor


def by_position(tensor: Tensor, features: int) -> Tensor:
    """Flatten the axes between samples and features: ``[N, *positions, *features]`` to ``[N, T, *features]``.

    Args:
        tensor: samples first.
        features: number of trailing axes to keep.

    Edge cases: without positions ``T = 1``; empty axes are kept.
    """
    split = tensor.dim() - features
    if split == 2:
        return tensor
    # Not reshape(N, -1, ...): an empty tensor leaves -1 undetermined.
    return tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:split]), *tensor.shape[split:])


def total(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Sum over ``axes``, accumulated and returned in at least float32; maybe a view, where there is nothing to add."""
    if all(tensor.shape[axis] == 1 for axis in axes):
        return full(tensor.squeeze(axes))
    return tensor.sum(axes, dtype=torch.promote_types(tensor.dtype, torch.float32))


def full(tensor: Tensor) -> Tensor:
    """The tensor in at least float32: the precision in which gradients are accumulated."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
