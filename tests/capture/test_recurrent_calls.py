"""What the capture does for recurrent layers: it hands on what they returned, and remembers where samples lie."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gradbatch
from gradbatch import BatchGrad, StaleCapture
from gradbatch.capture import evaluate, search
from gradbatch.rules import Call
from tests.capture.reference import (
    WAYS,
    assert_results,
    assert_right_both_ways,
    draw,
    expected,
    sum_of_squares,
    wired,
)
from tests.capture.test_in_place import CHANGES

every_kind = pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that rules are handed."""
    calls: list[Call] = []
    call_of = evaluate.call_of

    def noted(*arguments: Any) -> Call:
        calls.append(call_of(*arguments))
        return calls[-1]

    monkeypatch.setattr(evaluate, "call_of", noted)
    return calls


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry each time that it is measured where the samples lie."""
    made: list[None] = []
    find = search.find_owners
    monkeypatch.setattr(search, "find_owners", lambda *a: made.append(None) or find(*a))
    return made


def recurrent(kind: type[nn.Module], then: Callable[[Tensor, Tensor], Tensor] = lambda h, _: h) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.after(then(self.own(x)[0], x))

    return wired(forward, own=kind(3, 3, batch_first=True), after=nn.Linear(3, 2))


@every_kind
@pytest.mark.parametrize("way", WAYS)
def test_the_rule_is_handed_what_the_layer_returned(
    kind: type[nn.Module], way: str, handed: list[Call]
) -> None:
    model, x = recurrent(kind), draw(4, 5, 3)
    WAYS[way](model, lambda: sum_of_squares(model(x)))
    (call,) = [call for call in handed if isinstance(call.module, kind)]
    torch.testing.assert_close(call.outputs[0], model.own(x)[0])
    assert not any(output.requires_grad for output in call.outputs)
    assert all(not other.outputs for other in handed if other is not call)


@every_kind
@pytest.mark.parametrize("change", CHANGES)
def test_a_result_changed_in_place_is_not_handed_on(
    kind: type[nn.Module], change: Callable[[Tensor, Tensor], Tensor], handed: list[Call]
) -> None:
    model, x = recurrent(kind, change), draw(4, 5, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    assert not any(call.outputs for call in handed)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_layer_returned_is_let_go_of_while_the_loss_lives(way: str) -> None:
    model, x = recurrent(nn.GRU, lambda h, _: h * 2), draw(4, 5, 3)
    storages = []
    model.own.register_forward_hook(
        lambda *a: storages.append(weakref.ref(a[-1][0].untyped_storage()))  # type: ignore[func-returns-value]
    )
    if way == "backward":
        losses = sum_of_squares(model(x))
        gradbatch.backward(model, losses, BatchGrad(), reduction="sum")
    else:
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            losses = sum_of_squares(model(x))
            losses.sum().backward()
    gc.collect()
    assert losses.grad_fn is not None
    assert [storage() for storage in storages] == [None]


def last_state(rnn: Any, x: Tensor) -> Tensor:
    state = rnn(x)[1]
    return (state[0] if isinstance(state, tuple) else state)[-1]


def output_and_state(rnn: Any, x: Tensor) -> Tensor:
    output, state = rnn(x)
    return torch.cat([output.sum(1), (state[0] if isinstance(state, tuple) else state)[-1]], 1)


ARRANGED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sequences first": lambda rnn, x: rnn(x)[0],
    "steps first": lambda rnn, x: rnn(x.transpose(0, 1))[0].transpose(0, 1),
    "last step": lambda rnn, x: rnn(x)[0][:, -1],
    "last state": last_state,
    "output and state": output_and_state,
}


@every_kind
@pytest.mark.parametrize("arrangement", ARRANGED)
@pytest.mark.parametrize("samples", [3, 4], ids=["", "as many steps as samples"])
def test_from_the_third_step_on_nothing_is_measured_and_all_is_right(
    kind: type[nn.Module], arrangement: str, samples: int, measurements: list[None]
) -> None:
    forward = ARRANGED[arrangement]
    own = kind(3, 2, num_layers=2, bidirectional=True, batch_first=arrangement != "steps first")
    model = wired(lambda self, x: forward(self.own, x).sin(), own=own)
    counts = []
    for _ in range(4):
        x = draw(samples, 4, 3)
        right = expected(model, lambda: sum_of_squares(model(x)))  # noqa: B023
        before = len(measurements)
        assert_results(gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad()), right)
        counts.append(len(measurements) - before)
    assert min(counts[:2]) > 0 and counts[2:] == [0, 0]


@every_kind
def test_sequences_that_were_equally_long_by_chance_are_not_relied_on(kind: type[nn.Module]) -> None:
    def forward(self: nn.Module, x: Tensor, lengths: Any) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.own(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    model = wired(forward, own=kind(3, 2))
    for lengths in [[4, 4, 4], [4, 4, 4], [4, 4, 4], [2, 4, 6], [4, 4, 4], [6, 2, 4]]:
        x = draw(3, 6, 3)
        losses = lambda: sum_of_squares(model(x, torch.tensor(lengths)))  # noqa: E731, B023
        assert_results(gradbatch.backward(model, losses(), BatchGrad()), expected(model, losses))


@every_kind
@pytest.mark.parametrize("read", [lambda h: h, torch.sin], ids=["saves nothing", "saves its input"])
def test_a_graph_that_was_freed_is_refused_by_the_layers_name_in_any_step(
    kind: type[nn.Module], read: Callable[[Tensor], Tensor]
) -> None:
    model, x = wired(lambda self, x: read(self.own(x)[0]), own=kind(3, 2, batch_first=True)), draw(4, 5, 3)
    for _ in range(4):
        losses = model(x).sum((1, 2))
        losses.sum().backward()
        with pytest.raises(StaleCapture, match=r"own.*freed|freed"):
            gradbatch.per_sample_grads(model, losses)
        gradbatch.per_sample_grads(model, model(x).sum((1, 2)))
