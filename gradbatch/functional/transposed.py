r"""Grouped transposed convolutions with a backward written by hand: a convolution's, with the roles swapped.

A transposed convolution writes where a convolution reads. So its input plays the part of a convolution's
output gradient (``left``), and the patches are those that the kernel, with the layer's own stride, padding
and dilation, reads from the *output gradient* :math:`\ell`:

.. math::
    \frac{\partial L_n}{\partial W}[g] = \sum_t x_{ngt}\, r(\ell)_{ngt}^\top
    \qquad
    \frac{\partial L}{\partial x_{ngt}} = W[g]\, r(\ell)_{ngt}
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbatch.functional.arguments import Sides, check_channels, transposed_window
from gradbatch.functional.convolutions import (
    Gradients,
    accumulation_dtype,
    apply,
    as_batch,
    by_group,
    leave_on_module,
    rows_by_group,
    weight_gradient,
)
from gradbatch.plans.convolutions import Patches

_CONVOLUTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class TransposedConvolutionFunction(torch.autograd.Function):
    """An n-dimensional grouped transposed convolution; :class:`ConvTranspose1dFunction` and siblings fix the ``n``.

    Call ``apply(input, weight, bias, stride, padding, output_padding, groups, dilation, module)``, all of them
    positional and none left out. The order is that of ``torch.nn.functional.conv_transpose2d``, where dilation comes
    after groups; what they mean is said at :func:`conv_transpose2d`.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the backward reads."""
        input, weight, bias, stride, padding, extra, ctx.groups, dilation, ctx.module = inputs
        sides = (stride, padding, extra, dilation)
        ctx.window, _ = transposed_window(input, weight, *sides, weight.dim() - 2)
        ctx.save_for_backward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        """Return the gradients that are needed; leave those of every sample on the module, if there is one."""
        input, weight, bias = ctx.saved_tensors
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        dtype = accumulation_dtype(grad_output, input, weight)
        images = as_batch(input, weight)
        grad_output = as_batch(grad_output, weight).to(dtype)
        # A large output padding has room for more windows than the input has elements: those read what nothing wrote.
        patches = Patches(grad_output, ctx.window, ctx.groups, tuple(images.shape[2:]))
        grad_input = grad_weight = grad_bias = None
        per_sample: dict[str, Tensor] = {}
        if for_input:
            rows = rows_by_group(weight.to(dtype), ctx.groups)
            grad_rows = torch.einsum("gpd,ngdt->ngpt", rows, patches.unfold())
            grad_input = grad_rows.reshape(input.shape).to(input.dtype)
        if for_weight:
            left = by_group(images.to(dtype), ctx.groups)
            grad_weight = weight_gradient(left, patches, weight, None if ctx.module is None else per_sample)
        if for_bias:
            per_sample["bias"] = grad_output.flatten(2).sum(2)
            grad_bias = per_sample["bias"].sum(0).to(bias.dtype)
        leave_on_module(ctx, per_sample)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None, None


def _convolve_transposed(
    dimensions: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sides,
    padding: Sides,
    output_padding: Sides,
    groups: int,
    dilation: Sides,
    module: nn.Module | None,
) -> Tensor:
    """Check the arguments and convolve: by the framework's kernel, because only the backward is of interest here."""
    sides = (stride, padding, output_padding, dilation)
    window, extra = transposed_window(input, weight, *sides, dimensions)
    check_channels(input, weight, bias, groups, transposed=True)
    geometry = (window.stride, window.padding, extra, groups, window.dilation)
    return _CONVOLUTIONS[dimensions](input, weight, bias, *geometry)


class ConvTranspose1dFunction(TransposedConvolutionFunction):
    """:class:`TransposedConvolutionFunction` of one spatial dimension; see :func:`conv_transpose1d`."""

    forward = staticmethod(partial(_convolve_transposed, 1))


class ConvTranspose2dFunction(TransposedConvolutionFunction):
    """:class:`TransposedConvolutionFunction` of two spatial dimensions; see :func:`conv_transpose2d`."""

    forward = staticmethod(partial(_convolve_transposed, 2))


class ConvTranspose3dFunction(TransposedConvolutionFunction):
    """:class:`TransposedConvolutionFunction` of three spatial dimensions; see :func:`conv_transpose3d`."""

    forward = staticmethod(partial(_convolve_transposed, 3))


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Sides = 0,
    output_padding: Sides = 0,
    groups: int = 1,
    dilation: Sides = 1,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Convolve ``[N, C, length]`` with ``[C, O / groups, kernel]``; all as in :func:`conv_transpose2d`."""
    geometry = (stride, padding, output_padding, groups, dilation)
    return apply(ConvTranspose1dFunction, input, weight, bias, *geometry, module)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Sides = 0,
    output_padding: Sides = 0,
    groups: int = 1,
    dilation: Sides = 1,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Convolve as ``torch.nn.functional.conv_transpose2d`` does, with a backward written by hand.

    Args:
        input: ``[N, C, H, W]``, any strides, or ``[C, H, W]`` for one sample.
        weight: ``[C, O / groups, kH, kW]``.
        bias: ``[O]`` or None.
        stride, padding, dilation: those of the convolution that this one transposes; an integer or one a
            dimension.
        output_padding: elements that the output gets at its end, fewer than the stride or the dilation.
        groups: a divisor of ``C`` and ``O``.
        module: as in :func:`gradbatch.functional.conv2d`; ``"weight"`` is ``[N, C, O / groups, kH, kW]``.

    Returns:
        ``[N, O, H', W']``, or ``[O, H', W']`` for one sample.

    Raises:
        UsageError: where ranks, channels, groups or sides do not fit together.

    Edge cases: an empty batch gives zero gradients. Second derivatives and ``torch.func``: as
    :func:`gradbatch.functional.conv2d`.

    Example:
        >>> from torch import nn
        >>> layer = nn.ConvTranspose2d(4, 6, kernel_size=3, stride=2, groups=2)
        >>> input = torch.randn(5, 4, 8, 8)
        >>> output = conv_transpose2d(input, layer.weight, layer.bias, stride=2, groups=2, module=layer)
        >>> output.sum().backward()
        >>> layer.grad_batch["weight"].shape
        torch.Size([5, 4, 3, 3, 3])
    """
    geometry = (stride, padding, output_padding, groups, dilation)
    return apply(ConvTranspose2dFunction, input, weight, bias, *geometry, module)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sides = 1,
    padding: Sides = 0,
    output_padding: Sides = 0,
    groups: int = 1,
    dilation: Sides = 1,
    *,
    module: nn.Module | None = None,
) -> Tensor:
    """Convolve ``[N, C, depth, H, W]`` with ``[C, O / groups, kD, kH, kW]``; see :func:`conv_transpose2d`."""
    geometry = (stride, padding, output_padding, groups, dilation)
    return apply(ConvTranspose3dFunction, input, weight, bias, *geometry, module)
