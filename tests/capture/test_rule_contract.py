"""What a user's layer rule may hand back, and what the capture makes of layers that users taught."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import Dense, OuterProduct, RuleError
from gradbatch.rules import registry
from tests.capture.reference import (
    WAYS,
    assert_refused,
    assert_right_both_ways,
    draw,
    expected,
    refusal_of,
    sum_of_squares,
    wired,
)


class Affine(nn.Module):
    """``y = s * x + b`` on the last axis, with an optional second input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, input: Tensor, extra: Tensor | None = None) -> Tensor:
        result = input * self.scale + self.shift
        return result if extra is None else result * extra


def affine(call: gradbatch.Call) -> Iterator[tuple[str, gradbatch.PerSampleGrad]]:
    grad, extra = call.grad_output, call.arguments["extra"]
    if extra is not None:
        grad = grad * call.sample_first(extra)
    between = tuple(range(1, grad.dim() - 1))
    product = grad * call.input
    yield "scale", Dense(product.sum(between) if between else product)
    yield "shift", Dense(grad.sum(between) if between else grad)


def in_place(what: str) -> Callable[[gradbatch.Call], Iterator[tuple[str, gradbatch.PerSampleGrad]]]:
    """A rule that is right but for that it changes what it is handed."""

    def rule(call: gradbatch.Call) -> Iterator[tuple[str, gradbatch.PerSampleGrad]]:
        yield from affine(call)
        getattr(call, what).mul_(2)

    return rule


@pytest.fixture
def teach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    def register(rule, *types, **options) -> None:
        gradbatch.layer_rule(*types, **options)(rule)

    return register


def model_of(forward=lambda self, x: torch.tanh(self.own(x))) -> nn.Module:
    return wired(forward, own=Affine())


def test_a_taught_layer_is_right_on_any_axis(teach) -> None:
    teach(affine, Affine, feature_axes=1)
    model, x = model_of(), draw(3, 3, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    model = model_of(lambda self, x: torch.tanh(self.own(x.transpose(0, 1))).transpose(0, 1))
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_without_feature_axes_the_samples_are_right_on_axis_0_and_elsewhere(teach) -> None:
    teach(affine, Affine)
    model, x = model_of(), draw(3, 3, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    rows = model_of(lambda self, x: torch.tanh(self.own(x.flatten(0, 1))).view_as(x))
    assert_right_both_ways(rows, lambda: sum_of_squares(rows(x)))
    columns = model_of(
        lambda self, x: torch.tanh(self.own(x.transpose(0, 1).flatten(0, 1))).view(3, 3, 3).transpose(0, 1)
    )
    assert_right_both_ways(columns, lambda: sum_of_squares(columns(x)))
    swapped = model_of(lambda self, x: torch.tanh(self.own(x.transpose(0, 1))).transpose(0, 1))
    assert_right_both_ways(swapped, lambda: sum_of_squares(swapped(x)))


@pytest.mark.parametrize("keyword", [False, True])
def test_an_optional_second_input_reaches_the_rule_by_name(teach, keyword: bool) -> None:
    teach(affine, Affine, feature_axes=1)
    model = model_of(
        lambda self, x: (
            self.own(x, extra=x.exp()) * self.own(x) if keyword else self.own(x, x.exp()) * self.own(input=x)
        )
    )
    x = draw(4, 5, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("left_out", ["by selection", "frozen", "unfrozen later"])
def test_a_rule_may_yield_more_than_is_wanted(teach, left_out: str, way: str) -> None:
    teach(affine, Affine, feature_axes=1)
    model, x = model_of(), draw(4, 3)
    right = expected(model, lambda: sum_of_squares(model(x)))["own.scale"]
    if left_out != "by selection":
        model.own.shift.requires_grad_(False)
    parameters = "own.scale" if left_out == "by selection" else None
    if way == "backward":
        losses = sum_of_squares(model(x))
        model.own.shift.requires_grad_(left_out != "frozen")
        results = gradbatch.backward(model, losses, gradbatch.BatchGrad(), parameters=parameters)
    else:
        with gradbatch.compute(
            model, gradbatch.BatchGrad(), loss_reduction="sum", parameters=parameters
        ) as results:
            sum_of_squares(model(x)).sum().backward()
    torch.testing.assert_close(results[gradbatch.BatchGrad]["own.scale"], right)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda call: iter([("scale", Dense(call.grad_output))]), r"yields nothing for \['shift'\]"),
        (lambda call: iter([("weight", Dense(call.grad_output))]), "yields 'weight', which is no parameter"),
        (lambda call: iter([("scale", call.grad_output)]), "yields a Tensor for 'scale'"),
        (lambda call: iter([("scale", Dense(call.grad_output[:1]))]), r"shape \(1, 3\).*expected \(4, 3\)"),
        (
            lambda call: iter([("scale", Dense(call.grad_output[:, :1]))]),
            r"shape \(4, 1\).*expected \(4, 3\)",
        ),
        (lambda call: iter([("scale", Dense(call.grad_output.sum()))]), "own"),
        (
            lambda call: iter(
                [("scale", OuterProduct(call.grad_output, call.input, call.module.scale.shape))]
            ),
            "own",
        ),
        (lambda call: 1 / 0, "own.*failed on an output gradient of shape.*division by zero"),
        (lambda call: iter(()), "yields nothing"),
        (
            lambda call: iter(
                [("scale", Dense(call.grad_output))] * 2 + [("shift", Dense(call.grad_output))]
            ),
            "own",
        ),
        (lambda call: {"scale": Dense(call.grad_output)}, r"Affine \(at own\): it yields 'scale', not pairs"),
        (lambda call: None, r"Affine \(at own\): it returns nothing; let it yield pairs"),
        (lambda call: Dense(call.grad_output), r"Affine \(at own\): it returns a Dense; let it yield pairs"),
        (in_place("input"), r"Affine \(at own\) changes an argument or an output gradient in place"),
        (in_place("grad_output"), r"Affine \(at own\) changes an argument or an output gradient in place"),
    ],
    ids=[
        "missing",
        "unknown",
        "tensor",
        "samples",
        "shape",
        "scalar",
        "operands",
        "exception",
        "nothing",
        "twice",
        "dictionary",
        "no return",
        "one",
        "argument in place",
        "gradient in place",
    ],
)
def test_a_rule_that_hands_back_nonsense_is_refused_by_name(teach, rule, message: str) -> None:
    teach(rule, Affine, feature_axes=1)
    model, x = model_of(), draw(4, 3)
    assert_refused(model, lambda: sum_of_squares(model(x)), RuleError, message)


def test_running_out_of_memory_in_a_rule_stays_what_it_is(teach) -> None:
    def rule(call: gradbatch.Call) -> None:
        raise torch.OutOfMemoryError("no room")

    teach(rule, Affine, feature_axes=1)
    model = model_of()
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(draw(4, 3))))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input * self.scale, input.exp() * self.scale


def two_outputs(call: gradbatch.Call) -> Iterator[tuple[str, gradbatch.PerSampleGrad]]:
    one, other = call.grad_output
    yield "scale", Dense(one * call.input + other * call.input.exp())


@pytest.mark.parametrize("read", ["both", "first", "second", "neither"])
def test_a_taught_layer_with_two_outputs_is_right_whichever_is_read(teach, read: str) -> None:
    teach(two_outputs, TwoOutputs)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        one, other = self.own(self.before(x))
        return {"both": one * other, "first": one, "second": other, "neither": self.before(x)}[read]

    model, x = wired(forward, own=TwoOutputs(), before=nn.Linear(3, 3)), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


class Halves(nn.Module):
    """Returns two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        return tuple((input * self.scale).split(2, -1))


@pytest.mark.parametrize("change", ["none", "drop", "in place"])
def test_outputs_that_are_views_of_one_tensor_are_right_or_refused(teach, change: str) -> None:
    @gradbatch.layer_rule(Halves)
    def halves(call: gradbatch.Call) -> Iterator[tuple[str, gradbatch.PerSampleGrad]]:
        yield "scale", Dense(torch.cat(call.grad_output, -1) * call.input)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        one, other = self.own(x)
        if change == "drop":
            return torch.tanh(other)
        return one * (other.clone().mul_(2.0) if change == "in place" else other)

    model, x = wired(forward, own=Halves()), draw(3, 4)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


class Block(nn.Module):
    """A taught layer that contains other layers, and hands its own parameter to one of them."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.scale, self.inner, self.nested = nn.Parameter(torch.randn(3)), nn.Linear(3, 3), nested

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input * self.scale) if self.nested else self.inner(input) * self.scale


@pytest.mark.parametrize("nested", [False, True])
def test_a_taught_layer_with_layers_inside_accounts_for_its_own_parameters_only(teach, nested: bool) -> None:
    def block(call: gradbatch.Call) -> Iterator[tuple[str, gradbatch.PerSampleGrad]]:
        inner = call.module.inner
        if nested:
            yield "scale", Dense((call.grad_output @ inner.weight.detach()) * call.input)
        else:
            yield "scale", Dense(call.grad_output * inner(call.input).detach())

    teach(block, Block)
    model, x = wired(lambda self, x: torch.tanh(self.own(x)), own=Block(nested)), draw(4, 3)
    refusal = refusal_of(lambda: assert_right_both_ways(model, lambda: sum_of_squares(model(x))))
    assert refusal is None or "own" in refusal


class Recurring(nn.Module):
    """Calls itself: its outer call contains its inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, input: Tensor, depth: int = 1) -> Tensor:
        inner = self(input, depth - 1) if depth else input
        return inner * self.scale


def test_nested_calls_do_not_count_twice(teach) -> None:
    teach(lambda call: iter([("scale", Dense(call.grad_output * call.input))]), Recurring)
    model, x = wired(lambda self, x: torch.tanh(self.own(x)), own=Recurring()), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


class InDisguise(nn.Module):
    """Takes its tensor in an object of its own, or returns one."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.scale, self.where = nn.Parameter(torch.randn(3)), where

    def forward(self, box: object) -> object:
        result = (box[0] if self.where == "input" else box) * self.scale  # type: ignore[index]
        return {"input": result, "dict": {"y": result}, "nested": ((result,),), "twice": (result, result)}[
            self.where
        ]


class Box:
    def __init__(self, content: Tensor) -> None:
        self.content = content

    def __getitem__(self, index: int) -> Tensor:
        return self.content


@pytest.mark.parametrize("where", ["input", "dict", "nested", "twice"])
def test_tensors_in_disguise_are_right(teach, where: str) -> None:
    def in_disguise(call: gradbatch.Call) -> Iterator[tuple[str, gradbatch.PerSampleGrad]]:
        grads = call.grad_output if isinstance(call.grad_output, tuple) else (call.grad_output,)
        yield "scale", Dense(sum(grads) * call.input)

    teach(in_disguise, InDisguise)
    pick = {
        "input": lambda y: y,
        "dict": lambda y: y["y"],
        "nested": lambda y: y[0][0],
        "twice": lambda y: y[0] + y[1],
    }
    model = wired(
        lambda self, x: pick[where](self.own(Box(x) if where == "input" else x)), own=InDisguise(where)
    )
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
