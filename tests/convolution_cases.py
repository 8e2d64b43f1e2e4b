"""Convolutions drawn at random, with the tensors they take and the framework's own answer: for hypothesis."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

LAYOUTS = ("contiguous", "channels last", "reversed", "every second", "expanded")


@dataclass(frozen=True)
class Case:
    """One convolution: ``sizes`` of the input per dimension, channels per group, and how the tensors lie in memory."""

    dimensions: int
    transposed: bool
    samples: int
    groups: int
    inputs: int  # input channels of a group
    outputs: int  # output channels of a group
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: int | tuple[int, ...] | str
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    bias: bool
    layout: str
    seed: int

    def tensors(
        self, device: torch.device, dtype: torch.dtype = torch.double
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input ``[N, C, *sizes]`` in the case's layout, weight and bias."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.double).to(device, dtype)

        rows, columns = self.groups * self.outputs, self.inputs
        if self.transposed:
            rows, columns = self.groups * self.inputs, self.outputs
        input = lay_out(draw(self.samples, self.groups * self.inputs, *self.sizes), self.layout)
        return (
            input,
            draw(rows, columns, *self.kernel),
            draw(self.groups * self.outputs) if self.bias else None,
        )

    def arguments(self) -> tuple[object, ...]:
        """What follows the bias, in the order of the framework's function."""
        if self.transposed:
            return self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return self.stride, self.padding, self.dilation, self.groups

    def reference(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The framework's own convolution."""
        functions: dict[int, Callable[..., Tensor]] = TRANSPOSED if self.transposed else CONVOLUTIONS
        return functions[self.dimensions](input, weight, bias, *self.arguments())


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """Copy a tensor ``[N, C, *sizes]`` so that it lies in memory as ``layout`` says; values stay, if not expanded."""
    if layout == "channels last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "reversed":
        axes = tuple(reversed(range(tensor.dim())))
        return tensor.permute(axes).contiguous().permute(axes)
    if layout == "every second":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if layout == "expanded":
        return tensor[..., :1].expand(tensor.shape)
    return tensor


@st.composite
def convolutions(draw: st.DrawFn, transposed: bool | None = None, min_samples: int = 1) -> Case:
    """Draw a convolution of 1 to 3 dimensions whose output is not empty."""

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    dimensions = draw(st.integers(1, 3))
    transposed = draw(st.booleans()) if transposed is None else transposed
    kernel, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    mode: int | tuple[int, ...] | str = padding
    spans = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    if transposed:
        output_padding = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
        # Size of the output: (size - 1) * stride + span - 2 * padding + output_padding, at least 1.
        spare = zip(spans, padding, output_padding, stride, strict=True)
        least = [max(1, 1 + -(-(2 * p + 1 - span - extra) // s)) for span, p, extra, s in spare]
    else:
        output_padding = (0,) * dimensions
        kind = draw(st.sampled_from(["tuple", "int", "same", "valid"]))
        if kind != "tuple":
            padding = (0,) * dimensions if kind == "valid" else (padding[0],) * dimensions
            mode = padding[0] if kind == "int" else kind
        if kind == "same":
            stride, least = (1,) * dimensions, [1] * dimensions
        else:
            least = [max(1, span - 2 * p) for span, p in zip(spans, padding, strict=True)]
    return Case(
        dimensions=dimensions,
        transposed=transposed,
        samples=draw(st.integers(min_samples, 3)),
        groups=draw(st.integers(1, 4)),
        inputs=draw(st.integers(1, 3)),
        outputs=draw(st.integers(1, 3)),
        sizes=tuple(draw(st.integers(size, size + 4)) for size in least),
        kernel=kernel,
        stride=stride,
        padding=mode,
        dilation=dilation,
        output_padding=output_padding,
        bias=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 2**16)),
    )
