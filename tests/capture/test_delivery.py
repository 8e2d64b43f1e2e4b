"""The last pass: gradients go to their rules as they arrive, and nothing is held longer than it is needed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradbatch
from gradbatch import BatchGrad, BatchL2Grad, ClippedSum, GradBatchError, Quantity, StaleCapture
from gradbatch.capture import delivery
from gradbatch.capture.passes import PrunedPass
from tests.capture.reference import assert_results, draw, expected, sum_of_squares, wired
from tests.oracle import TOLERANCE, assert_right, projection
from tests.rules.case import Case
from tests.rules.cases import CASES

STEADY = 3  # the first step that relies on what the two before it measured


class Passes(list[tuple[int, int]]):
    """How many calls and nodes were evaluated on the way of each pass, and how many behind it."""

    def of_last(self) -> tuple[int, int]:
        return self[-1] if self else (0, 0)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    seen = Passes()

    class Noted(PrunedPass):
        def run(self, *args: Any, **kwargs: Any) -> None:
            seen.append((len(self._passed), len(self._collected)))
            super().run(*args, **kwargs)

    monkeypatch.setattr(delivery, "PrunedPass", Noted)
    return seen


class Behind(nn.Module):
    """A layer that something trainable lies in front of, so that passes go on through it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones((), dtype=torch.double)), layer

    def forward(self, *inputs: Tensor) -> Tensor:
        scale = self.scale.to(inputs[0].device)
        return self.layer(*[x * scale if x.is_floating_point() else x for x in inputs])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("case", [case for case in CASES if not case.rereads], ids=lambda case: case.name)
def test_every_layer_is_right_on_the_way_of_a_pass(case: Case, device: torch.device) -> None:
    inputs, target = case.batch(4, device)
    model = gradbatch.extend(Behind(case.model(device)).to(device))
    for _ in range(STEADY):
        losses = projection(model(*inputs), target)
        found = gradbatch.backward(model, losses, BatchGrad(), retain_graph=False)[BatchGrad]
    for name, gradients in case.reference(inputs, target).items():
        assert_right(found[f"layer.{name}"], gradients, TOLERANCE[torch.double], name, per_sample=True)


def network() -> nn.Module:
    """Residual layers of several kinds, one used twice, a table of positions and a raw parameter."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.places(torch.arange(5, device=x.device))
        hidden = hidden + self.twice(torch.tanh(self.twice(self.norm(hidden))))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.conv(hidden.mT * self.first.bias[:, None]).flatten(1)

    return wired(
        forward,
        first=nn.Linear(3, 4),
        places=nn.Embedding(5, 4),
        norm=nn.LayerNorm(4),
        twice=nn.Linear(4, 4),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        conv=nn.Conv1d(4, 2, 2),
    )


QUANTITIES = (BatchGrad(), BatchL2Grad())


def test_most_of_a_network_is_evaluated_on_the_way(passes: Passes) -> None:
    model = network()
    for step in range(1, 6):
        x = draw(6, 5, 3)
        results = gradbatch.backward(model, sum_of_squares(model(x)), *QUANTITIES)
        assert_results(results, expected(model, lambda x=x: sum_of_squares(model(x))))
        on_the_way, behind = passes.of_last()
        assert (on_the_way >= 5 and behind <= 3) == (step >= STEADY)


def test_checkpoints_are_evaluated_behind_the_pass(passes: Passes) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=True)

    model = wired(forward, first=nn.Linear(3, 4), inner=inner)
    for _ in range(STEADY + 1):
        x = draw(6, 3)
        results = gradbatch.backward(model, sum_of_squares(model(x)), *QUANTITIES, retain_graph=False)
        # torch's own reference does not run through such a checkpoint.
        assert_results(results, expected(model, lambda x=x: sum_of_squares(model.inner(model.first(x)))))
    assert passes.of_last()[0] == 0


def chain(layers: int) -> nn.Sequential:
    return gradbatch.extend(nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)]).double())


@dataclass(frozen=True)
class Watch(Quantity):
    """Looks, when a parameter is reduced, which operands of those before it are still alive."""

    alive: list[int] = field(default_factory=list, compare=False)
    seen: list[weakref.ref[Tensor]] = field(default_factory=list, compare=False)
    name = "watch"
    operations = ()

    def reduce(self, grad: gradbatch.PerSampleGrad) -> Tensor:
        if hasattr(grad, "left"):
            self.alive.append(sum(reference() is not None for reference in self.seen))
            self.seen.append(weakref.ref(grad.left))
        return grad.sum()


def test_output_gradients_are_let_go_of_once_their_parameters_are_reduced() -> None:
    model = chain(6)
    for _ in range(STEADY):
        watch = Watch()
        gradbatch.backward(model, sum_of_squares(model(draw(4, 3))), watch)
    # The last two: the engine stops in front of the first layer, which is evaluated behind the pass.
    assert len(watch.alive) == 6
    assert max(watch.alive) <= 1


def activations(model: nn.Sequential, x: Tensor) -> tuple[Tensor, list[weakref.ref[Tensor]]]:
    """The losses, and what the graph keeps for the tanh."""
    kept: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(weakref.ref(tensor))
        return tensor

    hidden = model[0](x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = torch.tanh(hidden)
    return sum_of_squares(model[2](hidden)), kept


@pytest.mark.parametrize("keep", [None, True, False])
def test_the_graph_is_freed_on_the_way_only_where_that_is_asked_for(keep: bool | None) -> None:
    model = gradbatch.extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double())
    for _ in range(STEADY):
        losses, kept = activations(model, draw(4, 3))
        gradbatch.backward(model, losses, BatchL2Grad(), retain_graph=keep)
    assert kept
    assert all((reference() is None) == (keep is False) for reference in kept)
    if keep is False:
        with pytest.raises(StaleCapture, match="freed"):
            gradbatch.backward(model, losses, BatchL2Grad())
    else:
        gradbatch.backward(model, losses, BatchL2Grad(), reduction="sum")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_ordinary_gradients_follow_where_the_graph_is_freed(reduction: str) -> None:
    model = network()
    for _ in range(STEADY):
        x = draw(6, 5, 3)
        model.zero_grad()
        losses = sum_of_squares(model(x))
        results = gradbatch.backward(model, losses, *QUANTITIES, reduction=reduction, retain_graph=False)
        for name, parameter in model.named_parameters():
            grad = getattr(results[BatchGrad][name], reduction)(0)
            assert_right(parameter.grad, grad, TOLERANCE[torch.double], name)
    with pytest.raises(StaleCapture, match="freed"):
        gradbatch.backward(model, losses, BatchL2Grad())


@dataclass(frozen=True)
class Fails(Quantity):
    """Fails at one parameter."""

    shape: Sequence[int]
    name = "fails"
    operations = ()

    def reduce(self, grad: gradbatch.PerSampleGrad) -> Tensor:
        if list(grad.shape) == self.shape:
            raise LookupError("on purpose")
        return grad.sum()


@pytest.mark.parametrize("keep", [True, False])
def test_what_fails_on_the_way_is_said_as_behind_it_and_leaves_nothing(keep: bool) -> None:
    model = gradbatch.extend(nn.Sequential(*[nn.Linear(n, n + 1) for n in range(2, 6)]).double())
    fails = Fails([4, 3])
    for _ in range(STEADY + 1):
        losses = sum_of_squares(model(draw(4, 2)))
        with pytest.raises(GradBatchError, match=r"Fails.reduce failed on 1.weight .*on purpose") as caught:
            gradbatch.backward(model, losses, fails, retain_graph=keep)
        assert isinstance(caught.value.__cause__, LookupError)
        assert all(parameter.grad is None for parameter in model.parameters())
    x = draw(4, 2)
    results = gradbatch.backward(model, sum_of_squares(model(x)), *QUANTITIES)
    assert_results(results, expected(model, lambda: sum_of_squares(model(x))))


def test_a_user_hook_that_fails_is_passed_on() -> None:
    model = chain(3)
    for step in range(1, STEADY + 1):
        hidden = model[0](draw(4, 3))
        losses = sum_of_squares(model[2](model[1](hidden)))
        if step == STEADY:
            hidden.register_hook(lambda _: 1 / 0)
            with pytest.raises(GradBatchError, match="division by zero"):
                gradbatch.backward(model, losses, BatchL2Grad())
        else:
            gradbatch.backward(model, losses, BatchL2Grad())


def test_a_parameter_with_less_contributions_than_edges_is_complete_in_the_end() -> None:
    """Of two uses, one lies where no gradient comes: its output is multiplied with nothing."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        used, unused = self.layer(self.first(x)), self.layer(x)
        return torch.stack([used, unused.detach() + 0 * unused.sign()]).sum(0)

    model = wired(forward, first=nn.Linear(3, 3), layer=nn.Linear(3, 3))
    for _ in range(STEADY + 1):
        x = draw(4, 3)
        results = gradbatch.backward(model, sum_of_squares(model(x)), *QUANTITIES, ClippedSum(1.0))
        right = expected(model, lambda x=x: sum_of_squares(model(x)))
        for name, gradients in right.items():
            assert_right(results[BatchGrad][name], gradients, TOLERANCE[torch.double], name)
        norms = sum(g.flatten(1).square().sum(1) for g in right.values()).sqrt()
        assert_right(results[ClippedSum].quantity.norms, norms, TOLERANCE[torch.double])


def test_results_are_in_the_order_of_the_parameters() -> None:
    model = network()
    for _ in range(STEADY):
        results = gradbatch.backward(model, sum_of_squares(model(draw(6, 5, 3))), *QUANTITIES)
    assert list(results[BatchGrad]) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_call_with_several_places_is_evaluated_although_the_pass_frees_the_graph(kind: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        output, state = self.recurrent(self.first(x))
        state = state[1] if kind == "LSTM" else state
        return torch.tanh(output).sum((0, 2)) + state.sum((0, 2))

    recurrent = (nn.LSTM if kind == "LSTM" else nn.GRU)(4, 4, num_layers=2)
    model = wired(forward, first=nn.Linear(3, 4), recurrent=recurrent)
    for _ in range(STEADY + 1):
        x = draw(3, 5, 3)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        assert_results(
            gradbatch.backward(model, losses(), BatchGrad(), retain_graph=False), expected(model, losses)
        )
