"""Provenance: is a value that all samples share really computed from parameters alone?

If it is not, the samples are coupled (a loss over pairs, statistics over the batch), and no gradient is a single
sample's. The autograd graph shows every operand that needs a gradient, but not the others: a constant, a buffer, or the
batch. So a shared value is accepted only where nothing that it was computed from could be the samples' data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.readings import POINTWISE, SHIFTS
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


# These look rows up, maybe one for each sample.
LOOKING_UP = frozenset(
    f"{name}Backward"
    for name in "Index IndexSelect Gather Embedding AsStrided Take".split()  # noqa: SIM905
)
PRODUCTS = frozenset(
    f"{name}Backward"
    for name in ("Mm", "Bmm", "Mv", "Dot", "Vdot", "Addmm", "Addmv", "Baddbmm", "Convolution")
)
# These keep every operand that needs no gradient, if another one does; elsewhere such an operand is out of sight.
KEEPING_OPERANDS = PRODUCTS | {"MulBackward", "DivBackward", "PowBackward", "TrilinearBackward"}


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


def suspicions(
    region: Sequence[Node],
    own: Sequence[Tensor],
    samples: int,
    consumers: Mapping[Node, Sequence[graph.Edge]],
) -> Iterator[Suspicion]:
    """Look for operations that may have brought the samples' data into a shared region.

    Args:
        region: nodes taken for computed from parameters alone, each before all that lies below it.
        own: the model's parameters and buffers.
        samples: ``N``.
        consumers: of each node.

    Yields:
        Such operations, in the region or among what it was computed from.
    """
    model = _Model(own, {tensor.untyped_storage().data_ptr() for tensor in own}, samples)
    grown: dict[Node, bool] = {}
    inside, loose = set(region), list[Node]()
    pending = list(region)
    visited = set(pending)
    for node in pending:
        leaf = graph.accumulated_variable(node)
        if leaf is not None and not model.owns(leaf):
            yield Suspicion(node, f"a leaf of shape {tuple(leaf.shape)} that is no parameter of the model")
        elif leaf is None and graph.kind(node) not in UNARY:
            if not _keeps_shape(node, model, grown):
                yield from _suspicions(node, model)
            elif node in inside and next(_suspicions(node, model), None) is not None:
                loose.append(node)
        # What needs a gradient of something else than the wanted parameters is no part of the region, but of this.
        below = {found for found, _ in graph.below(node) if found is not None} - visited
        visited |= below
        pending += below
    # One operand of a parameter's own shape may be a constant. Several, put together, may be one sample's each.
    for node in _meeting(loose, inside, consumers):
        yield Suspicion(node, "several operands in turn, one of which it may have of each sample")


def _meeting(
    loose: Sequence[Node], inside: Collection[Node], consumers: Mapping[Node, Sequence[graph.Edge]]
) -> Iterator[Node]:
    """Nodes that act on the same parameter as another one, where the results of both go into one value."""
    parameters = [
        _reached([node], lambda n: [f for f, _ in graph.below(n) if f is not None]) for node in loose
    ]
    above = [
        _reached([node], lambda n: [c for c, _ in consumers.get(n, ()) if c in inside]) - {node}
        for node in loose
    ]
    for i, node in enumerate(loose):
        for j in range(i):
            shared = parameters[i] & parameters[j] - set(loose)
            chained = loose[j] in above[i] or node in above[j]
            if (
                above[i] & above[j]
                and not chained
                and any(graph.accumulated_variable(n) is not None for n in shared)
            ):
                yield node
                return


def _reached(start: Sequence[Node], further: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found, pending = set(start), list(start)
    for node in pending:
        new = set(further(node)) - found
        found |= new
        pending += new
    return found


@dataclass(frozen=True)
class _Model:
    """The model's parameters and buffers, where their storages begin, and the number of samples."""

    own: Sequence[Tensor]
    storages: Collection[int]
    samples: int

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.storages

    def knows(self, constant: Tensor) -> bool:
        """Whether a constant cannot be data: it is the model's own, or all one number, or empty."""
        return (
            self.owns(constant)
            or not constant.numel()
            or bool((constant == constant.reshape(-1)[:1]).all())
            or _is_copy(constant, self.own)
        )


def _suspicions(node: Node, model: _Model) -> Iterator[Suspicion]:
    kind, constants = graph.kind(node), list(_constants(node))
    for constant in constants:
        if not model.knows(constant):
            whole = not (constant.is_floating_point() or constant.is_complex())
            reads = f"a tensor of shape {tuple(constant.shape)}"
            counts = _counts_positions(constant) if whole else _begins(constant, model.own)
            yield Suspicion(node, reads, counts)
    slots = [below for below, _ in graph.below(node)]
    if kind == "ConvolutionBackward":
        slots = slots[:2]  # a bias has no axis of samples
    # A Function of somebody's is taken to keep what it needs; what else is None are arguments that are no tensors.
    kept = len(constants) if kind in KEEPING_OPERANDS else len(slots) if graph.is_function(node) else 0
    added = kind in SHIFTS and slots[0] is None
    unseen = sum(below is None for below in slots) - kept
    if (unseen > 0 or added) and not _concatenates_own(node, model.own):
        yield Suspicion(node, "an operand that it does not keep")


def _has_grown(node: Node, model: _Model, grown: dict[Node, bool]) -> bool:
    """Whether a value was repeated on its way from the parameters, and so may have a row for each sample."""
    pending = [node]
    while pending:
        current = pending[-1]
        below = [found for found, _ in graph.below(current) if found is not None]
        missing = [found for found in below if found not in grown]
        if current in grown:
            pending.pop()
        elif _grows(current, model):
            grown[pending.pop()] = True
        elif not missing:
            grown[pending.pop()] = any(grown[found] for found in below)
        else:
            pending += missing
    return grown[node]


def _grows(node: Node, model: _Model) -> bool:
    if graph.accumulated_variable(node) is not None:
        return False
    if graph.kind(node) in LOOKING_UP:
        # By position it has a row for each position, which are as many as the samples at most by chance.
        return any(
            not model.owns(ids)
            and (model.samples in ids.shape or not (model.knows(ids) or _counts_positions(ids)))
            for ids in _constants(node)
        )
    if graph.kind(node) in PRODUCTS and all(map(model.owns, _constants(node))):
        return False  # a weight put together from factors
    sizes = [
        math.prod(graph.input_shape(node, slot))
        for slot, (below, _) in enumerate(graph.below(node))
        if below is not None
    ]
    return any(math.prod(shape) > max(sizes) for shape, _ in graph.outputs(node))


def _concatenates_own(node: Node, own: Sequence[Tensor]) -> bool:
    """Whether what a ``cat`` appends has the shape of one of the model's own constants, such as a bias of zeros."""
    if graph.kind(node) != "CatBackward":
        return False
    slots = [slot for slot, (below, _) in enumerate(graph.below(node)) if below is not None]
    try:
        rest, axis = list(graph.outputs(node)[0][0]), graph.saved(node, "dim")
    except AttributeError:
        return False
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


def _begins(constant: Tensor, own: Sequence[Tensor]) -> bool:
    """Whether a tensor is the beginning of a table of the model's: its rows, looked up by position."""
    if constant.dim() < 2:
        return False
    rows = constant.flatten(0, -2)
    tables = (table for table in own if table.dim() == 2 and table.shape[1] == constant.shape[-1])
    return any(len(rows) <= len(table) and _is_copy(rows, [table[: len(rows)]]) for table in tables)


def _keeps_shape(node: Node, model: _Model, grown: dict[Node, bool]) -> bool:
    """Whether the node acts element by element on something of its output's size, or keeps that size.

    Samples cannot come in there, unless a parameter has as many rows as the batch, or was repeated so often.
    """
    if graph.kind(node) not in POINTWISE | KEEPING:
        return False
    size = math.prod(graph.outputs(node)[0][0])
    alike = [
        below
        for slot, (below, _) in enumerate(graph.below(node))
        if below is not None and math.prod(graph.input_shape(node, slot)) == size
    ]
    return any(not _has_grown(below, model, grown) for below in alike)


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
    if ids.dim() < 2:
        return False
    tables = ids.flatten(0, -3) if ids.dim() > 2 else ids.unsqueeze(0)
    table = tables[0]
    by_distance = bool((table[1:, 1:] == table[:-1, :-1]).all())
    # Distances on two scales, as between queries and pooled keys.
    by_sum = bool((table.diff(dim=0).diff(dim=1) == 0).all())
    return (by_distance or by_sum) and bool((tables == table).all())
