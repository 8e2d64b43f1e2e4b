"""Calls of one layer in a loop: joined to one where they are alike, and right where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, Dense
from gradbatch.capture import evaluate
from gradbatch.rules import Call, registry
from tests.capture.reference import assert_right_both_ways, draw, sum_of_squares, wired


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each call is made of that a rule is handed."""
    sizes: list[int] = []
    join = evaluate.joined

    def noted(calls: list[Call]) -> Call:
        sizes.append(len(calls))
        return join(calls)

    monkeypatch.setattr(evaluate, "joined", noted)
    return sizes


def in_a_loop(self: nn.Module, x: Tensor) -> Tensor:
    """An Elman network of linear layers."""
    hidden = torch.zeros(len(x), 3, dtype=x.dtype)
    for step in x.unbind(1):
        hidden = torch.tanh(self.input(step) + self.hidden(hidden))
    return hidden


def cells_in_a_loop(self: nn.Module, x: Tensor) -> Tensor:
    state, outputs = None, []
    for step in x.unbind(1):
        state = self.cell(step, state)
        outputs.append(state)
    return torch.stack(outputs, 1)


def of_other_lengths(self: nn.Module, x: Tensor) -> Tensor:
    """The positions of each sample on axis 1, and flattened with the samples, sample by sample and step by step."""
    first = self.input(x).tanh().sum(1)
    second = self.input(x.flatten(0, 1).cos()).tanh().unflatten(0, x.shape[:2]).sum(1)
    third = self.input(x.transpose(0, 1).flatten(0, 1).sin()).tanh().unflatten(0, (x.shape[1], -1)).sum(0)
    return (
        first * second + third * self.input(x[:, 0]) + self.input(x[:, 1:3].transpose(0, 1)).square().sum(0)
    )


FORWARDS: dict[str, tuple[Callable[..., Tensor], dict[str, Callable[[], nn.Module]], list[int]]] = {
    "linear layers": (
        in_a_loop,
        {"input": lambda: nn.Linear(2, 3), "hidden": lambda: nn.Linear(3, 3)},
        [5, 5],
    ),
    # The first call is without a state.
    "RNN cells": (cells_in_a_loop, {"cell": lambda: nn.RNNCell(2, 3)}, [1, 4]),
    "GRU cells": (cells_in_a_loop, {"cell": lambda: nn.GRUCell(2, 3)}, [1, 4]),
    "other axes": (of_other_lengths, {"input": lambda: nn.Linear(2, 3)}, [1, 1, 1, 2]),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_calls_that_are_alike_are_joined_and_right(name: str, joined: list[int]) -> None:
    forward, layers, sizes = FORWARDS[name]
    model, x = wired(forward, **{key: make() for key, make in layers.items()}), draw(4, 5, 2)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    assert sorted(joined) == sorted(2 * sizes)


@pytest.mark.parametrize("frozen", ["input.bias", "input.weight", "hidden.weight"])
def test_parameters_that_are_frozen_are_left_out(frozen: str) -> None:
    forward, layers, _ = FORWARDS["linear layers"]
    model, x = wired(forward, **{key: make() for key, make in layers.items()}), draw(4, 5, 2)
    model.get_parameter(frozen).requires_grad_(False)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_call_that_no_gradient_reaches_is_not_waited_for() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        first, second = self.own(x), self.own(x.sin())
        return first * (second.detach() + 0 * second.round().sign())

    model, x = wired(forward, own=nn.Linear(3, 2)), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_calls_in_another_mode_are_told_apart(joined: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.power = nn.Parameter(torch.randn(3)), 1

        def forward(self, input: Tensor, by: float = 1.0) -> Tensor:
            return self.factor * input**self.power * by

    @gradbatch.layer_rule(Scale, feature_axes=1, by_row=True)
    def scale(call: Call) -> Any:
        terms = call.input**call.module.power * call.grad_output * call.arguments["by"]
        yield "factor", Dense(terms.flatten(1, -2).sum(1) if terms.dim() > 2 else terms)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for power, by in ((1, 1.0), (2, 1.0), (1, 1.0), (1, 3.0), (2, 1.0)):
            self.own.power = power
            total = total + torch.sin(self.own(x, by=by))
        return total

    model, x = wired(forward, own=Scale()), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    assert sorted(joined) == sorted(2 * [2, 2, 1])


def test_rules_that_do_not_go_by_rows_are_handed_each_call(joined: list[int]) -> None:
    model = wired(lambda self, x: self.own(x).tanh() * self.own(x.sin()), own=nn.LayerNorm(3))
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    assert joined == 4 * [1]


def test_a_single_sample_without_rows_is_right() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.zeros(2, dtype=x.dtype)
        for step in x[0].unbind(0):
            hidden = self.cell(step, hidden) + self.own(step).tanh()
        return hidden.unsqueeze(0)

    for width in (1, 3):
        model, x = wired(forward, cell=nn.GRUCell(width, 2), own=nn.Linear(width, 2)), draw(1, 4, width)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))  # noqa: B023


def test_half_of_the_calls_in_another_precision_are_told_apart() -> None:
    model, x = (
        wired(FORWARDS["linear layers"][0], input=nn.Linear(2, 3), hidden=nn.Linear(3, 3)),
        draw(4, 5, 2),
    )
    model.float()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = sum_of_squares(model(x.float()).float())
        results.append(gradbatch.backward(model, losses, BatchGrad())[BatchGrad])
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=0.1, atol=0.05)
