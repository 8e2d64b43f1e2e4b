"""Activations with parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.rules.axes import total
from gradbatch.rules.call import Call
from gradbatch.rules.registry import layer_rule


def _prelu_feature_axes(module: Any, output_dim: int) -> int:
    # One slope for all elements: every axis is a row. One a channel: channels are axis 1, rows axis 0.
    return 0 if module.num_parameters == 1 else output_dim - 1


@layer_rule(nn.PReLU, feature_axes=_prelu_feature_axes, reads=())
def prelu(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``y = max(x, 0) + a min(x, 0)``: the slope's gradient is ``Σ g min(x, 0)``."""
    if "weight" not in call.needs:
        return
    input, grad_output = call.input, call.grad_output
    # where, not clamp times g: an infinite gradient at a positive input contributes nothing.
    product = torch.where(input > 0, torch.zeros_like(grad_output), grad_output * input)
    if call.feature_axes == 0:
        yield "weight", Dense(total(product, tuple(range(1, product.dim()))).reshape(-1, 1))
    else:
        channels = product.dim() - (call.feature_axes or 0)
        yield "weight", Dense(total(product, tuple(a for a in range(1, product.dim()) if a != channels)))
