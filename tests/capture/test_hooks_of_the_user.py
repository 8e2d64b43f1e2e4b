"""Hooks that are not ours: what they do to outputs and gradients is part of the model."""

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, CoupledSamples
from tests.capture.reference import (
    assert_refused,
    assert_right_both_ways,
    draw,
    perceptron,
    refusal_of,
    sum_of_squares,
    wired,
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "hook",
    [
        lambda layer: layer.register_forward_hook(lambda module, args, out: out * 2 + 1),
        lambda layer: layer.register_forward_hook(lambda module, args, out: out.mul_(3.0)),
        lambda layer: layer.register_forward_hook(lambda module, args, out: out.detach() + out),
        lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda layer: layer.register_forward_pre_hook(
            lambda module, args, kwargs: ((), {"input": args[0] * 2}), with_kwargs=True
        ),
        lambda layer: layer.register_full_backward_hook(lambda module, into, out: None),
        lambda layer: layer.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,)),
    ],
    ids=["replace", "in_place", "detach", "pre", "kwargs", "full_backward", "full_backward_pre"],
)
def test_module_hooks_registered_before_or_after_extend_are_part_of_the_model(hook, when: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    if when == "before":
        hook(model[2])
    gradbatch.extend(model)
    if when == "after":
        hook(model[2])
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_full_backward_hook_that_scales_the_gradient_is_right() -> None:
    model, x = perceptron(), draw(4, 3)
    model[2].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 2,))
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_forward_hook_put_before_ours_is_right_before_and_after_extending_again() -> None:
    model, x = perceptron(), draw(4, 3)
    model[0].register_forward_hook(lambda module, args, output: output * 2, prepend=True)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    gradbatch.extend(model)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_global_forward_hooks_are_right_while_they_are_there_and_afterwards() -> None:
    model, x = perceptron(), draw(4, 3)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    finally:
        handle.remove()
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def tensor_hooked(hook) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.register_hook(hook)
        return self.second(hidden)

    return wired(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2))


@pytest.mark.parametrize(
    "hook",
    [
        lambda grad: None,
        lambda grad: grad * 2,
        lambda grad: -grad,
        lambda grad: grad * torch.arange(4.0).view(4, 1),
    ],
    ids=["none", "double", "reversed", "by_sample"],
)
def test_tensor_hooks_that_are_linear_are_right(hook) -> None:
    model, x = tensor_hooked(hook), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize(
    "hook",
    [lambda grad: grad.clamp(-0.01, 0.01), lambda grad: grad / grad.norm(), lambda grad: grad.sign()],
    ids=["clamp", "normalise", "sign"],
)
def test_tensor_hooks_that_are_not_linear_are_refused(hook) -> None:
    model, x = tensor_hooked(hook), draw(4, 3)
    assert_refused(model, lambda: sum_of_squares(model(x)), CoupledSamples, "first")


def triple_grad(parameter: Tensor) -> None:
    parameter.grad.mul_(3.0)


def test_the_users_hooks_on_parameters_change_only_what_arrives_in_grad() -> None:
    model, x = perceptron(), draw(4, 3)
    plain = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[0].bias.register_post_accumulate_grad_hook(triple_grad)
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
        sum_of_squares(model(x)).sum().backward()
    found = gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad())
    for name, gradient in plain.items():
        torch.testing.assert_close(results[BatchGrad][name], gradient)
        torch.testing.assert_close(found[BatchGrad][name], gradient)
    torch.testing.assert_close(model[0].weight.grad, 2 * plain["0.weight"].sum(0))
    torch.testing.assert_close(model[0].bias.grad, 3 * plain["0.bias"].sum(0))


def test_the_users_hooks_on_parameters_stay_where_they_were() -> None:
    model, x, order = perceptron(), draw(4, 3), []
    for number in range(3):
        model[0].weight.register_hook(lambda grad, number=number: order.append(number))
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
        sum_of_squares(model(x)).sum().backward()
    sum_of_squares(model(x)).sum().backward()
    assert order == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("where", ["layer output", "layer input"])
@pytest.mark.parametrize("way", ["compute", "backward", "backward and grad"])
def test_retained_gradients_of_inputs_and_outputs_of_layers_are_the_users_alone(way: str, where: str) -> None:
    kept = {}

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if where != "layer output":
            hidden = torch.tanh(hidden)
        hidden.retain_grad()
        kept["hidden"] = hidden
        return self.second(hidden)

    model, x = wired(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2)), draw(4, 3)
    sum_of_squares(model(x)).sum().backward()
    right = kept["hidden"].grad
    if way == "compute":
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            sum_of_squares(model(x)).sum().backward()
    else:
        reduction = "sum" if way == "backward and grad" else None
        gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), reduction=reduction)
    if way == "backward":
        assert kept["hidden"].grad is None
    else:
        torch.testing.assert_close(kept["hidden"].grad, right)


@pytest.mark.parametrize("method", ["register_prehook", "register_hook"])
def test_hooks_on_graph_nodes_that_change_gradients_are_right_or_refused(method: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.first(x)
        double = lambda grads, *_: tuple(None if g is None else 2 * g for g in grads)  # noqa: E731
        getattr(hidden.grad_fn, method)(double)
        return self.second(hidden)

    model, x = wired(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2)), draw(4, 3)
    refusal = refusal_of(lambda: assert_right_both_ways(model, lambda: sum_of_squares(model(x))))
    assert refusal is None or "first" in refusal
