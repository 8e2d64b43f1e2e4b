"""One layer, or a forward with some layers, as a model that must be right both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.reference import assert_right_both_ways, sum_of_squares, wired


def assert_layer_is_right(layer: nn.Module, *inputs: Tensor) -> None:
    """Right with something behind the layer, in front of it, and with a strided gradient."""
    model = wired(
        lambda self, *x: torch.sin(self.layer(*x)).transpose(0, -1).contiguous().transpose(0, -1), layer=layer
    )
    assert_right_both_ways(model, lambda: sum_of_squares(model(*inputs)))


def assert_model_is_right(forward: Callable[..., Any], *inputs: Tensor, **layers: nn.Module) -> None:
    model = wired(forward, **layers)
    assert_right_both_ways(model, lambda: sum_of_squares(model(*inputs)))
