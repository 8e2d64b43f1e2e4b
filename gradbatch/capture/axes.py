"""Which axis of an input an operation keeps apart like one of its output: by operation, without a look at data.

``None``: there is none, or nothing is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.readings import POINTWISE, SHIFTS, TRANSPOSING

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
"""Of all that a node computes."""

_MISSING = object()


def setting(node: Node, name: str) -> Any:
    """What a node saved under a name, or a mark that this version of torch does not show it."""
    try:
        return graph.saved(node, name)
    except AttributeError:
        return _MISSING


@dataclass(frozen=True)
class Step:
    """One node on the way down; what is read of it is written down."""

    node: Node
    at: int
    outputs: Shapes
    inputs: Sequence[Shape | None]
    settings: dict[tuple[int, str], Any]

    @property
    def kind(self) -> str:
        """What the node computes the gradient of."""
        return graph.kind(self.node)

    def saved(self, name: str) -> Any:
        """What the node saved under a name; :class:`AttributeError` if that is not shown."""
        value = self.settings[self.at, name] = setting(self.node, name)
        if value is _MISSING:
            raise AttributeError(name)
        return value


def acts_on_elements(node: Node) -> bool:
    """Whether an operation acts on each element by itself, once its operands are broadcast."""
    return _AXES.get(graph.kind(node)) is _elementwise


def is_followed(node: Node) -> bool:
    """Whether it is known what axes an operation keeps apart."""
    return graph.kind(node) in _AXES


def axis_in_input(node: Node, axis: int, shape: Shape, slot: int, below: Shape) -> int | None:
    """The axis of an input that an operation keeps apart like an axis of its output; ``None`` if none is certain.

    Args:
        node: the operation.
        axis: of the output.
        shape: of the output.
        slot: of the input.
        below: shape of the input.
    """
    return axis_of_step(Step(node, 0, (), (), {}), axis, shape, slot, below)


def axis_of_step(step: Step, axis: int, shape: Shape, slot: int, below: Shape) -> int | None:
    """As :func:`axis_in_input`, of a node whose settings are written down."""
    with suppress(AttributeError, IndexError):  # not shown by this version of torch
        if step.kind in _AXES:
            return _AXES[step.kind](step, axis, shape, slot, below)
    return None


Axis = Callable[[Step, int, Shape, int, Shape], int | None]


def _wrapped(axis: int, dim: int) -> int:
    """An axis as it was saved, negative ones wrapped around an unsigned number."""
    return (axis - 2**64 if axis >= 2**63 else axis) % dim


def _saved_axes(step: Step, name: str, dim: int) -> list[int]:
    axes = step.saved(name)
    if axes is None or axes == ():
        return list(range(dim))
    return [_wrapped(axis, dim) for axis in (axes if isinstance(axes, (tuple, list)) else (axes,))]


def _elementwise(_: Step, axis: int, shape: Shape, __: int, below: Shape) -> int | None:
    """Broadcasting aligns the last axes."""
    to = axis - (len(shape) - len(below))
    return to if to >= 0 and below[to] == shape[axis] else None


def _transposed(step: Step, axis: int, shape: Shape, _: int, __: Shape) -> int:
    if step.kind == "PermuteBackward":
        return _saved_axes(step, "dims", len(shape))[axis]
    if step.kind == "TBackward":
        return len(shape) - 1 - axis
    first, second = (_wrapped(step.saved(name), len(shape)) for name in ("dim0", "dim1"))
    return {first: second, second: first}.get(axis, axis)


def _reduced(step: Step, axis: int, shape: Shape, _: int, below: Shape) -> int:
    gone = _saved_axes(step, "dim", len(below))
    if len(below) == len(shape):
        return axis
    return [a for a in range(len(below)) if a not in gone][axis]


def _along(step: Step, axis: int, shape: Shape, _: int, below: Shape) -> int | None:
    """Operations that mix or select along one axis."""
    return None if axis in _saved_axes(step, "dim", len(below)) else axis


def _sliced(_: Step, axis: int, shape: Shape, __: int, below: Shape) -> int | None:
    """A slice as long as the whole is the whole."""
    return axis if shape[axis] == below[axis] else None


def _selected(step: Step, axis: int, _: Shape, __: int, below: Shape) -> int:
    return axis + (axis >= _wrapped(step.saved("dim"), len(below)))


def _stacked(step: Step, axis: int, shape: Shape, _: int, __: Shape) -> int | None:
    new = _wrapped(step.saved("dim"), len(shape))
    return None if axis == new else axis - (axis > new)


def _product(step: Step, axis: int, shape: Shape, slot: int, below: Shape) -> int | None:
    """``[..., i, j] = [..., i, k] [..., k, j]``, and something added to it."""
    kind = step.kind
    if kind in SHIFTS and slot == 0:
        return _elementwise(step, axis, shape, slot, below)
    first = slot == (1 if kind in SHIFTS else 0)
    if axis < len(shape) - 2:
        return axis
    return axis if first == (axis == len(shape) - 2) else None


def _vector_product(_: Step, axis: int, __: Shape, slot: int, ___: Shape) -> int | None:
    return axis if slot == 0 else None


def _images(_: Step, axis: int, __: Shape, slot: int, ___: Shape) -> int | None:
    """Operations on each image, or each sample's heads, by itself."""
    return 0 if axis == 0 and slot == 0 else None


def _padded(step: Step, axis: int, shape: Shape, _: int, __: Shape) -> int | None:
    untouched = len(shape) - len(step.saved("pad")) // 2
    return axis if axis < untouched else None


def _attention(_: Step, axis: int, __: Shape, slot: int, ___: Shape) -> int | None:
    return axis if axis in (0, 1) and slot < 3 else None


def _normalised(step: Step, axis: int, shape: Shape, slot: int, _: Shape) -> int | None:
    leading = len(shape) - len(step.saved("normalized_shape"))
    return axis if slot == 0 and axis < leading else None


def _batch_normalised(step: Step, axis: int, _: Shape, slot: int, __: Shape) -> int | None:
    """Each channel by itself, with its weight and bias; with running statistics, each element."""
    if slot > 0:
        return 0 if axis == 1 else None
    return axis if axis == 1 or not step.saved("training") else None


def _overwritten(_: Step, axis: int, __: Shape, slot: int, ___: Shape) -> int | None:
    """Some elements replaced, or added to."""
    return axis if slot == 0 else None


def _trilinear(step: Step, axis: int, _: Shape, slot: int, __: Shape) -> int | None:
    """A product of three operands, broadcast along axes of size 1, with some axes summed."""
    summed, new = (list(step.saved(name)) for name in ("sumdim", f"expand{slot + 1}"))
    whole = [a for a in range(64) if a not in summed][axis]
    return None if whole in new else whole - sum(a < whole for a in new)


def _likelihood(step: Step, axis: int, shape: Shape, _: int, below: Shape) -> int | None:
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
        "Softmax SafeSoftmax LogSoftmax Cumsum Cumprod Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes "
        "Gather IndexSelect Sort Topk FftR2C FftC2R FftC2C",
        _along,
    ),
    **_named("Slice", _sliced),
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
    **_named("IndexPut IndexCopy IndexFill IndexAdd Scatter ScatterAdd", _overwritten),
    **_named("Trilinear", _trilinear),
    **_named("ConstantPadNd", _padded),
    **_named("NativeLayerNorm FusedRmsNorm", _normalised),
    **_named("NativeBatchNorm CudnnBatchNorm", _batch_normalised),
    **_named("NllLoss NllLoss2D", _likelihood),
}
