r"""Grouped convolutions with a backward written by hand: unfold, and contract group by group.

With the output gradient :math:`\ell` and the patches :math:`r` that the kernel read, both split into groups,

.. math::
    \frac{\partial L_n}{\partial W}[g] = \sum_t \ell_{ngt}\, r_{ngt}^\top
    \qquad
    \frac{\partial L}{\partial r_{ngt}} = W[g]^\top \ell_{ngt}

and the input gradient adds those patches back to where they were read from. A group never meets another one:
the contraction has ``g`` on both sides, so nothing of size ``G x G`` is formed and cut down afterwards.

The backward is made of differentiable operations, so it can be differentiated again.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbatch.functional.arguments import Padding, Sides, check_channels, convolution_window
from gradbatch.plans.convolutions import Patches, correlate, correlate_sum, fold

Gradients = tuple[Tensor | None, ...]
"""One entry an argument of ``forward``; None for those without a gradient."""

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ConvolutionFunction(torch.autograd.Function):
    """An n-dimensional grouped convolution; :class:`Conv1dFunction` and its siblings fix the ``n``.

    Call ``apply(input, weight, bias, stride, padding, dilation, groups, module)``, all of them positional and none
    left out; what they mean is said at :func:`conv2d`.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward reads."""
        input, weight, bias, stride, padding, dilation, ctx.groups, ctx.module = inputs
        ctx.window, ctx.pads = convolution_window(input, weight, stride, padding, dilation, weight.dim() - 2)
        ctx.save_for_backward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        """Return the gradients that are needed; leave those of every sample on the module, if there is one."""
        input, weight, bias = ctx.saved_tensors
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        dtype = accumulation_dtype(grad_output, input, weight)
        padded = F.pad(as_batch(input, weight), ctx.pads)
        grad_output = as_batch(grad_output, weight).to(dtype)
        left = by_group(grad_output, ctx.groups)
        grad_input = grad_weight = grad_bias = None
        per_sample: dict[str, Tensor] = {}
        if for_input:
            grad_patches = torch.einsum("gpd,ngpt->ngdt", rows_by_group(weight.to(dtype), ctx.groups), left)
            grad_padded = fold(grad_patches, ctx.window, padded.shape[2:])
            grad_input = F.pad(grad_padded, [-pad for pad in ctx.pads]).reshape(input.shape).to(input.dtype)
        if for_weight:
            patches = Patches(padded.to(dtype), ctx.window, ctx.groups)
            grad_weight = weight_gradient(left, patches, weight, None if ctx.module is None else per_sample)
        if for_bias:
            per_sample["bias"] = grad_output.flatten(2).sum(2)
            grad_bias = per_sample["bias"].sum(0).to(bias.dtype)
        leave_on_module(ctx, per_sample)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _convolve(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sides,
    padding: Padding,
    dilation: Sides,
    groups: int,
    module: nn.Module | None,
) -> Tensor:
    """Check the arguments and convolve: by the framework's kernel, because only the backward is of interest here."""
    window, pads = convolution_window(input, weight, stride, padding, dilation, dimensions)
    check_channels(input, weight, bias, groups)
    geometry = (window.stride, window.padding, window.dilation, groups)
    return _CONVOLUTIONS[dimensions](F.pad(input, pads), weight, bias, *geometry)


class Conv1dFunction(ConvolutionFunction):
    """:class:`ConvolutionFunction` of one spatial dimension; see :func:`conv1d`."""

    forward = staticmethod(partial(_convolve, 1))


class Conv2dFunction(ConvolutionFunction):
    """:class:`ConvolutionFunction` of two spatial dimensions; see :func:`conv2d`."""

    forward = staticmethod(partial(_convolve, 2))


class Conv3dFunction(ConvolutionFunction):
    """:class:`ConvolutionFunction` of three spatial dimensions; see :func:`conv3d`."""

    forward = staticmethod(partial(_convolve, 3))


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """Run a function on the autograd graph; the one place that says what ``apply``, untyped in torch, returns."""
    output: Tensor = function.apply(*arguments)
    return output


def as_batch(images: Tensor, weight: Tensor) -> Tensor:
    """Give a single sample ``[C, *size]`` the axis of a batch."""
    return images if images.dim() == weight.dim() else images.unsqueeze(0)


def by_group(images: Tensor, groups: int) -> Tensor:
    """Reshape ``[N, C, *size]`` to ``[N, G, C / G, T]``."""
    samples, channels, *size = images.shape
    return images.reshape(samples, groups, channels // groups, math.prod(size))


def rows_by_group(weight: Tensor, groups: int) -> Tensor:
    """Reshape ``[G * P, channels, *kernel]`` to ``[G, P, D]``."""
    rows, *inputs = weight.shape
    return weight.reshape(groups, rows // groups, math.prod(inputs))


def weight_gradient(
    left: Tensor, patches: Patches, weight: Tensor, per_sample: dict[str, Tensor] | None
) -> Tensor:
    """Correlate, and sum over samples; each sample's own result goes into ``per_sample``, unless it is None."""
    if per_sample is None:
        return correlate_sum(left, patches, "unfold").reshape(weight.shape).to(weight.dtype)
    per_sample["weight"] = correlate(left, patches, "unfold").reshape(len(left), *weight.shape)
    return per_sample["weight"].sum(0).to(weight.dtype)


def leave_on_module(ctx: Any, per_sample: dict[str, Tensor]) -> None:
    """Set ``grad_batch`` on the module that the function was given, if any: a plain attribute."""
    if ctx.module is None:
        return
    # Once a backward has been made part of the graph, a later one reaches the parameters through that backward's
    # operations too, which know no samples: what this one sees is only a part, and a part would be a wrong answer.
    partial_only = getattr(ctx, "backward_in_graph", False)
    ctx.backward_in_graph = partial_only or torch.is_grad_enabled()
    # Detached: the graph of a double backward would live as long as the module.
    left = {} if partial_only else {name: gradient.detach() for name, gradient in per_sample.items()}
    ctx.module.grad_batch = left


def accumulation_dtype(*operands: Tensor) -> torch.dtype:
    """Return the dtype to compute in: at least float32, and wide enough for all of the operands."""
    dtype = torch.float32
    for operand in operands:
        dtype = torch.promote_types(dtype, operand.dtype)
    return dtype


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Padding = 0,
    dilation: Sides = 1,
    groups: int = 1,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Convolve ``[N, C, length]`` with ``[O, C / groups, kernel]``; all as in :func:`conv2d`."""
    return apply(Conv1dFunction, input, weight, bias, stride, padding, dilation, groups, module)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Padding = 0,
    dilation: Sides = 1,
    groups: int = 1,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Convolve as ``torch.nn.functional.conv2d`` does, with a backward written by hand.

    Args:
        input: ``[N, C, H, W]``, any strides, or ``[C, H, W]`` for one sample.
        weight: ``[O, C / groups, kH, kW]``.
        bias: ``[O]`` or None.
        stride, dilation: one integer, or one for each spatial dimension.
        padding: the same, or ``"valid"`` (none) or ``"same"`` (as large an output as the input; stride 1
            only).
        groups: a divisor of ``C`` and ``O``; output channels of a group read input channels of that group
            only.
        module: where each backward leaves ``module.grad_batch`` (in place of the last one's), a dict with ``"weight"``
            ``[N, O, C / groups, kH, kW]`` and ``"bias"`` ``[N, O]``: the contribution of each sample to
            ``weight.grad`` and ``bias.grad``. Those are gradients of the samples' own losses when the loss is
            their sum; after a mean, multiply by ``N``. They have no graph, at least float32, and only the
            gradients that were needed are there. None leaves nothing.

    Returns:
        ``[N, O, H', W']``, or ``[O, H', W']`` for one sample.

    Raises:
        UsageError: where ranks, channels, groups or sides do not fit together.

    Edge cases: an empty batch gives zero gradients. Can be differentiated twice; where a backward with
    ``create_graph=True`` comes first (a gradient penalty), a later one that passes here again leaves an empty dict, for
    it cannot see the whole gradient of a sample. Under ``torch.func`` transforms pass no module.

    Example:
        >>> from torch import nn
        >>> layer = nn.Conv2d(4, 6, kernel_size=3, groups=2)
        >>> output = conv2d(torch.randn(5, 4, 8, 8), layer.weight, layer.bias, groups=2, module=layer)
        >>> output.sum().backward()
        >>> layer.grad_batch["weight"].shape
        torch.Size([5, 6, 2, 3, 3])
        >>> torch.allclose(layer.grad_batch["weight"].sum(0), layer.weight.grad)
        True
    """
    return apply(Conv2dFunction, input, weight, bias, stride, padding, dilation, groups, module)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Padding = 0,
    dilation: Sides = 1,
    groups: int = 1,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Convolve ``[N, C, depth, H, W]`` with ``[O, C / groups, kD, kH, kW]``; all as in :func:`conv2d`."""
    return apply(Conv3dFunction, input, weight, bias, stride, padding, dilation, groups, module)
