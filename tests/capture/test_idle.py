"""An extended model that nobody asks anything of: the same numbers, the same state, nothing kept alive."""

import contextlib
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad
from tests.capture.reference import WAYS, assert_right_both_ways, draw, perceptron, sum_of_squares, wired


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    )


def trained(extended: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = network()
    if extended:
        gradbatch.extend(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 4, 4)).square().sum().backward()
        optimizer.step()
    return {**model.state_dict(), "random": torch.rand(3)}


def test_training_an_extended_model_gives_the_same_numbers_bit_for_bit() -> None:
    plain, extended = trained(False), trained(True)
    assert plain.keys() == extended.keys()
    for name, value in plain.items():
        assert torch.equal(value, extended[name]), name


@pytest.mark.parametrize("way", WAYS)
def test_asking_draws_no_random_numbers_and_changes_no_state(way: str) -> None:
    model = gradbatch.extend(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.LayerNorm(8)).double())
    x = draw(4, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    sum_of_squares(model(x)).sum()
    plain = torch.rand(4)
    torch.manual_seed(3)
    WAYS[way](model, lambda: sum_of_squares(model(x)))
    assert torch.equal(torch.rand(4), plain)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_grad_is_bit_for_bit_what_a_plain_backward_gives(way: str) -> None:
    model, x = perceptron(torch.float32), draw(5, 3, dtype=torch.float32)
    sum_of_squares(model(x)).mean().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if way == "backward":
        gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), reduction="mean")
    else:
        WAYS[way](model, lambda: sum_of_squares(model(x)))
    assert all(torch.equal(p.grad, plain[name]) for name, p in model.named_parameters())


def test_extending_keeps_object_class_parameters_and_state_and_retracting_undoes_it() -> None:
    model = network()
    before = (type(model), [id(p) for p in model.parameters()], list(model.state_dict()), set(vars(model)))
    assert gradbatch.extend(model) is model
    after = (type(model), [id(p) for p in model.parameters()], list(model.state_dict()), set(vars(model)))
    assert before == after
    assert gradbatch.extend(model) is model
    assert all(len(module._forward_hooks) <= 1 for module in model.modules())
    assert gradbatch.retract(model) is model
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert not any(module._forward_hooks_with_kwargs for module in model.modules())


@pytest.mark.parametrize("way", [*WAYS, "abandoned", "refused"])
def test_no_activation_outlives_a_step_not_even_until_the_garbage_collector_runs(way: str) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.first(x)
        alive.append(weakref.ref(hidden))
        result = self.second(torch.tanh(hidden))
        alive.append(weakref.ref(result))
        return result * self.second.bias if way == "refused" else result

    model = wired(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2))

    def step() -> None:
        x = draw(4, 3).requires_grad_()
        alive.append(weakref.ref(x))
        if way == "abandoned":
            model(x)
        elif way == "refused":
            losses = sum_of_squares(model(x))
            try:
                gradbatch.per_sample_grads(model, losses)
            except gradbatch.UnsupportedLayer as refusal:
                refusal.__traceback__ = None
        elif way == "backward":
            gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), reduction="mean")
        else:
            WAYS[way](model, lambda: sum_of_squares(model(x)))

    gc.collect()
    gc.disable()
    try:
        step()
        assert [reference() is None for reference in alive] == [True] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("way", WAYS)
def test_inputs_are_let_go_while_the_loss_lives_once_the_backward_is_done(way: str) -> None:
    model = perceptron()
    x = draw(4, 3)
    reference = weakref.ref(x)
    if way == "backward":
        losses = sum_of_squares(model(x))
        gradbatch.backward(model, losses, BatchGrad(), reduction="sum")
    else:
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            losses = sum_of_squares(model(x))
            losses.sum().backward()
    storage = weakref.ref(x.untyped_storage())
    del x
    gc.collect()
    assert reference() is None and losses.grad_fn is not None
    assert storage() is None


@pytest.mark.parametrize("way", WAYS)
def test_nothing_grows_over_steps(way: str) -> None:
    model, x = perceptron(), draw(4, 3)
    counts = []
    for _ in range(6):
        WAYS[way](model, lambda: sum_of_squares(model(x)))
        model(x)
        gc.collect()
        # Not isinstance: it asks the object, and some of torch's answer with a warning.
        counts.append(sum(issubclass(type(o), (Tensor, gradbatch.PerSampleGrad)) for o in gc.get_objects()))
    assert counts[-1] <= counts[2]
    assert not any(p._backward_hooks for p in model.parameters())
    assert [type(hook).__name__ for hook in model._forward_hooks.values()] == ["ForwardRecorder"]


def test_an_abandoned_context_watches_no_longer() -> None:
    model, x = perceptron(), draw(4, 3)
    with (
        contextlib.suppress(KeyError),
        gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
    ):
        model(x)
        raise KeyError
    assert not any(p._backward_hooks for p in model.parameters())
    assert [type(hook).__name__ for hook in model._forward_hooks.values()] == ["ForwardRecorder"]
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_chain_of_3000_layers_is_right() -> None:
    model = gradbatch.extend(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3000))).double())
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(2))
    x = draw(3, 2)
    found = gradbatch.per_sample_grads(model, model(x).sum(1))
    for number in (0, 1, 1499, 2999):
        torch.testing.assert_close(found[f"{number}.weight"], x.unsqueeze(1).expand(3, 2, 2))


DEEP = """
import torch, gradbatch
layer = gradbatch.extend(torch.nn.Linear(2, 2))
x = torch.zeros(1, 2)
for _ in range(30000):
    x = layer(x)
del x
"""


def test_a_very_deep_graph_is_let_go_of_without_a_crash() -> None:
    # In a process of its own: what can go wrong here is the stack of the interpreter.
    subprocess.run([sys.executable, "-c", DEEP], check=True, timeout=120)
