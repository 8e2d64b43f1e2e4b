"""The API: what it takes, what it hands back, and what it leaves alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    PerSampleGrad,
    Planner,
    Quantity,
    SumGradSquared,
    Variance,
    WeightedSum,
)
from tests.capture.reference import (
    QUANTITIES,
    WAYS,
    assert_results,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    watched,
    wired,
)


@pytest.fixture
def model() -> nn.Module:
    return perceptron()


@pytest.fixture
def x() -> Tensor:
    return draw(5, 3)


def test_everything_exported_has_a_docstring() -> None:
    public = [name for name in vars(gradbatch) if not name.startswith("_")]
    things = [getattr(gradbatch, name) for name in public]
    missing = [t for t in things if (inspect.isclass(t) or inspect.isfunction(t)) and not inspect.getdoc(t)]
    assert not missing


class TestBackward:
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_a_reduction_leaves_in_grad_what_the_users_backward_would(self, model, x, reduction: str) -> None:
        losses = sum_of_squares(model(x))
        getattr(losses, reduction)().backward()
        plain = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        results = gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), reduction=reduction)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain[name])
        # Gradients of the samples' own losses, whatever the reduction.
        assert_results(results, expected(model, lambda: sum_of_squares(model(x))))

    def test_a_reduction_adds_to_what_is_in_grad(self, model, x) -> None:
        for _ in range(2):
            gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), reduction="sum")
        twice = expected(model, lambda: 2 * sum_of_squares(model(x)))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, twice[name].sum(0))

    def test_without_a_reduction_grad_and_graph_stay(self, model, x) -> None:
        losses = sum_of_squares(model(x))
        first = gradbatch.backward(model, losses, BatchGrad())
        assert all(p.grad is None for p in model.parameters())
        second = gradbatch.backward(model, losses, BatchGrad())
        for name, gradient in first[BatchGrad].items():
            assert torch.equal(gradient, second[BatchGrad][name])
        losses.sum().backward()

    def test_per_sample_grads_is_a_dict_of_the_gradients(self, model, x) -> None:
        losses = sum_of_squares(model(x))
        found = gradbatch.per_sample_grads(model, losses)
        assert type(found) is dict
        for name, gradient in expected(model, lambda: losses).items():
            torch.testing.assert_close(found[name], gradient)

    def test_it_works_without_gradients_enabled_around_it_and_hands_back_no_graph(self, model, x) -> None:
        losses = sum_of_squares(model(x))
        with torch.no_grad():
            results = gradbatch.backward(model, losses, *QUANTITIES)
        assert_results(results, expected(model, lambda: losses))
        assert not any(t.requires_grad for result in results.values() for t in result.values())


class TestCompute:
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_it_hands_back_gradients_of_the_samples_own_losses(self, model, x, reduction: str) -> None:
        losses = lambda: sum_of_squares(model(x))  # noqa: E731
        assert_results(watched(model, losses, reduction), expected(model, losses))

    @pytest.mark.parametrize("samples", [3, 4])
    def test_samples_on_another_axis_are_found_there(self, samples: int) -> None:
        model = gradbatch.extend(
            nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double(), batch_dim=1
        )
        x = draw(4, samples, 3)
        losses = lambda: model(x).square().sum((0, 2))  # noqa: E731
        assert_results(watched(model, losses), expected(model, losses))
        assert_results(gradbatch.backward(model, losses(), *QUANTITIES), expected(model, losses))

    def test_extending_again_may_change_the_axis(self, model) -> None:
        gradbatch.extend(model, batch_dim=1)
        x = draw(4, 4, 3)
        losses = lambda: model(x).square().sum((0, 2))  # noqa: E731
        assert_results(watched(model, losses), expected(model, losses))

    def test_it_takes_models_with_several_inputs_and_keyword_inputs(self) -> None:
        model = wired(lambda self, *, x, mask=None, flag=True: self.layer(x * mask), layer=nn.Linear(3, 2))
        x, mask = draw(4, 3), draw(3)
        losses = lambda: sum_of_squares(model(x=x, mask=mask))  # noqa: E731
        assert_results(watched(model, losses), expected(model, losses))


@pytest.mark.parametrize("way", WAYS)
class TestParameters:
    def ask(self, way: str, model: nn.Module, x: Tensor, **options) -> gradbatch.Results:
        if way == "backward":
            return gradbatch.backward(model, sum_of_squares(model(x)), *QUANTITIES, **options)
        with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum", **options) as results:
            sum_of_squares(model(x)).sum().backward()
        return results

    @pytest.mark.parametrize(
        ("patterns", "names"),
        [
            ("0.*", ["0.weight", "0.bias"]),
            ("*.weight", ["0.weight", "2.weight"]),
            ("2.bias", ["2.bias"]),
            (["2.*", "0.bias"], ["0.bias", "2.weight", "2.bias"]),
            (("*", "*"), ["0.weight", "0.bias", "2.weight", "2.bias"]),
            ("[02].weigh?", ["0.weight", "2.weight"]),
        ],
        ids=str,
    )
    def test_patterns_select_by_name(self, way: str, model, x, patterns, names: list[str]) -> None:
        right = expected(model, lambda: sum_of_squares(model(x)))
        results = self.ask(way, model, x, parameters=patterns)
        assert list(results[BatchGrad]) == names
        assert_results(results, {name: right[name] for name in names})

    def test_patterns_may_come_from_a_generator(self, way: str, model, x) -> None:
        results = self.ask(way, model, x, parameters=(f"{n}.bias" for n in (0, 2)))
        assert list(results[BatchGrad]) == ["0.bias", "2.bias"]

    def test_a_tied_parameter_is_selected_by_any_of_its_names(self, way: str, x) -> None:
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight = one.weight
        model = wired(lambda self, x: self.b(torch.tanh(self.a(x))), a=one, b=other)
        results = self.ask(way, model, x, parameters="b.weight")
        assert list(results[BatchGrad]) == ["a.weight"]
        assert "b.weight" in results[BatchGrad] and "b.bias" not in results[BatchGrad]
        right = expected(model, lambda: sum_of_squares(model(x)))
        assert_results(results, {"a.weight": right["a.weight"]})

    def test_attach_sets_the_quantities_on_the_parameters_and_the_next_entry_clears_them(
        self, way, model, x
    ) -> None:
        results = self.ask(way, model, x, attach=True)
        for name, parameter in model.named_parameters():
            assert parameter.grad_batch is results[BatchGrad][name]
            assert parameter.batch_l2 is results[BatchL2Grad][name]
            assert parameter.batch_dot is results[BatchDotGrad][name]
            assert parameter.sum_grad_squared is results[SumGradSquared][name]
        self.ask(way, model, x, attach=True, parameters="0.*")
        assert hasattr(model[0].weight, "grad_batch") and not hasattr(model[2].weight, "grad_batch")
        self.ask(way, model, x)
        assert not any(hasattr(p, name) for p in model.parameters() for name in ("grad_batch", "batch_l2"))

    def test_retract_clears_what_attach_set(self, way: str, model, x) -> None:
        self.ask(way, model, x, attach=True)
        gradbatch.retract(model)
        assert not any(hasattr(p, "grad_batch") for p in model.parameters())

    @pytest.mark.parametrize("plan", ["ghost", "dense"])
    def test_a_planner_decides_how_and_never_what(self, way: str, model, x, plan: str) -> None:
        right = expected(model, lambda: sum_of_squares(model(x)))
        planner = Planner(budget=1, force={"squared_norm": plan, "gram": plan})
        assert_results(self.ask(way, model, x, planner=planner), right)


class TestResults:
    def test_keys_are_names_or_parameters_of_types_or_instances(self, model, x) -> None:
        variances = Variance(), Variance(unbiased=True)
        results = gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), *variances)
        assert list(results) == [BatchGrad(), *variances] and len(results) == 3
        by_name = results[BatchGrad]["0.weight"]
        assert results[BatchGrad][model[0].weight] is by_name
        assert results[BatchGrad()]["0.weight"] is by_name
        assert (
            model[0].weight in results[BatchGrad]
            and nn.Parameter(torch.zeros(4, 3)) not in results[BatchGrad]
        )
        assert BatchGrad() in results and BatchL2Grad() not in results
        assert list(results[BatchGrad]) == [name for name, _ in model.named_parameters()]
        for variance in variances:
            torch.testing.assert_close(
                results[variance]["0.bias"],
                results[BatchGrad]["0.bias"].var(0, correction=int(variance.unbiased)),
            )
        with pytest.raises(KeyError, match="computed 2 times: use the instance"):
            results[Variance]

    def test_two_weighted_sums_are_told_apart_by_instance(self, model, x) -> None:
        sums = WeightedSum(torch.ones(5)), WeightedSum(torch.arange(5.0))
        results = gradbatch.backward(model, sum_of_squares(model(x)), *sums)
        right = expected(model, lambda: sum_of_squares(model(x)))["0.weight"]
        for asked in sums:
            weighted = torch.einsum("n,npd->pd", asked.weights.double(), right)
            torch.testing.assert_close(results[asked]["0.weight"], weighted)

    def test_totals_add_up_over_parameters(self, model, x) -> None:
        results = gradbatch.backward(model, sum_of_squares(model(x)), BatchL2Grad(), BatchDotGrad())
        flat = torch.cat(
            [g.flatten(1) for g in expected(model, lambda: sum_of_squares(model(x))).values()], 1
        )
        torch.testing.assert_close(results[BatchL2Grad].total(), flat.square().sum(1))
        torch.testing.assert_close(results[BatchDotGrad].total(), flat @ flat.T)
        total = results[BatchL2Grad].total()
        total.zero_()
        assert results[BatchL2Grad].total().any(), "a total is a tensor of its own"

    def test_a_total_of_one_parameter_is_a_tensor_of_its_own(self, x) -> None:
        layer = gradbatch.extend(nn.Linear(3, 2, bias=False).double())
        results = gradbatch.backward(layer, sum_of_squares(layer(x)), BatchL2Grad())
        results[BatchL2Grad].total().zero_()
        assert results[BatchL2Grad]["weight"].any()

    def test_they_print_as_what_they_hold(self, model, x) -> None:
        results = gradbatch.backward(model, sum_of_squares(model(x)), BatchL2Grad(), parameters="0.bias")
        assert repr(results) == "Results(QuantityResult(BatchL2Grad(), 0.bias: [5]))"

    def test_a_parameter_without_gradient_has_zeros_of_its_own(self, x) -> None:
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2), unused=nn.Linear(2, 2))
        found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))["unused.weight"]
        assert found.shape == (5, 2, 2) and not found.any()
        found[0] += 1.0
        assert not found[1:].any()


@dataclass(frozen=True)
class Largest(Quantity):
    name: ClassVar[str] = "largest"

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        return grad.dense().abs().flatten(1).amax(1)


@pytest.mark.parametrize("way", WAYS)
def test_a_users_quantity_works_like_those_built_in(way: str, model, x) -> None:
    right = expected(model, lambda: sum_of_squares(model(x)))
    if way == "backward":
        results = gradbatch.backward(model, sum_of_squares(model(x)), Largest(), attach=True)
    else:
        with gradbatch.compute(model, Largest(), loss_reduction="mean", attach=True) as results:
            sum_of_squares(model(x)).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[Largest][name], right[name].abs().flatten(1).amax(1))
        assert parameter.largest is results[Largest][name]
