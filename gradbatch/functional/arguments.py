"""What a convolution may be called with: sides, paddings and shapes, checked before any kernel sees them.

Each refusal names the function, the argument and its shape, and says what would fit.
"""

from collections.abc import Sequence

from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.plans.windows import Window, same_padding

Sides = int | Sequence[int]
"""One number for all spatial dimensions, or one for each."""

Padding = Sides | str
"""Zeros on both sides, or ``"same"`` or ``"valid"``."""


def convolution_window(
    input: Tensor, weight: Tensor, stride: Sides, padding: Padding, dilation: Sides, dimensions: int
) -> tuple[Window, list[int]]:
    """Resolve a convolution's arguments into a window, and pads for ``F.pad`` where two sides get different ones.

    Raises:
        UsageError: for wrong ranks, wrong numbers of sides, ``"same"`` with a stride, a window larger than
            the input.
    """
    _check_operands(input, weight, dimensions)
    kernel = tuple(weight.shape[2:])
    strides = sides("stride", stride, dimensions, least=1)
    dilations = sides("dilation", dilation, dimensions, least=1)
    if isinstance(padding, str):
        before, after = _named_padding(padding, kernel, strides, dilations)
    else:
        before = after = sides("padding", padding, dimensions, least=0)
    size = tuple(input.shape[-dimensions:])
    pads: list[int] = []
    if before != after:
        pads = [pad for pair in zip(reversed(before), reversed(after), strict=True) for pad in pair]
        size = tuple(map(sum, zip(size, before, after, strict=True)))
        before = (0,) * dimensions
    window = Window(kernel, strides, before, dilations)
    if 0 in window.positions(size):
        raise UsageError(
            f"no window fits: weight {list(weight.shape)} with dilation {dilations} spans "
            f"{window.extents((1,) * dimensions)} elements, the input {list(input.shape)} has {size} and "
            f"padding {before} on each side. Pad more, or use a smaller kernel."
        )
    return window, pads


def transposed_window(
    input: Tensor,
    weight: Tensor,
    stride: Sides,
    padding: Padding,
    output_padding: Sides,
    dilation: Sides,
    dimensions: int,
) -> tuple[Window, tuple[int, ...]]:
    """Resolve a transposed convolution's arguments into a window over its *output*, and the output padding.

    Raises:
        UsageError: for wrong ranks or numbers of sides, an output padding that is too large, an empty output.
    """
    _check_operands(input, weight, dimensions)
    if isinstance(padding, str):
        raise UsageError(f"padding = {padding!r}, but a transposed convolution pads by numbers; pass them.")
    window = Window(
        tuple(weight.shape[2:]),
        sides("stride", stride, dimensions, least=1),
        sides("padding", padding, dimensions, least=0),
        sides("dilation", dilation, dimensions, least=1),
    )
    extra = sides("output_padding", output_padding, dimensions, least=0)
    if any(e >= max(s, d) for e, s, d in zip(extra, window.stride, window.dilation, strict=True)):
        raise UsageError(
            f"output_padding = {extra} has to be smaller than the stride {window.stride} or the "
            f"dilation {window.dilation} in each dimension. Take less of it."
        )
    spans = window.extents(input.shape[-dimensions:])
    size = tuple(span - 2 * p + e for span, p, e in zip(spans, window.padding, extra, strict=True))
    if min(size) < 1 or 0 in input.shape[-dimensions:]:
        raise UsageError(
            f"input {list(input.shape)} and weight {list(weight.shape)} with padding {window.padding} "
            f"give an output of size {size}. Use less padding or a larger input."
        )
    return window, extra


def check_channels(
    input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, transposed: bool = False
) -> None:
    """Check that groups divide the channels, and that input, weight and bias agree on them.

    Raises:
        UsageError: where they do not.
    """
    channels, rows = input.shape[1 - weight.dim()], weight.shape[0]
    shapes = f"input {list(input.shape)}, weight {list(weight.shape)}, groups = {groups}"
    if groups < 1 or rows % groups:
        raise UsageError(f"{shapes}: groups has to be a positive divisor of weight.shape[0] = {rows}.")
    wanted = rows if transposed else groups * weight.shape[1]
    if channels != wanted:
        reads = (
            "weight.shape[0]" if transposed else f"groups * weight.shape[1] = {groups} * {weight.shape[1]}"
        )
        fix = (
            "a weight with one row for each channel" if transposed else "groups = channels / weight.shape[1]"
        )
        raise UsageError(
            f"{shapes}: the input has {channels} channels, the weight reads {reads} = {wanted}. Pass {fix}."
        )
    outputs = groups * weight.shape[1] if transposed else rows
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise UsageError(f"{shapes}: bias has shape {list(bias.shape)}, the output needs [{outputs}].")


def sides(argument: str, value: Sides, dimensions: int, least: int) -> tuple[int, ...]:
    """Spread ``value`` over the spatial dimensions and check that none is below ``least``."""
    values = (value,) if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values = values * dimensions
    if len(values) != dimensions or min(values) < least:
        raise UsageError(
            f"{argument} = {value!r}, but it has to be one integer or {dimensions} of them, "
            f"each at least {least}."
        )
    return values


def _named_padding(
    padding: str, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if padding == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if padding != "same":
        raise UsageError(f"padding = {padding!r}; pass 'same', 'valid', an integer or {len(kernel)} of them.")
    if set(stride) != {1}:
        raise UsageError(
            f"padding = 'same' with stride = {stride}, but the output is as large as the input with "
            "stride 1 only. Pass the padding as numbers."
        )
    return same_padding(kernel, dilation)


def _check_operands(input: Tensor, weight: Tensor, dimensions: int) -> None:
    if weight.dim() != dimensions + 2 or input.dim() not in (dimensions + 1, dimensions + 2):
        raise UsageError(
            f"input {list(input.shape)}, weight {list(weight.shape)}: the input has to be [N, C, *size] "
            f"or [C, *size] and the weight [rows, channels, *kernel], with {dimensions} spatial dimension"
            f"{'s' if dimensions > 1 else ''}."
        )
    if input.is_complex() or weight.is_complex():
        raise UsageError(
            f"input {input.dtype}, weight {weight.dtype}: pass real tensors, or use the framework's own convolution."
        )
