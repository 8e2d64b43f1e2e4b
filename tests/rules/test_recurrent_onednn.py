"""The gates that oneDNN's LSTM keeps: found where they are, never taken for granted, and not needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch.capture import graph
from gradbatch.rules import recurrent
from gradbatch.rules.recurrent_cells import Trace
from gradbatch.rules.recurrent_steps import forward
from tests.oracle import assert_right, one_hot_of, trainable

KIND = "MkldnnRnnLayerBackward"


def is_there() -> bool:
    node = graph.node_of(nn.LSTM(2, 2)(torch.randn(2, 2, 2))[0])
    return graph.kind(node) == KIND or any(
        below is not None and graph.kind(below) == KIND for below, _ in node.next_functions
    )


pytestmark = pytest.mark.skipif(not is_there(), reason="this torch has no LSTM by oneDNN")

LAYERS: dict[str, tuple[Callable[[], nn.LSTM], tuple[int, ...]]] = {
    "one layer": (lambda: nn.LSTM(3, 4, batch_first=True), (5, 7, 3)),
    "one step": (lambda: nn.LSTM(3, 4, batch_first=True), (5, 1, 3)),
    "many steps": (lambda: nn.LSTM(3, 4, batch_first=True), (2, 40, 3)),
    "both ways, deep": (lambda: nn.LSTM(3, 5, 2, bidirectional=True, batch_first=True), (5, 7, 3)),
    "without bias": (lambda: nn.LSTM(3, 4, bias=False, batch_first=True), (5, 7, 3)),
    # Rows of 256 gates would alias in a cache.
    "wide": (lambda: nn.LSTM(3, 64, batch_first=True), (3, 4, 3)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Trace | None]:
    """What was found, direction by direction."""
    found: list[Trace | None] = []
    kept_trace = recurrent.kept_trace

    def watched(*arguments: Any) -> Trace | None:
        found.append(kept_trace(*arguments))
        return found[-1]

    monkeypatch.setattr(recurrent, "kept_trace", watched)
    return found


def check(name: str) -> None:
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    model = gradbatch.extend(build())
    x = torch.randn(shape)
    losses = lambda: model(x)[0].flatten(1).sin().sum(1)  # noqa: E731
    right = one_hot_of(losses(), trainable(model))
    for parameter, grad in gradbatch.per_sample_grads(model, losses()).items():
        assert_right(grad, right[parameter], 1e-5, parameter)


@every_layer
def test_the_gates_are_found_and_the_gradients_right(name: str, traces: list[Trace | None]) -> None:
    check(name)
    assert traces and all(trace is not None for trace in traces)


@every_layer
def test_what_is_found_is_what_would_be_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    kept_trace = recurrent.kept_trace

    def watched(kept: Any, weights: Any, input: Tensor, state: Any, reverse: bool) -> Trace | None:
        found = kept_trace(kept, weights, input, state, reverse)
        assert found is not None
        computed = forward(found.kind, weights, input, state)
        for part in ("gates", "hidden", "memory", "squashed"):
            torch.testing.assert_close(getattr(found, part), getattr(computed, part), rtol=0, atol=2e-6)
        compared.append(found)
        return found

    monkeypatch.setattr(recurrent, "kept_trace", watched)
    check(name)
    assert compared


def swapped(workspace: Tensor) -> Tensor:
    """Input gate and cell gate exchanged, which makes the same memories."""
    rows = workspace[: 7 * 5 * 16 * 4].view(torch.float32).view(7, 5, 16)
    i, f, g, o = rows.chunk(4, -1)
    return torch.cat([g, f, i, o], -1).contiguous().flatten().view(torch.uint8)


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "steps turned around": lambda w: w[: 7 * 5 * 16 * 4].view(7, -1).flip(0).flatten(),
    "sequences exchanged": lambda w: w[: 7 * 5 * 16 * 4].view(7, 5, -1).roll(1, 1).flatten(),
    "one number": lambda w: torch.cat([w[:400], w[400:404] ^ 64, w[404:]]),
    "gates exchanged": swapped,
    "zeros": torch.zeros_like,
    "not a number": lambda w: torch.full_like(w, 255),
    "too short": lambda w: w[:100],
    "of another type": lambda w: w.view(torch.int32),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_workspace_that_holds_something_else_is_noticed(
    lie: str, traces: list[Trace | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = graph.saved

    def lying(node: Any, name: str) -> Any:
        value = saved(node, name)
        return LIES[lie](value) if graph.kind(node) == KIND and name == "result3" else value

    monkeypatch.setattr(graph, "saved", lying)
    check("one layer")
    assert traces == [None]


def test_torch_that_shows_nothing_is_right_too(
    traces: list[Trace | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(node: Any, name: str) -> Any:
        raise AttributeError(name)

    monkeypatch.setattr(graph, "saved", hidden)
    check("both ways, deep")
    assert not traces


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def test_the_users_own_pass_frees_the_workspace_and_all_is_right(traces: list[Trace | None]) -> None:
    model, x = gradbatch.extend(Sequences()), torch.randn(5, 7, 3)
    right = one_hot_of(model(x).flatten(1).sin().sum(1), trainable(model))
    with gradbatch.compute(model, gradbatch.BatchGrad(), loss_reduction="sum") as results:
        model(x).flatten(1).sin().sum().backward()
    for parameter, grad in results[gradbatch.BatchGrad].items():
        assert_right(grad, right[parameter], 1e-5, parameter)
    assert not traces
