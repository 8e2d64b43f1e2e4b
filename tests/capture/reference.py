"""Right or refused: run a model both ways, and compare with one backward pass for each sample's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchDotGrad, BatchGrad, BatchL2Grad, GradBatchError, SumGradSquared
from tests.oracle import TOLERANCE, assert_right, one_hot_of, quantity, trainable

QUANTITIES = (BatchGrad(), BatchL2Grad(), BatchDotGrad(), SumGradSquared())
Losses = Callable[[], Tensor]


class Wired(nn.Module):
    """A model whose forward is a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def wired(function: Callable[..., Any], **layers: nn.Module) -> Wired:
    """An extended model in float64."""
    return gradbatch.extend(Wired(function, **layers).double())


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def sum_of_squares(output: Tensor) -> Tensor:
    """One loss a sample, of an output with the samples on axis 0."""
    return output.flatten(1).square().sum(1) if output.dim() > 1 else output.square()


def perceptron(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The plain model of those tests that are not about the model, extended."""
    return gradbatch.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype))


def driven(model: nn.Module, losses: Losses) -> gradbatch.Results:
    """By ``gradbatch.backward``."""
    return gradbatch.backward(model, losses(), *QUANTITIES)


def watched(model: nn.Module, losses: Losses, reduction: str = "mean") -> gradbatch.Results:
    """By the user's own ``loss.backward()``."""
    with gradbatch.compute(model, *QUANTITIES, loss_reduction=reduction) as results:
        vector = losses()
        (vector.mean() if reduction == "mean" else vector.sum()).backward()
    return results


WAYS = {"backward": driven, "compute": watched}


def expected(model: nn.Module, losses: Losses) -> dict[str, Tensor]:
    """The gradients of each loss, one backward pass each."""
    return one_hot_of(losses(), trainable(model))


def assert_results(
    results: gradbatch.Results, gradients: Mapping[str, Tensor], tolerance: float | None = None
) -> None:
    """Every quantity of every parameter is what these per-sample gradients give."""
    for asked, found in results.items():
        assert set(found) == set(gradients)
        for name, gradient in gradients.items():
            allowed = TOLERANCE[gradient.dtype] if tolerance is None else tolerance
            right = quantity(asked, gradient)
            assert_right(found[name], right, allowed, f"{asked.name} of {name}", isinstance(asked, BatchGrad))


def assert_right_both_ways(model: nn.Module, losses: Losses, tolerance: float | None = None) -> None:
    """Both ways give, for every quantity, what one backward pass for each loss gives."""
    gradients = expected(model, losses)
    assert any(gradient.any() for gradient in gradients.values()), "nothing to find"
    for run in WAYS.values():
        assert_results(run(model, losses), gradients, tolerance)


def refusal_of(run: Callable[[], Any]) -> str | None:
    """The message if ``run`` is refused by an error of ours; ``None`` if it went through."""
    try:
        run()
    except GradBatchError as refusal:
        return str(refusal)
    return None


def assert_refused(
    model: nn.Module,
    losses: Losses,
    error: type[GradBatchError],
    named: str,
    ways: tuple[str, ...] = tuple(WAYS),
) -> None:
    """Both ways raise this very kind of error, and its message names the layer or the fix."""
    for way in ways:
        with pytest.raises(error, match=named) as raised:
            WAYS[way](model, losses)
        assert type(raised.value) is error
