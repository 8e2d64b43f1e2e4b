"""Weight gradients of grouped convolutions, per sample or summed: one correlation, several kernels for it.

The weight gradient of a convolution is a correlation of its output gradient with the patches of its input,
one group at a time. The kernels that evaluate it differ up to 20x in speed from layer to layer; which one to
take is decided elsewhere. None of them ever forms the product of one group with another. Tensors and shapes
only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.plans.windows import Patches, Window, fold, pad_to, same_padding, unfold

__all__ = [
    "CORRELATE_METHODS",
    "STRIPS",
    "SUM_METHODS",
    "Patches",
    "Window",
    "correlate",
    "correlate_sum",
    "fold",
    "from_strips",
    "in_strips",
    "same_padding",
    "unfold",
]

_NATIVE_DIMENSIONS = 3  # the framework has convolution kernels for up to three spatial dimensions


def correlate(left: Tensor, right: Patches, method: str = "unfold") -> Tensor:
    r"""Correlate every sample with its patches, ``[N, G, P, D]``.

    .. math:: c_{ngpd} = \sum_t \ell_{ngpt}\, r_{ngdt}

    Args:
        left: ``[N, G, P, T]``, any strides; a convolution's output gradient, a transposed convolution's
            input.
        right: ``[N, G, D, T]``; the patches of a convolution's input, of a transposed convolution's output
            gradient.
        method: ``"unfold"`` multiplies by the unfolded patches; ``"strips"`` and ``"strips_last"`` by those that
            are unfolded in all dimensions but the first (:meth:`Patches.strips`); ``"grouped"`` is one native
            convolution weight gradient with ``N * G`` groups; ``"vmap"`` batches the native one over samples;
            ``"loop"`` runs it sample by sample.

    Edge cases: what a native kernel cannot do (no samples, no positions, more than three dimensions, half
    precision on a CPU) is done by ``"unfold"``. Native kernels follow the framework's settings, TF32 on CUDA
    included.

    Raises:
        UsageError: for an unknown method.
    """
    if method not in CORRELATE_METHODS:
        raise UsageError(f"correlate has no method {method!r}; it has {', '.join(CORRELATE_METHODS)}.")
    left, right = _same_dtype(left, right)
    if method in STRIPS:
        return _correlate_strips(left, right, method)
    return _CORRELATE[method if _native(left, right) else "unfold"](left, right)


def correlate_sum(left: Tensor, right: Patches, method: str = "native") -> Tensor:
    """Correlate with the patches and sum over samples, ``[G, P, D]``; never holds per-sample results.

    Args:
        left: ``[N, G, P, T]``.
        right: ``[N, G, D, T]``.
        method: ``"native"`` is the framework's own convolution weight gradient; ``"unfold"`` multiplies by
            the patches.

    Edge cases: as in :func:`correlate`.

    Raises:
        UsageError: for an unknown method.
    """
    if method not in SUM_METHODS:
        raise UsageError(f"correlate_sum has no method {method!r}; it has {', '.join(SUM_METHODS)}.")
    left, right = _same_dtype(left, right)
    groups, outputs, inputs = right.groups, left.shape[2], right.shape[2]
    if method == "unfold" or not _native(left, right):
        return torch.einsum("ngpt,ngdt->gpd", left, right.unfold())
    source, window = _aligned(right)
    images = _images(left, right).flatten(0, 1)
    return _weight_gradient(images, source, window, groups).reshape(groups, outputs, inputs)


def _correlate_unfold(left: Tensor, right: Patches) -> Tensor:
    return torch.matmul(left, right.unfold().mT)


def _correlate_strips(left: Tensor, right: Patches, method: str) -> Tensor:
    strips = [torch.matmul(left, strip.mT) for strip in right.strips(STRIPS[method])]
    return from_strips(torch.stack(strips), right, method)


def _correlate_grouped(left: Tensor, right: Patches) -> Tensor:
    # The samples become groups next to the layer's own: N * G groups, each of which sees its own input only.
    source, window = _aligned(right)
    samples = right.shape[0]
    images = _images(left, right).transpose(0, 1).flatten(1, 2)
    source = source.reshape(samples, right.rows, *source.shape[1:]).transpose(0, 1).flatten(1, 2)
    return _weight_gradient(images, source, window, samples * right.groups).reshape(_result(left, right))


def _correlate_vmap(left: Tensor, right: Patches) -> Tensor:
    source, window = _aligned(right)
    source = source.reshape(right.shape[0], right.rows, *source.shape[1:])
    weight = _weight_like(left.shape[1] * left.shape[2], source, window, right.groups)

    def one(image: Tensor, rows: Tensor) -> Tensor:
        return _weight_gradient(image, rows, window, right.groups, weight)

    batched: Tensor = torch.func.vmap(one)(_images(left, right), source)
    return batched.reshape(_result(left, right))


def _correlate_loop(left: Tensor, right: Patches) -> Tensor:
    source, window = _aligned(right)
    source = source.reshape(right.shape[0], right.rows, *source.shape[1:])
    pairs = zip(_images(left, right), source, strict=True)
    each = [_weight_gradient(image, rows, window, right.groups) for image, rows in pairs]
    return torch.stack(each).reshape(_result(left, right))


_CORRELATE: dict[str, Callable[[Tensor, Patches], Tensor]] = {
    "unfold": _correlate_unfold,
    "grouped": _correlate_grouped,
    "vmap": _correlate_vmap,
    "loop": _correlate_loop,
}

STRIPS: Mapping[str, bool] = {"strips": False, "strips_last": True}
"""The methods that cut patches into strips, and whether the channels are last in these."""

CORRELATE_METHODS: tuple[str, ...] = (*_CORRELATE, *STRIPS)
"""The methods of :func:`correlate`."""

SUM_METHODS: tuple[str, ...] = ("native", "unfold")
"""The methods of :func:`correlate_sum`."""


def in_strips(tensor: Tensor, patches: Patches, method: str) -> Tensor:
    """View what belongs to each strip of ``tensor [*, D]``: ``[strips, *, elements]``, the elements on two axes."""
    places, *others = patches.window.kernel
    channels = patches.source.shape[1] // patches.groups
    strips: Tensor = tensor.unflatten(-1, (channels, places, math.prod(others))).movedim(-2, 0)
    return strips.mT if STRIPS[method] else strips


def from_strips(strips: Tensor, patches: Patches, method: str) -> Tensor:
    """Put together what belongs to each strip, ``[strips, *, D / strips]``: ``[*, D]``."""
    channels, others = patches.source.shape[1] // patches.groups, math.prod(patches.window.kernel[1:])
    last = STRIPS[method]
    split: Tensor = strips.unflatten(-1, (others, channels) if last else (channels, others))
    return (split.mT if last else split).movedim(0, -2).flatten(-3).contiguous()


def _aligned(patches: Patches) -> tuple[Tensor, Window]:
    """Source and window whose native convolution has exactly the positions of ``patches``."""
    source, window = patches.source, patches.window
    if patches.positions == window.positions(source.shape[2:]):
        return source, window
    # A native weight gradient insists on every window that fits: cut the source where the last used window
    # ends.
    cropped = pad_to(source, window, window.extents(patches.positions))
    return cropped, replace(window, padding=(0,) * len(window.padding))


def _images(left: Tensor, right: Patches) -> Tensor:
    """View ``left`` as the output gradient of a native convolution, ``[N, rows, G * P, *positions]``."""
    samples, groups, outputs, _ = left.shape
    return left.reshape(samples, groups * outputs, right.rows, *right.positions).transpose(1, 2)


def _weight_gradient(
    grad_output: Tensor, source: Tensor, window: Window, groups: int, weight: Tensor | None = None
) -> Tensor:
    """Call the framework's weight gradient, ``[channels of grad_output, C / groups, *kernel]``."""
    if weight is None:
        weight = _weight_like(grad_output.shape[1], source, window, groups)
    no_output_padding = [0] * len(window.kernel)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        grad_output,
        source,
        weight,
        None,
        window.stride,
        window.padding,
        window.dilation,
        False,
        no_output_padding,
        groups,
        [False, True, False],
    )[1]
    return gradient


def _weight_like(outputs: int, source: Tensor, window: Window, groups: int) -> Tensor:
    """Stand in for the weight, of which the weight gradient reads the shape only."""
    channels = source.shape[-len(window.kernel) - 1]
    return source.new_empty(1).expand(outputs, channels // groups, *window.kernel)


def _result(left: Tensor, right: Patches) -> tuple[int, ...]:
    return (*left.shape[:3], right.shape[2])


def _same_dtype(left: Tensor, right: Patches) -> tuple[Tensor, Patches]:
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype), (right if right.dtype == dtype else right.to(dtype))


def _native(left: Tensor, right: Patches) -> bool:
    """Whether the framework's kernels take these operands."""
    nonempty = left.numel() > 0 and right.source.numel() > 0
    precise = left.dtype in (torch.float32, torch.float64) or left.device.type != "cpu"
    return nonempty and precise and len(right.window.kernel) <= _NATIVE_DIMENSIONS
