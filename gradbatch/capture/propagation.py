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
from typing import Any

from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.readings import POINTWISE, SHIFTS
from gradbatch.capture.shared import RESHAPING, TRANSPOSING
from gradbatch.rules import SampleLayout

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
"""Of all that a node computes."""


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


@dataclass(frozen=True)
class Propagated:
    """Where the samples lie in the gradients of a graph, and what of the graph that was derived from.

    Args:
        certain: by the number of a node in the walk's order and of its output; missing where nothing is certain.
        settings: what was read of nodes besides their types, edges and shapes, by number and name.
    """

    certain: Mapping[tuple[int, int], Run]
    settings: Mapping[tuple[int, str], Any]

    def holds_for(self, nodes: Sequence[Node]) -> bool:
        """Whether it is as true of another graph with the same types, edges and shapes."""
        return all(_setting(nodes[at], name) == value for (at, name), value in self.settings.items())


def propagate(
    nodes: Sequence[Node], shapes: Sequence[Shapes], roots: Mapping[tuple[int, int], Run], samples: int
) -> Propagated:
    """Follow the samples down the graph.

    Args:
        nodes: of the graph, all of them.
        shapes: of what each computes.
        roots: where the samples lie in the losses or outputs, by number of node and output.
        samples: ``N``, at least 2.
    """
    numbers = {node: at for at, node in enumerate(nodes)}
    arrived: dict[int, dict[int, list[Run | None]]] = {at: {} for at in range(len(nodes))}
    for (at, number), run in roots.items():
        arrived[at][number] = [run]
    certain: dict[tuple[int, int], Run] = {}
    settings: dict[tuple[int, str], Any] = {}
    for at in _consumers_first(nodes, numbers):
        node = nodes[at]
        runs = {number: _agreed(found) for number, found in arrived[at].items()}
        known = {number: run for number, run in runs.items() if run is not None}
        certain.update({(at, number): run for number, run in known.items()})
        below = [None if b is None else (numbers[b], number) for b, number in node.next_functions]
        step = _Step(
            node, at, shapes[at], [None if b is None else shapes[b[0]][b[1]] for b in below], settings
        )
        # What arrives uncertain at one output is uncertain in all inputs.
        inputs = _inputs(step, known, samples) if 0 < len(known) == len(runs) else {}
        for slot, place in enumerate(below):
            if place is not None:
                arrived[place[0]].setdefault(place[1], []).append(inputs.get(slot))
    return Propagated(certain, settings)


def _agreed(runs: Sequence[Run | None]) -> Run | None:
    """Where the samples lie in a sum of gradients."""
    return runs[0] if all(run == runs[0] for run in runs) else None


def _consumers_first(nodes: Sequence[Node], numbers: Mapping[Node, int]) -> Iterable[int]:
    below = [[numbers[b] for b, _ in node.next_functions if b is not None] for node in nodes]
    waiting = [0] * len(nodes)
    for inputs in below:
        for at in inputs:
            waiting[at] += 1
    pending = [at for at, count in enumerate(waiting) if not count]
    for at in pending:
        yield at
        for further in below[at]:
            waiting[further] -= 1
            if not waiting[further]:
                pending.append(further)


_MISSING = object()


def _setting(node: Node, name: str) -> Any:
    try:
        return graph.saved(node, name)
    except AttributeError:  # not shown by this version of torch
        return _MISSING


@dataclass(frozen=True)
class _Step:
    """One node on the way down; what is read of it is written down."""

    node: Node
    at: int
    outputs: Shapes
    inputs: Sequence[Shape | None]
    settings: dict[tuple[int, str], Any]

    @property
    def kind(self) -> str:
        return graph.kind(self.node)

    def saved(self, name: str) -> Any:
        value = self.settings[self.at, name] = _setting(self.node, name)
        if value is _MISSING:
            raise AttributeError(name)
        return value


def _inputs(step: _Step, known: Mapping[int, Run], samples: int) -> dict[int, Run | None]:
    """Where the samples lie in the gradients of a node's inputs, as far as that is certain."""
    number, run = next(iter(known.items()))
    shape = step.outputs[number]
    slots = {slot: below for slot, below in enumerate(step.inputs) if below is not None}
    if step.kind in RESHAPING:
        return dict.fromkeys(slots, run)
    axis = run.axis(shape, samples)
    if axis is None or step.kind not in _AXES:
        return {}
    # Outputs of one node (the parts of a split) are cut from one tensor: it has the samples where they all have them.
    for other, others_run in known.items():
        if run.moved(axis, shape, axis, step.outputs[other]) != others_run:
            return {}
    found: dict[int, Run | None] = {}
    with suppress(AttributeError, IndexError):
        for slot, below in slots.items():
            to = _AXES[step.kind](step, axis, shape, slot, below)
            if to is not None:
                found[slot] = run.moved(axis, shape, to, below)
    return found


# ---- where the sample axis of an output is in an input; None if it has none, or nothing is certain

Axis = Callable[[_Step, int, Shape, int, Shape], int | None]


def _wrapped(axis: int, dim: int) -> int:
    """An axis as it was saved, negative ones wrapped around an unsigned number."""
    return (axis - 2**64 if axis >= 2**63 else axis) % dim


def _saved_axes(step: _Step, name: str, dim: int) -> list[int]:
    axes = step.saved(name)
    if axes is None or axes == ():
        return list(range(dim))
    return [_wrapped(axis, dim) for axis in (axes if isinstance(axes, (tuple, list)) else (axes,))]


def _elementwise(_: _Step, axis: int, shape: Shape, __: int, below: Shape) -> int | None:
    """Broadcasting aligns the last axes."""
    to = axis - (len(shape) - len(below))
    return to if to >= 0 and below[to] == shape[axis] else None


def _transposed(step: _Step, axis: int, shape: Shape, _: int, __: Shape) -> int:
    if step.kind == "PermuteBackward":
        return _saved_axes(step, "dims", len(shape))[axis]
    if step.kind == "TBackward":
        return len(shape) - 1 - axis
    first, second = (_wrapped(step.saved(name), len(shape)) for name in ("dim0", "dim1"))
    return {first: second, second: first}.get(axis, axis)


def _reduced(step: _Step, axis: int, shape: Shape, _: int, below: Shape) -> int:
    gone = _saved_axes(step, "dim", len(below))
    if len(below) == len(shape):
        return axis
    return [a for a in range(len(below)) if a not in gone][axis]


def _along(step: _Step, axis: int, shape: Shape, _: int, below: Shape) -> int | None:
    """Operations that mix or select along one axis."""
    return None if axis in _saved_axes(step, "dim", len(below)) else axis


def _selected(step: _Step, axis: int, _: Shape, __: int, below: Shape) -> int:
    return axis + (axis >= _wrapped(step.saved("dim"), len(below)))


def _stacked(step: _Step, axis: int, shape: Shape, _: int, __: Shape) -> int | None:
    new = _wrapped(step.saved("dim"), len(shape))
    return None if axis == new else axis - (axis > new)


def _product(step: _Step, axis: int, shape: Shape, slot: int, below: Shape) -> int | None:
    """``[..., i, j] = [..., i, k] [..., k, j]``, and something added to it."""
    kind = step.kind
    if kind in SHIFTS and slot == 0:
        return _elementwise(step, axis, shape, slot, below)
    first = slot == (1 if kind in SHIFTS else 0)
    if axis < len(shape) - 2:
        return axis
    return axis if first == (axis == len(shape) - 2) else None


def _vector_product(_: _Step, axis: int, __: Shape, slot: int, ___: Shape) -> int | None:
    return axis if slot == 0 else None


def _images(_: _Step, axis: int, __: Shape, slot: int, ___: Shape) -> int | None:
    """Operations on each image, or each sample's heads, by itself."""
    return 0 if axis == 0 and slot == 0 else None


def _padded(step: _Step, axis: int, shape: Shape, _: int, __: Shape) -> int | None:
    untouched = len(shape) - len(step.saved("pad")) // 2
    return axis if axis < untouched else None


def _attention(_: _Step, axis: int, __: Shape, slot: int, ___: Shape) -> int | None:
    return axis if axis in (0, 1) and slot < 3 else None


def _normalised(step: _Step, axis: int, shape: Shape, slot: int, _: Shape) -> int | None:
    leading = len(shape) - len(step.saved("normalized_shape"))
    return axis if slot == 0 and axis < leading else None


def _batch_normalised(step: _Step, axis: int, _: Shape, slot: int, __: Shape) -> int | None:
    return 0 if slot == 0 and axis == 0 and not step.saved("training") else None


def _likelihood(step: _Step, axis: int, shape: Shape, _: int, below: Shape) -> int | None:
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
