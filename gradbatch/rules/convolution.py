r"""Convolutions and transposed convolutions of any dimension, with any number of groups.

A convolution is a linear layer on patches of its input, one for each group:

.. math:: g_n[\gamma] = \sum_t \text{grad\_output}_{n\gamma t}\; \text{patch}_{n\gamma t}^\top

so its weight gradient is an :class:`~gradbatch.OuterProduct` whose right operand is kept lazy as
:class:`~gradbatch.plans.convolutions.Patches`. A transposed convolution is the adjoint of a convolution: the roles of
input and output gradient are swapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradbatch.factors import Dense, OuterProduct, PerSampleGrad
from gradbatch.plans.convolutions import Patches, Window
from gradbatch.rules.axes import by_position, total
from gradbatch.rules.call import Call
from gradbatch.rules.registry import layer_rule


def _channels_and_space(module: Any, output_dim: int) -> int:
    return len(module.kernel_size) + 1


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """``[N, rows, C, *size]`` to the operand ``[N, G, C / G, T]``, positions ordered by row, then by place."""
    if rows.shape[1] == 1:
        samples, _, channels, *size = rows.shape
        return rows.reshape(samples, groups, channels // groups, math.prod(size))
    rows = rows.flatten(3).unflatten(2, (groups, rows.shape[2] // groups))
    return rows.movedim(1, 3).flatten(3)


def pad(input: Tensor, module: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Carry out what a plain zero padding cannot express: padding modes, and 'same' of an even kernel.

    Args:
        input: ``[rows, C, *size]``.
        module: a convolution.

    Returns:
        The input, padded where necessary, and the zero padding on both sides of each dimension that is left to do.
    """
    dimensions = len(module.kernel_size)
    if module.padding == "valid":
        before = after = (0,) * dimensions
    elif module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        before = tuple(t // 2 for t in totals)
        after = tuple(t - t // 2 for t in totals)
    else:
        before = after = tuple(module.padding)
    if module.padding_mode == "zeros" and before == after:
        return input, before
    sides = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(input, sides, mode=mode), (0,) * dimensions


@layer_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, feature_axes=_channels_and_space, reads=())
def convolution(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Output gradients on the left, patches of the (padded) input on the right."""
    module, features = call.module, call.feature_axes or 0
    grad_output = by_position(call.grad_output, features)
    if "weight" in call.needs:
        input = by_position(call.input, features)
        rows = input.shape[1]
        padded, padding = pad(input.flatten(0, 1), module)
        window = Window(module.kernel_size, module.stride, padding, module.dilation)
        patches = Patches(padded, window, module.groups, rows=rows)
        yield "weight", OuterProduct(_by_group(grad_output, module.groups), patches, module.weight.shape)
    if "bias" in call.needs:
        yield "bias", Dense(total(grad_output, (1, *range(3, grad_output.dim()))))


@layer_rule(
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    feature_axes=_channels_and_space,
    reads=(),
)
def transposed_convolution(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Inputs on the left, patches of the output gradient on the right."""
    module, features = call.module, call.feature_axes or 0
    grad_output = by_position(call.grad_output, features)
    if "weight" in call.needs:
        input = by_position(call.input, features)
        window = Window(module.kernel_size, module.stride, module.padding, module.dilation)
        # output_padding can leave room for windows that no input position writes to: only as many as inputs are read.
        patches = Patches(
            grad_output.flatten(0, 1),
            window,
            module.groups,
            positions=tuple(input.shape[3:]),
            rows=input.shape[1],
        )
        yield "weight", OuterProduct(_by_group(input, module.groups), patches, module.weight.shape)
    if "bias" in call.needs:
        yield "bias", Dense(total(grad_output, (1, *range(3, grad_output.dim()))))
