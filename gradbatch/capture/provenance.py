"""Provenance: is a value that all samples share really computed from parameters alone?

If it is not, the samples are coupled (a loss over pairs, statistics over the batch), and no gradient is a single
sample's. The autograd graph shows every operand that needs a gradient, but not the others: a constant, a buffer, or the
batch. So a shared value is accepted only where nothing that it was computed from could be the samples' data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
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

RESULTS = ("result", "output", "logsumexp", "rng_state", "unused", "philox", "mask")
# These normalise what they are given, or change it in place.
KEEPING = frozenset(
    {"NativeBatchNormBackward", "NativeLayerNormBackward", "NativeGroupNormBackward", "CopySlices"}
)


# These repeat what they are given, maybe once for each sample.
COPYING = frozenset(
    f"{name}Backward"
    for name in "Expand Repeat RepeatInterleave Index IndexSelect Gather Embedding AsStrided Take".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Suspicion:
    """An operation that may have brought in the samples' data.

    Args:
        node: the operation.
        reads: what may be data, in words.
        counts: whether it is a table looked up by numbers that go up evenly, such as positions, or the samples' own.
    """

    node: Node
    reads: str
    counts: bool = False


def suspicions(region: Iterable[Node], own: Sequence[Tensor], samples: int) -> Iterator[Suspicion]:
    """Look for operations that may have brought the samples' data into a shared region.

    Args:
        region: nodes taken for computed from parameters alone.
        own: the model's parameters and buffers.
        samples: ``N``.

    Yields:
        Such operations, in the region or among what it was computed from.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    grown: dict[Node, bool] = {}
    pending = list(region)
    visited = set(pending)
    for node in pending:
        leaf = graph.accumulated_variable(node)
        if leaf is not None and leaf.untyped_storage().data_ptr() not in storages:
            yield Suspicion(node, f"a leaf of shape {tuple(leaf.shape)} that is no parameter of the model")
        elif leaf is None and graph.kind(node) not in UNARY and not _keeps_shape(node, samples, grown):
            yield from _suspicions(node, own, storages, samples)
        # What needs a gradient of something else than the wanted parameters is no part of the region, but of this.
        below = {found for found, _ in node.next_functions if found is not None} - visited
        visited |= below
        pending += below


def _suspicions(
    node: Node, own: Sequence[Tensor], storages: Collection[int], samples: int
) -> Iterator[Suspicion]:
    constants = list(_constants(node))
    for constant in constants:
        known = constant.untyped_storage().data_ptr() in storages or _is_copy(constant, own)
        if not known and not bool((constant == constant.reshape(-1)[:1]).all()):
            whole = not (constant.is_floating_point() or constant.is_complex())
            yield Suspicion(
                node, f"a tensor of shape {tuple(constant.shape)}", whole and _counts_positions(constant)
            )
    slots = node.next_functions[:2] if graph.kind(node) == "ConvolutionBackward" else node.next_functions
    unseen = sum(below is None for below, _ in slots) - len(constants)
    if unseen > 0 and not _concatenates_own(node, own):
        yield Suspicion(node, "an operand that it does not keep")


def _has_grown(node: Node, grown: dict[Node, bool]) -> bool:
    """Whether a value was repeated on its way from the parameters, and so may have a row for each sample."""
    pending = [node]
    while pending:
        current = pending[-1]
        below = [found for found, _ in current.next_functions if found is not None]
        missing = [found for found in below if found not in grown]
        if graph.kind(current) in COPYING or not missing or current in grown:
            grown[pending.pop()] = graph.kind(current) in COPYING or any(grown[found] for found in below)
        else:
            pending += missing
    return grown[node]


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


def _keeps_shape(node: Node, samples: int, grown: dict[Node, bool]) -> bool:
    """Whether the node acts element by element on something of its output's size, or keeps that size.

    Samples cannot come in there, unless a parameter has as many rows as the batch, or was repeated so often.
    """
    if graph.kind(node) not in POINTWISE | KEEPING:
        return False
    shape = graph.outputs(node)[0][0]
    alike = [
        below
        for slot, (below, _) in enumerate(node.next_functions)
        if below is not None and math.prod(graph.input_shape(node, slot)) == math.prod(shape)
    ]
    if all(size % samples for size in shape):
        return bool(alike)
    return any(not _has_grown(below, grown) for below in alike)


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
    return name.startswith(RESULTS) or (name == "indices" and graph.kind(node) in SELECTING)


def _counts_positions(ids: Tensor) -> bool:
    """Whether whole numbers go up in even steps along one axis, or depend on the distance of two positions alone."""
    ids = ids.squeeze()
    for axis in range(ids.dim()):
        line = ids.movedim(axis, -1).flatten(0, -2) if ids.dim() > 1 else ids.unsqueeze(0)
        steps = line[0].diff()
        # Of two numbers any two are even.
        even = bool((steps == steps[0]).all()) if len(steps) > 1 else line[0].tolist() in ([0], [0, 1])
        if even and bool((line == line[0]).all()):
            return True
    if ids.dim() < 2 or min(ids.shape[-2:]) < 3:
        return False
    tables = ids.flatten(0, -3) if ids.dim() > 2 else ids.unsqueeze(0)
    table = tables[0]
    by_distance = bool((table[1:, 1:] == table[:-1, :-1]).all())
    # Distances on two scales, as between queries and pooled keys.
    by_sum = bool((table.diff(dim=0).diff(dim=1) == 0).all())
    return (by_distance or by_sum) and bool((tables == table).all())
