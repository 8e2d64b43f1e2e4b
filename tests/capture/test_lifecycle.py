"""What happens to a model between two calls of ours, copies, exceptions, optimizer steps: nothing goes stale."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, CoupledSamples, GradBatchError, StaleCapture
from tests.capture.reference import (
    QUANTITIES,
    WAYS,
    assert_results,
    assert_right_both_ways,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    watched,
    wired,
)

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(saved(model), weights_only=False),
}


def saved(model: nn.Module) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_extended_too_and_independent(how: str) -> None:
    model, x = perceptron(), draw(4, 3)
    copied = COPIES[how](model)
    with torch.no_grad():
        copied[0].weight.mul_(2.0)
    for each in (model, copied):
        assert_right_both_ways(each, lambda each=each: sum_of_squares(each(x)))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_between_forward_and_backward_disturbs_neither(how: str) -> None:
    model, x = perceptron(), draw(4, 3)
    losses = sum_of_squares(model(x))
    copied = COPIES[how](model)
    assert_results(gradbatch.backward(model, losses, *QUANTITIES), expected(model, lambda: losses))
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        losses = sum_of_squares(model(x))
        within = COPIES[how](model)
        losses.sum().backward()
    assert_results(results, expected(model, lambda: sum_of_squares(model(x))))
    for each in (copied, within):
        assert_right_both_ways(each, lambda each=each: sum_of_squares(each(x)))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_loaded_after_extending_is_what_gradients_are_taken_of(assign: bool) -> None:
    model, other, x = perceptron(), perceptron(), draw(4, 3)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_loaded_between_forward_and_backward_is_noticed(way: str, assign: bool) -> None:
    model, other, x = perceptron(), perceptron(), draw(4, 3)

    def losses() -> Tensor:
        result = sum_of_squares(model(x))
        model.load_state_dict(other.state_dict(), assign=assign)
        return result

    # Where values are changed in place, torch's own check is the first to see it.
    with pytest.raises(GradBatchError if assign else RuntimeError) as raised:
        WAYS[way](model, losses)
    if assign:
        assert type(raised.value) is StaleCapture
        assert "was replaced" in str(raised.value)


def test_parameters_replaced_after_extending_are_the_ones_that_count() -> None:
    model, x = perceptron(), draw(4, 3)
    model[0].weight = nn.Parameter(draw(4, 3))
    model[2] = gradbatch.extend(nn.Linear(4, 3).double())
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_parameters_unfrozen_after_extending_count() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().requires_grad_(False)
    model[2].requires_grad_(True)
    gradbatch.extend(model)
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    model.requires_grad_(True)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    model[2].requires_grad_(False)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_parameter_unfrozen_between_forward_and_backward_has_the_zero_gradient_that_torch_gives_it() -> (
    None
):
    model, x = perceptron(), draw(4, 3)
    model[0].weight.requires_grad_(False)
    losses = sum_of_squares(model(x))
    model[0].weight.requires_grad_(True)
    assert_results(gradbatch.backward(model, losses, *QUANTITIES), expected(model, lambda: losses))


def test_a_parameter_added_to_a_layer_after_extending_is_right_where_it_is_used() -> None:
    model, x = perceptron(), draw(4, 3)
    model[0].register_parameter("gain", nn.Parameter(draw(4)))
    model[0].register_forward_hook(lambda module, args, output: output * module.gain)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("where", ["model", "layer", "loss"])
@pytest.mark.parametrize("way", WAYS)
def test_after_an_exception_the_next_step_is_right(way: str, where: str) -> None:
    fail = {"model": False, "layer": False, "loss": False}

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.first(x)
        if fail["model"]:
            raise KeyError("a bad sample")
        return self.second(x[:, :3] if fail["layer"] else x)

    def losses() -> Tensor:
        result = sum_of_squares(model(x))
        if fail["loss"]:
            raise KeyError("a bad sample")
        return result

    model, x = wired(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2)), draw(4, 3)
    right = expected(model, losses)
    for _ in range(2):
        fail[where] = True
        with pytest.raises((KeyError, RuntimeError)):
            WAYS[way](model, losses)
        fail[where] = False
        assert_results(WAYS[way](model, losses), right)
    assert [type(hook).__name__ for hook in model._forward_hooks.values()] == ["ForwardRecorder"]


def test_a_refusal_leaves_grad_as_it_was() -> None:
    model = wired(lambda self, x: (y := self.layer(x)) - y.mean(0), layer=nn.Linear(3, 2))
    x = draw(4, 3)
    model.layer.weight.grad = torch.full_like(model.layer.weight, 7.0)
    with pytest.raises(CoupledSamples):
        gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), reduction="mean")
    assert model.layer.weight.grad.eq(7.0).all() and model.layer.bias.grad is None


def test_training_for_several_steps_is_right_at_every_step() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        x = draw(3 + step, 3)
        right = expected(model, lambda x=x: sum_of_squares(model(x)))
        optimizer.zero_grad()
        if step % 2:
            results = gradbatch.backward(model, sum_of_squares(model(x)), *QUANTITIES, reduction="mean")
        else:
            with gradbatch.compute(model, *QUANTITIES, loss_reduction="mean") as results:
                sum_of_squares(model(x)).mean().backward()
        assert_results(results, right)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, right[name].mean(0))
        optimizer.step()


def test_forwards_without_a_backward_leave_nothing_behind() -> None:
    model, x = perceptron(), draw(4, 3)
    abandoned = [model(draw(7, 3)) for _ in range(3)]
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    assert len(abandoned) == 3


def test_a_freed_graph_is_refused_and_a_kept_one_is_right() -> None:
    model, x = perceptron(), draw(4, 3)
    losses = sum_of_squares(model(x))
    losses.sum().backward(retain_graph=True)
    right = expected(model, lambda: losses)
    assert_results(gradbatch.backward(model, losses, *QUANTITIES), right)
    assert_results(gradbatch.backward(model, losses, *QUANTITIES, reduction="sum", retain_graph=True), right)
    assert_results(gradbatch.backward(model, losses, *QUANTITIES, reduction="sum"), right)
    with pytest.raises(StaleCapture, match=r"freed.*retain_graph"):
        gradbatch.backward(model, losses, *QUANTITIES)


def test_models_used_by_turns_do_not_disturb_each_other() -> None:
    one, two, x = perceptron(), perceptron(), draw(4, 3)
    with (
        gradbatch.compute(one, *QUANTITIES, loss_reduction="sum") as first,
        gradbatch.compute(two, *QUANTITIES, loss_reduction="sum") as second,
    ):
        sum_of_squares(two(x)).sum().backward()
        sum_of_squares(one(x)).sum().backward()
    assert_results(first, expected(one, lambda: sum_of_squares(one(x))))
    assert_results(second, expected(two, lambda: sum_of_squares(two(x))))


def test_a_part_of_a_model_is_a_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), perceptron_of_four(), nn.Linear(2, 2)).double()
    part = gradbatch.extend(model[1])
    x = draw(5, 3)
    assert_results(
        gradbatch.backward(part, sum_of_squares(model(x)), *QUANTITIES),
        expected(part, lambda: sum_of_squares(model(x))),
    )
    with gradbatch.compute(part, *QUANTITIES, loss_reduction="sum") as results:
        sum_of_squares(model(x)).sum().backward()
    assert_results(results, expected(part, lambda: sum_of_squares(model(x))))


def perceptron_of_four() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_lazy_layers_count_once_they_have_a_shape() -> None:
    model = gradbatch.extend(nn.Sequential(nn.LazyConv2d(3, 2), nn.Flatten(), nn.LazyLinear(2)).double())
    x = draw(4, 2, 4, 4)
    model(x)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_two_models_joined_by_one_loss_are_right_in_contexts_of_their_own() -> None:
    first, second, x = perceptron(), gradbatch.extend(nn.Linear(2, 3)).double(), draw(4, 3)
    losses = lambda: sum_of_squares(second(first(x)))  # noqa: E731
    with (
        gradbatch.compute(first, *QUANTITIES, loss_reduction="mean") as of_first,
        gradbatch.compute(second, *QUANTITIES, loss_reduction="mean") as of_second,
    ):
        losses().mean().backward()
    assert_results(of_first, expected(first, losses))
    assert_results(of_second, expected(second, losses))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_keyword_arguments_and_a_dictionary_of_outputs_are_right(reduction: str) -> None:
    def forward(self: nn.Module, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor | int]:
        hidden = x if mask is None else x * mask
        return {"logits": self.one(hidden), "value": self.other(hidden).squeeze(1), "rows": len(x)}

    model, x, mask = wired(forward, one=nn.Linear(3, 2), other=nn.Linear(3, 1)), draw(4, 3), draw(4, 3)

    def losses() -> Tensor:
        outputs = model(x=x, mask=mask)
        return sum_of_squares(outputs["logits"]) + outputs["value"].sin()

    right = expected(model, losses)
    assert_results(watched(model, losses, reduction), right)
    assert_results(WAYS["backward"](model, losses), right)
