"""Several forwards and backwards in one ``compute``: what adds, what concatenates, what does not count."""

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchDotGrad, BatchGrad, CoupledSamples, UnsupportedLayer, UsageError
from tests.capture.reference import (
    QUANTITIES,
    assert_results,
    assert_right_both_ways,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    watched,
    wired,
)


def joined(*parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture
def model() -> nn.Module:
    return perceptron()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 2), (4, 0, 1), (1, 1, 1, 1)])
def test_micro_batches_concatenate(model: nn.Module, sizes: tuple[int, ...], reduction: str) -> None:
    batches = [draw(size, 3) for size in sizes]
    with gradbatch.compute(model, *QUANTITIES, loss_reduction=reduction) as results:
        for x in batches:
            losses = sum_of_squares(model(x))
            # The mean of an empty batch is NaN times nothing; its sum is what a training script would use.
            (losses.mean() if reduction == "mean" and len(x) else losses.sum()).backward()
    assert_results(results, joined(*(expected(model, lambda x=x: sum_of_squares(model(x))) for x in batches)))
    whole = watched(model, lambda: sum_of_squares(model(torch.cat(batches))), "sum")
    torch.testing.assert_close(results[BatchDotGrad].total(), whole[BatchDotGrad].total())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_the_backwards_in_either_order_keep_the_order_of_the_forwards(model, order) -> None:
    batches = [draw(3, 3), draw(2, 3)]
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        losses = [sum_of_squares(model(x)).sum() for x in batches]
        for number in order:
            losses[number].backward()
    assert_results(results, joined(*(expected(model, lambda x=x: sum_of_squares(model(x))) for x in batches)))


@pytest.mark.parametrize("times", [2, 3])
def test_backwards_over_one_forward_add(model: nn.Module, times: int) -> None:
    x = draw(4, 3)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="mean") as results:
        loss = sum_of_squares(model(x)).mean()
        for _ in range(times):
            loss.backward(retain_graph=True)
    assert_results(
        results, {name: times * g for name, g in expected(model, lambda: sum_of_squares(model(x))).items()}
    )


def test_different_losses_of_one_forward_add(model: nn.Module) -> None:
    x = draw(4, 3)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        output = model(x)
        output[:, 0].sum().backward(retain_graph=True)
        output[:, 1].exp().sum().backward()
    assert_results(results, expected(model, lambda: (y := model(x))[:, 0] + y[:, 1].exp()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_forwards_joined_by_one_loss_share_their_samples(model: nn.Module, reduction: str) -> None:
    x, z = draw(4, 3), draw(4, 3)
    losses = lambda: (model(x) * model(z)).sum(1) + sum_of_squares(model(x))  # noqa: E731
    assert_results(watched(model, losses, reduction), expected(model, losses))


def test_a_forward_on_the_result_of_a_forward_counts_each_call_once() -> None:
    model = wired(lambda self, x: torch.tanh(self.layer(x)), layer=nn.Linear(3, 3))
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(model(x))))
    assert_right_both_ways(model, lambda: sum_of_squares(model(model(model(x)))) + sum_of_squares(model(x)))


def test_a_forward_in_steps_whose_losses_are_backpropagated_separately_adds() -> None:
    model = wired(lambda self, x: torch.tanh(self.layer(x)), layer=nn.Linear(3, 3))
    x = draw(4, 3)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        first = model(x)
        second = model(first)
        first.sum().backward(retain_graph=True)
        sum_of_squares(second).sum().backward()
    assert_results(results, expected(model, lambda: (y := model(x)).sum(1) + sum_of_squares(model(y))))


def test_forwards_of_different_sizes_in_one_loss_are_refused(model: nn.Module) -> None:
    with (
        pytest.raises(UsageError, match=r"\[4, 2\] samples"),
        gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
    ):
        (model(draw(4, 3)).sum() + model(draw(2, 3)).sum()).backward()


def test_gradient_accumulation_over_contexts_leaves_grad_as_always(model: nn.Module) -> None:
    batches = [draw(3, 3), draw(2, 3)]
    for x in batches:
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
            sum_of_squares(model(x)).sum().backward()
        assert_results(results, expected(model, lambda x=x: sum_of_squares(model(x))))
    whole = expected(model, lambda: sum_of_squares(model(torch.cat(batches))))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].sum(0))


def test_forwards_without_gradients_or_backward_do_not_count(model: nn.Module) -> None:
    x = draw(4, 3)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        with torch.no_grad():
            model(draw(2, 3))
        with torch.inference_mode():
            model(draw(2, 3))
        model(draw(5, 3))
        sum_of_squares(model(x)).sum().backward()
        model(draw(5, 3))
    assert_results(results, expected(model, lambda: sum_of_squares(model(x))))


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_saliency_map_does_not_count(model: nn.Module, order: str) -> None:
    x = draw(4, 3).requires_grad_()
    right = expected(model, lambda: sum_of_squares(model(x)))
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        loss = sum_of_squares(model(x)).sum()
        if order == "before":
            torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
        else:
            loss.backward(retain_graph=True)
            torch.autograd.grad(loss, x)
        torch.autograd.grad(model(x).sum(), x)
    assert_results(results, right)


def test_gradients_of_parameters_by_autograd_grad_count(model: nn.Module) -> None:
    x = draw(4, 3)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        torch.autograd.grad(sum_of_squares(model(x)).sum(), [*model.parameters()])
    assert_results(results, expected(model, lambda: sum_of_squares(model(x))))


@pytest.mark.parametrize("kept", [[0], [1], [2], [3], [0, 1], [2, 3], [0, 2], [1, 2, 3], [0, 1, 2]])
def test_a_backward_restricted_to_some_parameters_is_refused(model: nn.Module, kept: list[int]) -> None:
    parameters = [*model.parameters()]
    with (
        pytest.raises(UsageError, match=r"restricted.*left out"),
        gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
    ):
        sum_of_squares(model(draw(4, 3))).sum().backward(inputs=[parameters[i] for i in kept])


def test_a_restricted_backward_is_right_where_only_those_parameters_are_asked_for(model: nn.Module) -> None:
    x = draw(4, 3)
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum", parameters="2.*") as results:
        sum_of_squares(model(x)).sum().backward(inputs=[*model[2].parameters()])
    right = expected(model, lambda: sum_of_squares(model(x)))
    assert_results(results, {name: right[name] for name in ("2.weight", "2.bias")})


@pytest.mark.parametrize("strength", [1.0, 1e-6, -1e-9])
@pytest.mark.parametrize("together", [True, False])
def test_weight_decay_in_the_loss_is_refused_by_the_parameters_name(
    model, strength: float, together: bool
) -> None:
    def step() -> None:
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            loss, penalty = model(draw(4, 3)).sum(), strength * model[0].weight.square().sum()
            if together:
                (loss + penalty).backward()
            else:
                loss.backward()
                penalty.backward()

    with pytest.raises(UnsupportedLayer, match=r"0\.weight"):
        step()


def test_weight_decay_of_an_unused_parameter_is_refused() -> None:
    model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2), unused=nn.Linear(2, 2))
    with (
        pytest.raises(UnsupportedLayer, match=r"unused\.weight"),
        gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
    ):
        (model(draw(4, 3)).sum() + model.unused.weight.square().sum()).backward()


def test_a_layer_called_outside_of_the_models_forward_is_refused() -> None:
    model = wired(lambda self, x: torch.tanh(self.body(x)), body=nn.Linear(3, 3), head=nn.Linear(3, 2))
    with (
        pytest.raises(UnsupportedLayer, match="head"),
        gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
    ):
        model.head(model(draw(4, 3))).sum().backward()
    x = draw(4, 3)
    losses = sum_of_squares(model.head(model(x)))
    found = gradbatch.backward(model, losses, *QUANTITIES)
    assert_results(found, expected(model, lambda: sum_of_squares(model.head(model(x)))))


def test_a_forward_from_before_the_context_is_refused(model: nn.Module) -> None:
    early = model(draw(4, 3))
    with (
        pytest.raises(UsageError, match="not called"),
        gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
    ):
        early.sum().backward()
    early = model(draw(4, 3))
    with pytest.raises(UnsupportedLayer), gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
        (early + model(draw(4, 3))).sum().backward()


def test_hidden_states_in_the_loss_are_right() -> None:
    def forward(self: nn.Module, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"logits": self.head(hidden).sum(1), "hidden": hidden}

    model, x = wired(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2)), draw(4, 5, 3)
    assert_right_both_ways(
        model, lambda: sum_of_squares((out := model(x))["logits"]) + out["hidden"].flatten(1).exp().sum(1)
    )


def test_hidden_states_kept_as_attributes_are_right_and_layers_behind_them_refused() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.hidden = self.body(x)
        self.extra = self.side(self.hidden)
        return self.head(torch.tanh(self.hidden))

    model = wired(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 2), side=nn.Linear(4, 1))
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)) + sum_of_squares(model.hidden))
    with pytest.raises(UnsupportedLayer, match="side"):
        watched(model, lambda: sum_of_squares(model(x)) + sum_of_squares(model.extra))


@pytest.mark.parametrize("used", [True, False])
def test_an_auxiliary_scalar_output_may_exist_but_not_be_used(used: bool) -> None:
    model = wired(lambda self, x: ((h := self.layer(x)), h.square().mean()), layer=nn.Linear(3, 2))
    x = draw(4, 3)
    if used:
        with pytest.raises(UnsupportedLayer, match="the model returned a scalar"):
            watched(model, lambda: sum_of_squares((out := model(x))[0]) + out[1])
    else:
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)[0]))


def test_an_auxiliary_output_over_the_batch_is_refused_also_where_its_size_is_that_of_the_batch() -> None:
    model = wired(lambda self, x: ((h := self.layer(x)), h.mean(0)), layer=nn.Linear(3, 4))
    x = draw(4, 3)
    with pytest.raises(CoupledSamples, match="layer"):
        watched(model, lambda: sum_of_squares((out := model(x))[0]) + out[1].square().sum())


def test_a_model_that_returns_its_own_loss_is_refused_and_its_vector_of_losses_is_right() -> None:
    model = wired(lambda self, x: sum_of_squares(self.layer(x)).mean(), layer=nn.Linear(3, 2))
    x = draw(4, 3)
    with pytest.raises(UsageError, match="no output has a batch axis"):
        watched(model, lambda: model(x))
    pair = wired(lambda self, x: ((h := sum_of_squares(self.layer(x))).mean(), h), layer=nn.Linear(3, 2))
    with (
        pytest.raises(UnsupportedLayer, match="the model returned a scalar"),
        gradbatch.compute(pair, BatchGrad(), loss_reduction="mean"),
    ):
        pair(x)[0].backward()
    assert_right_both_ways(pair, lambda: pair(x)[1])
