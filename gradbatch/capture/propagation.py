"""Propagation: where the samples must lie in a gradient, by the operations between it and the losses alone.

A layout that was measured is a property of one batch: a mask, an index or a factor of zero may make samples look apart
that are not apart in the next one. Here it is followed through the graph without looking at data: an elementwise
operation keeps the sample axis, a permutation moves it, a product of matrices keeps that of its rows, a reshape keeps
its place in memory order. Operations that may move rows about or mix them are not followed. Where this and the
measurement say the same, it need not be measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.readings import POINTWISE, SHIFTS
from gradbatch.capture.shared import RESHAPING, TRANSPOSING
from gradbatch.rules import SampleLayout

Place = tuple[Node, int]
"""A node and the number of one of its outputs."""


@dataclass(frozen=True)
class Run:
    """Where the samples lie in the memory order of a tensor: ``outer * N * inner`` elements, ``(i // inner) % N``."""

    outer: int
    inner: int

    @classmethod
    def of(cls, layout: SampleLayout, shape: Sequence[int]) -> Run | None:
        """The place of a layout in a tensor's memory order."""
        if layout.axis is None or layout.axis >= len(shape) or not layout.samples:
            return None
        blocks = shape[layout.axis] // (layout.samples * layout.stride)
        before, after = math.prod(shape[: layout.axis]), math.prod(shape[layout.axis + 1 :])
        return cls(before * blocks, layout.stride * after)

    def axis(self, shape: Sequence[int], samples: int) -> int | None:
        """The axis of a tensor on which the samples lie; ``None`` if they straddle several."""
        for axis, size in enumerate(shape):
            before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
            if not before or not after or self.outer % before or self.inner % after:
                continue
            if self.outer // before * samples * (self.inner // after) == size:
                return axis
        return None

    def moved(self, axis: int, shape: Sequence[int], to: int, new: Sequence[int]) -> Run | None:
        """The same rows on another axis of another tensor; ``None`` if that has another number of rows."""
        if shape[axis] != new[to]:
            return None
        blocks = self.outer // math.prod(shape[:axis])
        stride = self.inner // math.prod(shape[axis + 1 :])
        return Run(math.prod(new[:to]) * blocks, stride * math.prod(new[to + 1 :]))


def propagate(walk: graph.Walk, roots: Mapping[Place, Run], samples: int) -> dict[Place, Run]:
    """Follow the samples down the graph.

    Args:
        walk: the graph.
        roots: where they lie in the losses or outputs.
        samples: ``N``, at least 2.

    Returns:
        Where they lie in the gradients of those nodes' outputs for which that is certain whatever the data is.
    """
    arrived: dict[Place, list[Run | None]] = {place: [run] for place, run in roots.items()}
    certain: dict[Place, Run] = {}
    by_node: dict[Node, list[int]] = {}
    for node, number in roots:
        by_node.setdefault(node, []).append(number)
    for node in _consumers_first(walk):
        numbers = by_node.get(node, [])
        runs = {number: _agreed(arrived[node, number]) for number in numbers}
        certain.update({(node, number): run for number, run in runs.items() if run is not None})
        if graph.accumulated_variable(node) is not None:
            continue
        inputs = _inputs(node, runs, samples)
        for slot, (below, number) in enumerate(node.next_functions):
            if below is not None:
                if (below, number) not in arrived:
                    by_node.setdefault(below, []).append(number)
                arrived.setdefault((below, number), []).append(inputs.get(slot))
    return certain


def _agreed(runs: Sequence[Run | None]) -> Run | None:
    """Where the samples lie in a sum of gradients."""
    return runs[0] if all(run == runs[0] for run in runs) else None


def _consumers_first(walk: graph.Walk) -> Iterable[Node]:
    waiting = {node: len(consumers) for node, consumers in walk.consumers.items()}
    pending = [node for node, count in waiting.items() if not count]
    for node in pending:
        yield node
        for below, _ in node.next_functions:
            if below is not None:
                waiting[below] -= 1
                if not waiting[below]:
                    pending.append(below)


def _inputs(node: Node, runs: Mapping[int, Run | None], samples: int) -> dict[int, Run | None]:
    """Where the samples lie in the gradients of a node's inputs, as far as that is certain."""
    kind, outputs = graph.kind(node), graph.outputs(node)
    known = {number: run for number, run in runs.items() if run is not None}
    if len(known) < len(runs) or not known:
        return {}
    number, run = next(iter(known.items()))
    shape = outputs[number][0]
    slots = [slot for slot, (below, _) in enumerate(node.next_functions) if below is not None]
    if kind in RESHAPING:
        return dict.fromkeys(slots, run)
    axis = run.axis(shape, samples)
    if axis is None or kind not in _AXES:
        return {}
    # Outputs of one node (the parts of a split) are cut from one tensor: it has the samples where they all have them.
    for other, others_run in known.items():
        if run.moved(axis, shape, axis, outputs[other][0]) != others_run:
            return {}
    found: dict[int, Run | None] = {}
    with suppress(AttributeError, IndexError):  # not shown by this version of torch
        for slot in slots:
            below = graph.input_shape(node, slot)
            to = _AXES[kind](node, axis, shape, slot, below)
            if to is not None:
                found[slot] = run.moved(axis, shape, to, below)
    return found


# ---- where the sample axis of an output is in an input; None if it has none, or nothing is certain

Axis = Callable[[Node, int, torch.Size, int, torch.Size], int | None]


def _wrapped(axis: int, dim: int) -> int:
    """An axis as it was saved, negative ones wrapped around an unsigned number."""
    return (axis - 2**64 if axis >= 2**63 else axis) % dim


def _saved_axes(node: Node, name: str, dim: int) -> list[int]:
    axes = graph.saved(node, name)
    if axes is None or axes == ():
        return list(range(dim))
    return [_wrapped(axis, dim) for axis in (axes if isinstance(axes, (tuple, list)) else (axes,))]


def _elementwise(_: Node, axis: int, shape: torch.Size, __: int, below: torch.Size) -> int | None:
    """Broadcasting aligns the last axes."""
    to = axis - (len(shape) - len(below))
    return to if to >= 0 and below[to] == shape[axis] else None


def _transposed(node: Node, axis: int, shape: torch.Size, _: int, __: torch.Size) -> int:
    if graph.kind(node) == "PermuteBackward":
        return _saved_axes(node, "dims", len(shape))[axis]
    if graph.kind(node) == "TBackward":
        return len(shape) - 1 - axis
    first, second = (_wrapped(graph.saved(node, name), len(shape)) for name in ("dim0", "dim1"))
    return {first: second, second: first}.get(axis, axis)


def _reduced(node: Node, axis: int, shape: torch.Size, _: int, below: torch.Size) -> int:
    gone = _saved_axes(node, "dim", len(below))
    if len(below) == len(shape):
        return axis
    return [a for a in range(len(below)) if a not in gone][axis]


def _along(node: Node, axis: int, shape: torch.Size, _: int, below: torch.Size) -> int | None:
    """Operations that mix or select along one axis."""
    return None if axis in _saved_axes(node, "dim", len(below)) else axis


def _selected(node: Node, axis: int, _: torch.Size, __: int, below: torch.Size) -> int:
    return axis + (axis >= _wrapped(graph.saved(node, "dim"), len(below)))


def _stacked(node: Node, axis: int, shape: torch.Size, _: int, __: torch.Size) -> int | None:
    new = _wrapped(graph.saved(node, "dim"), len(shape))
    return None if axis == new else axis - (axis > new)


def _product(node: Node, axis: int, shape: torch.Size, slot: int, below: torch.Size) -> int | None:
    """``[..., i, j] = [..., i, k] [..., k, j]``, and something added to it."""
    kind = graph.kind(node)
    if kind in SHIFTS and slot == 0:
        return _elementwise(node, axis, shape, slot, below)
    first = slot == (1 if kind in SHIFTS else 0)
    if axis < len(shape) - 2:
        return axis
    return axis if first == (axis == len(shape) - 2) else None


def _vector_product(_: Node, axis: int, __: torch.Size, slot: int, ___: torch.Size) -> int | None:
    return axis if slot == 0 else None


def _images(_: Node, axis: int, __: torch.Size, slot: int, ___: torch.Size) -> int | None:
    """Operations on each image, or each sample's heads, by itself."""
    return 0 if axis == 0 and slot == 0 else None


def _padded(node: Node, axis: int, shape: torch.Size, _: int, __: torch.Size) -> int | None:
    untouched = len(shape) - len(graph.saved(node, "pad")) // 2
    return axis if axis < untouched else None


def _attention(_: Node, axis: int, __: torch.Size, slot: int, ___: torch.Size) -> int | None:
    return axis if axis in (0, 1) and slot < 3 else None


def _normalised(node: Node, axis: int, shape: torch.Size, slot: int, _: torch.Size) -> int | None:
    leading = len(shape) - len(graph.saved(node, "normalized_shape"))
    return axis if slot == 0 and axis < leading else None


def _batch_normalised(node: Node, axis: int, _: torch.Size, slot: int, __: torch.Size) -> int | None:
    return 0 if slot == 0 and axis == 0 and not graph.saved(node, "training") else None


def _likelihood(node: Node, axis: int, shape: torch.Size, _: int, below: torch.Size) -> int | None:
    """``[N, *]`` from ``[N, C, *]``, where nothing is summed."""
    return axis + (axis > 0) if len(below) == len(shape) + 1 else None


def _named(names: str, axis: Axis) -> dict[str, Axis]:
    return {f"{name}Backward": axis for name in names.split()}


_AXES: dict[str, Axis] = {
    **dict.fromkeys(POINTWISE, _elementwise),
    **dict.fromkeys(TRANSPOSING, _transposed),
    **_named(
        "Expand Relu Gelu Silu Sigmoid Tanh Exp Expm1 Log Log1P Log2 Sqrt Rsqrt Abs Softplus Elu LeakyRelu Hardtanh "
        "Hardswish Hardsigmoid Threshold LogSigmoid Erf Erfc Sin Cos Reciprocal NativeDropout FusedDropout Mish Tril "
        "MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss Softshrink "
        "Hardshrink Sinh Cosh Tan Asin Acos Atan Square Triu",
        _elementwise,
    ),
    **_named("Sum Mean Amax Amin Logsumexp Var Std LinalgVectorNorm Norm Prod Max Min", _reduced),
    **_named(
        "Softmax LogSoftmax Cumsum Cumprod Slice Split SplitWithSizes Gather IndexSelect Sort Topk", _along
    ),
    **_named("Select Unbind", _selected),
    **_named("Cat", _along),
    **_named("Stack", _stacked),
    **_named("Mm Addmm Bmm Baddbmm", _product),
    **_named("Mv", _vector_product),
    **_named(
        "Convolution MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D "
        "AdaptiveMaxPool2D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleBilinear2D UpsampleBicubic2D "
        "ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D MkldnnConvolution NativeGroupNorm Im2Col "
        "CudnnConvolution Col2Im",
        _images,
    ),
    **_named(
        "ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention ScaledDotProductFlashAttention "
        "ScaledDotProductCudnnAttention",
        _attention,
    ),
    **_named("ConstantPadNd", _padded),
    **_named("NativeLayerNorm FusedRmsNorm", _normalised),
    **_named("NativeBatchNorm CudnnBatchNorm", _batch_normalised),
    **_named("NllLoss NllLoss2D", _likelihood),
}
