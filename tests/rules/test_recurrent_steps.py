"""The backward of every kind of recurrent cell, written by hand, against finite differences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbatch.rules import recurrent_steps
from gradbatch.rules.recurrent_cells import GRU, LSTM, Relu, Steps, Tanh, Trace
from gradbatch.rules.recurrent_steps import Weights, backward, forward

STEPS, BATCH, HIDDEN, PROJECTED = 4, 3, 2, 3
GATES = {Tanh: 1, Relu: 1, GRU: 3, LSTM: 4}
KINDS = [(kind, False) for kind in GATES] + [(LSTM, True)]
every_kind = pytest.mark.parametrize(
    ("kind", "projects"), KINDS, ids=lambda value: getattr(value, "__name__", "projected" if value else "")
)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double)


def inputs(kind: type[Steps], projects: bool, device: torch.device) -> list[Tensor]:
    """Gates of the input, weights of the hidden state and of the projection, and the state in front."""
    gates, width = GATES[kind] * HIDDEN, PROJECTED if projects else HIDDEN
    tensors = [draw(STEPS, BATCH, gates), draw(gates, width), draw(PROJECTED, HIDDEN)]
    return [tensor.to(device).requires_grad_() for tensor in tensors] + [
        draw(BATCH, width).to(device),
        draw(BATCH, HIDDEN).to(device),
    ]


def taken(kind: type[Steps], projects: bool, known: Tensor | None, *tensors: Tensor) -> tuple[Trace, Weights]:
    """All steps, of an input that is the gates themselves."""
    gates, hh, hr, hidden, memory = (tensor.detach() for tensor in tensors)
    weights = Weights(torch.eye(len(hh)).to(hh), hh, None, None, hr if projects else None)
    state = (hidden, memory) if kind is LSTM else (hidden,)
    return forward(kind, weights, gates, state, known), weights


class Layer(torch.autograd.Function):
    """A direction of a layer: its hidden states and, of an LSTM, its memories."""

    @staticmethod
    def forward(
        ctx: Any, kind: type[Steps], projects: bool, known: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        trace, _ = taken(kind, projects, None, *tensors)
        if known:
            trace, _ = taken(kind, projects, trace.hidden[1:].clone(), *tensors)
        ctx.options = kind, projects, trace.hidden[1:].clone() if known else None
        ctx.save_for_backward(*tensors)
        return trace.hidden[1:].clone(), torch.zeros(()) if trace.memory is None else trace.memory[1:].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trace, weights = taken(*ctx.options, *ctx.saved_tensors)
        hidden_grads, memory_grads = grads
        hidden_grads = hidden_grads.clone()
        with_memory = None if trace.memory is None else memory_grads
        deltas, hidden_deltas = backward(trace, weights, hidden_grads, with_memory)
        grad_hh = torch.einsum("tbg,tbh->gh", hidden_deltas, trace.hidden[:-1])
        grad_hr = None
        if weights.hr is not None:
            grad_hr = torch.einsum("tbp,tbh->ph", hidden_grads, trace.unprojected)
        return None, None, None, deltas, grad_hh, grad_hr, None, None


@pytest.mark.parametrize("known", [False, True], ids=["step by step", "hidden states known"])
@every_kind
def test_the_backward_of_a_cell_is_that_of_finite_differences(
    kind: type[Steps], projects: bool, known: bool, device: torch.device
) -> None:
    gates, hh, hr, *state = inputs(kind, projects, device)
    if not projects:
        hr.requires_grad_(False)
    layer: Callable[..., Any] = partial(Layer.apply, kind, projects, known)
    assert torch.autograd.gradcheck(layer, (gates, hh, hr, *state))


@every_kind
def test_known_hidden_states_give_the_same_gates(
    kind: type[Steps], projects: bool, device: torch.device
) -> None:
    tensors = inputs(kind, projects, device)
    replayed, _ = taken(kind, projects, None, *tensors)
    known, _ = taken(kind, projects, replayed.hidden[1:].clone(), *tensors)
    for name in ("gates", "hidden", "memory", "squashed"):
        torch.testing.assert_close(getattr(known, name), getattr(replayed, name), rtol=0, atol=1e-14)


@every_kind
def test_how_many_steps_are_prepared_at_once_changes_nothing(
    kind: type[Steps], projects: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(kind, projects, device)
    trace, weights = taken(kind, projects, None, *tensors)
    grads, memory_grads = torch.randn_like(trace.hidden[1:]), draw(STEPS, BATCH, HIDDEN).to(device)
    found = []
    for steps in (1, 3, STEPS):
        monkeypatch.setattr(recurrent_steps, "_AT_ONCE", steps * trace.gates[0].numel())
        found.append(backward(trace, weights, grads.clone(), memory_grads if kind is LSTM else None))
    for other in found[1:]:
        for tensor, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-14)


def test_a_hidden_state_that_is_not_a_number_keeps_its_gradient() -> None:
    hidden = torch.tensor([-1.0, 0.0, 2.0, torch.nan])
    torch.testing.assert_close(Relu.slope(hidden), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert Tanh.slope(hidden)[-1].isnan()


@every_kind
def test_a_sequence_that_is_not_finite_stays_alone(
    kind: type[Steps], projects: bool, device: torch.device
) -> None:
    tensors = inputs(kind, projects, device)
    broken = [tensor.detach().clone() for tensor in tensors]
    broken[0][1, 0] = torch.nan
    found = []
    for each in (tensors, broken):
        trace, weights = taken(kind, projects, None, *each)
        _, deltas = backward(trace, weights, torch.ones_like(trace.hidden[1:]), None)
        found.append(torch.einsum("tbg,tbh->bgh", deltas, trace.hidden[:-1]))
    whole, with_broken = found
    torch.testing.assert_close(with_broken[1:], whole[1:], rtol=0, atol=0)
    assert with_broken[0].isnan().any()
