"""Provenance: is a value that all samples share really computed from parameters alone?

If it is not, the samples are coupled (a loss over pairs, statistics over the batch), and no gradient is a single
sample's. The autograd graph shows every operand that needs a gradient, but not the others: a constant, a buffer, or the
batch. So a shared value is accepted only where nothing that it was computed from could be the samples' data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.readings import POINTWISE
from gradbatch.capture.shared import UNARY

# What these keep as indices is what they selected.
SELECTING = frozenset(
    f"{name}Backward"
    for name in "Max Min Median Nanmedian Mode Kthvalue Sort Topk Aminmax Cummax Cummin".split()  # noqa: SIM905
)

# These normalise what they are given, or change it in place.
KEEPING = frozenset(
    {"NativeBatchNormBackward", "NativeLayerNormBackward", "NativeGroupNormBackward", "CopySlices"}
)


def suspect(region: Iterable[Node], own: Sequence[Tensor], samples: int) -> tuple[Node, str] | None:
    """Look for an operation that may have brought the samples' data into a shared region.

    Args:
        region: nodes taken for computed from parameters alone.
        own: the model's parameters and buffers.
        samples: ``N``.

    Returns:
        The first such operation, in the region or among what it was computed from, and what it reads; ``None`` if there
        is none.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    pending = list(region)
    visited = set(pending)
    for node in pending:
        reason = _reads(node, own, storages, samples)
        if reason is not None:
            return node, reason
        # What needs a gradient of something else than the wanted parameters is no part of the region, but of this.
        below = {found for found, _ in node.next_functions if found is not None} - visited
        visited |= below
        pending += below
    return None


def _reads(node: Node, own: Sequence[Tensor], storages: Collection[int], samples: int) -> str | None:
    """What a node reads that may be data; ``None`` if nothing."""
    leaf = graph.accumulated_variable(node)
    if leaf is not None:
        mine = leaf.untyped_storage().data_ptr() in storages
        return None if mine else f"a leaf of shape {tuple(leaf.shape)} that is no parameter of the model"
    if graph.kind(node) in UNARY or _keeps_shape(node):
        return None
    constants = list(_constants(node))
    for constant in constants:
        known = constant.untyped_storage().data_ptr() in storages
        if not known and _may_hold_samples(constant, samples) and not _is_copy(constant, own):
            return f"a tensor of shape {tuple(constant.shape)}"
    unseen = any(below is None for below, _ in node.next_functions)
    if not unseen or constants or _concatenates_own(node, own):
        return None
    return "an operand that it does not keep"


def _concatenates_own(node: Node, own: Sequence[Tensor]) -> bool:
    """Whether what a ``cat`` appends has the shape of one of the model's own constants, such as a bias of zeros."""
    if graph.kind(node) != "CatBackward":
        return False
    slots = [slot for slot, (below, _) in enumerate(node.next_functions) if below is not None]
    rest, axis = list(graph.outputs(node)[0][0]), graph.saved(node, "dim")
    axis = axis - 2**64 if axis >= 2**63 else axis
    rest[axis] -= sum(graph.input_shape(node, slot)[axis] for slot in slots)
    return any(not tensor.requires_grad and list(tensor.shape) == rest for tensor in own)


def _is_copy(constant: Tensor, own: Sequence[Tensor]) -> bool:
    """Whether a tensor has the values of a parameter or buffer, which is cloned or cast now and then."""
    return any(
        tensor.shape == constant.shape
        and tensor.device == constant.device
        and torch.equal(tensor.to(constant.dtype), constant)
        for tensor in own
    )


def _keeps_shape(node: Node) -> bool:
    """Whether the node acts element by element on something of its output's size, or keeps that size.

    Samples cannot come in there, unless a parameter has as many rows as the batch.
    """
    if graph.kind(node) not in POINTWISE | KEEPING:
        return False
    size = math.prod(graph.outputs(node)[0][0])
    inputs = [slot for slot, (below, _) in enumerate(node.next_functions) if below is not None]
    return any(math.prod(graph.input_shape(node, slot)) == size for slot in inputs)


def _constants(node: Node) -> Iterator[Tensor]:
    """Operands without a gradient that a node keeps; not what it computed itself."""
    names = [name for name in graph.saved_names(node) if not _is_result(node, name)]
    kept: list[Any] = [*graph.saved_by_function(node), *(graph.saved(node, name) for name in names)]
    for value in kept:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor) and not item.requires_grad:
                yield item


def _is_result(node: Node, name: str) -> bool:
    """Whether a node keeps under a name what it computed itself."""
    return name.startswith("result") or (name == "indices" and graph.kind(node) in SELECTING)


def _may_hold_samples(constant: Tensor, samples: int) -> bool:
    """Whether a tensor could be data of ``N`` samples: by its shape, unless it counts positions."""
    if all(size % samples for size in constant.shape):
        return False
    return constant.is_floating_point() or constant.is_complex() or not _counts_positions(constant)


def _counts_positions(ids: Tensor) -> bool:
    """Whether whole numbers go up in even steps along one axis, or depend on the distance from the diagonal alone."""
    ids = ids.squeeze()
    for axis in range(ids.dim()):
        line = ids.movedim(axis, -1).flatten(0, -2) if ids.dim() > 1 else ids.unsqueeze(0)
        steps = line[0].diff()
        if bool((line == line[0]).all()) and bool((steps == steps[:1]).all()):
            return True
    if ids.dim() < 2:
        return ids.dim() == 0
    tables = ids.flatten(0, -3) if ids.dim() > 2 else ids.unsqueeze(0)
    return bool((tables == tables[0]).all()) and bool((tables[..., 1:, 1:] == tables[..., :-1, :-1]).all())
