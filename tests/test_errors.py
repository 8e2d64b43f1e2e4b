"""What gradbatch refuses: every message names what was wrong and says what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import (
    BatchGrad,
    BatchL2Grad,
    CoupledSamples,
    GradBatchError,
    StaleCapture,
    UsageError,
    verify,
)
from tests.capture.reference import WAYS, assert_refused, draw, perceptron, sum_of_squares, wired


def losses_of(model: nn.Module, samples: int = 4) -> Tensor:
    return sum_of_squares(model(draw(samples, 3)))


def test_every_error_is_a_gradbatch_error_and_a_runtime_error() -> None:
    kinds = [
        value
        for value in vars(gradbatch).values()
        if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning)
    ]
    assert len(kinds) == 9
    assert all(issubclass(kind, GradBatchError) and issubclass(kind, RuntimeError) for kind in kinds)
    assert all(kind.__doc__ for kind in kinds)


class TestTheModel:
    def test_coupled_samples_are_refused_by_layer_operation_and_shape_with_the_ways_out(self) -> None:
        class Centred(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gain = nn.Parameter(torch.ones(3))

            def forward(self, x: Tensor) -> Tensor:
                scaled = x * self.gain
                return scaled - scaled.mean(0)

        model = gradbatch.extend(nn.Sequential(nn.Sequential(Centred()), nn.Linear(3, 3))).double()
        assert_refused(
            model,
            lambda: losses_of(model),
            CoupledSamples,
            r"0\.0 \(Centred\).*MulBackward.*4 samples.*shape \(4, 3\)",
        )
        for way_out in ("rows apart up to its loss", "make it a buffer"):
            assert_refused(model, lambda: losses_of(model), CoupledSamples, way_out)
        gradbatch.per_sample_grads(model, losses_of(model), parameters="1.*")
        model[0].requires_grad_(False)
        gradbatch.per_sample_grads(model, losses_of(model))

    @pytest.mark.parametrize(
        "layer", [nn.LSTM(3, 2), nn.MultiheadAttention(3, 1)], ids=lambda layer: type(layer).__name__
    )
    def test_steps_of_one_sequence_taken_for_samples_are_refused_by_name(self, layer: nn.Module) -> None:
        attends = isinstance(layer, nn.MultiheadAttention)
        model = wired(lambda self, x: (self.own(x, x, x) if attends else self.own(x))[0], own=layer)
        assert_refused(model, lambda: losses_of(model), CoupledSamples, rf"own \({type(layer).__name__}\)")

    @pytest.mark.parametrize("way", WAYS)
    def test_a_model_that_is_not_extended_or_retracted_is_refused_with_the_call_to_make(
        self, way: str
    ) -> None:
        plain = nn.Sequential(nn.Linear(3, 2)).double()
        for model in (plain, gradbatch.retract(perceptron())):
            with pytest.raises(UsageError, match=r"not extended.*gradbatch\.extend\(model\)"):
                WAYS[way](model, lambda model=model: losses_of(model))

    @pytest.mark.parametrize("kind", ["train", "not affine", "frozen", "no statistics", "unused", "hidden"])
    def test_batch_norm_in_train_mode_is_refused_with_the_ways_out(self, kind: str) -> None:
        norm = nn.BatchNorm1d(3, affine=kind != "not affine", track_running_stats=kind != "no statistics")
        norm.requires_grad_(kind != "frozen")

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            x = self.before(x)
            if kind == "hidden":
                with torch.no_grad():
                    x = self.norm(x)
                return self.after(x)
            return self.after(x if kind == "unused" else self.norm(x))

        model = wired(forward, before=nn.Linear(3, 3), norm=norm, after=nn.Linear(3, 2))
        if kind == "no statistics":
            model.eval()
        for way_out in (r"norm \(BatchNorm1d\) normalises over the batch", r"\.eval\(\)", "GroupNorm"):
            assert_refused(model, lambda: losses_of(model), CoupledSamples, way_out)

    def test_batch_norm_that_was_in_train_mode_during_the_forward_is_refused(self) -> None:
        model = gradbatch.extend(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).double()
        losses = losses_of(model)
        model.eval()
        with pytest.raises(CoupledSamples, match=r"1 \(BatchNorm1d\)"):
            gradbatch.per_sample_grads(model, losses)

    def test_a_parameter_that_is_no_leaf_is_refused_by_name(self) -> None:
        model = perceptron()
        model[0]._parameters["weight"] = model[0].weight * 2
        assert_refused(model, lambda: losses_of(model), UsageError, r"0\.weight is not a leaf.*Parameter")

    @pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
    def test_a_complex_parameter_is_refused_by_name(self) -> None:
        model = wired(
            lambda self, x: self.layer(x.to(torch.cdouble)).abs(), layer=nn.Linear(3, 2, dtype=torch.cdouble)
        )
        model.layer.to(torch.cdouble)
        assert_refused(model, lambda: losses_of(model), UsageError, r"layer\.weight is complex.*freeze")

    def test_a_lazy_layer_without_a_shape_is_refused_by_name(self) -> None:
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2), later=nn.LazyLinear(2))
        assert_refused(
            model, lambda: losses_of(model), UsageError, r"later\.weight has no shape yet.*forward"
        )

    @pytest.mark.parametrize("differentiated", [False, True])
    def test_a_frozen_model_is_said_to_be_frozen(self, differentiated: bool) -> None:
        model = perceptron().requires_grad_(False)
        x = draw(4, 3).requires_grad_(differentiated)
        message = r"no trainable parameters, all 4 are frozen.*requires_grad_\(True\)"
        assert_refused(model, lambda: sum_of_squares(model(x)), UsageError, message)
        for run in (lambda: gradbatch.per_sample_grads(model, losses_of(model)), lambda: verify(model, x)):
            with pytest.raises(UsageError, match=message):
                run()

    def test_a_model_without_parameters_is_said_to_have_none(self) -> None:
        model, x = gradbatch.extend(nn.Sequential(nn.Tanh())), draw(4, 3).requires_grad_()
        assert_refused(model, lambda: sum_of_squares(model(x)), UsageError, "Sequential has no parameters")
        with pytest.raises(UsageError, match="Sequential has no parameters"):
            verify(model, x)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((torch.nn.functional.relu,), r"takes a torch\.nn\.Module, not a function"),
            ((nn.Linear,), r"takes a torch\.nn\.Module, not a type"),
            ((nn.Linear(2, 2), -1), "batch_dim is -1"),
            ((nn.Linear(2, 2), "first"), "batch_dim is 'first'"),
        ],
    )
    def test_extend_says_what_it_takes(self, arguments: tuple[Any, ...], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            gradbatch.extend(*arguments)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    def test_a_scripted_module_is_refused_by_extend(self) -> None:
        with pytest.raises(UsageError, match="ScriptModule"):
            gradbatch.extend(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))


class TestTheLosses:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda losses: losses.mean(), r'scalar, but losses \[N\].*reduction="none".*compute'),
            (lambda losses: losses.view(2, 2), r"shape \(2, 2\).*\[N\].*flatten\(1\)\.sum\(1\)"),
            (lambda losses: losses.view(4, 1), r"shape \(4, 1\)"),
            (lambda losses: losses.detach(), "no graph"),
            (lambda losses: losses.to(torch.cdouble), "complex"),
            (lambda losses: losses.tolist(), r"a tensor \[N\].*not a list"),
            (lambda losses: None, "not a NoneType"),
        ],
        ids=["scalar", "matrix", "column", "detached", "complex", "list", "none"],
    )
    def test_losses_of_another_shape_are_refused_with_the_fix(self, change: Callable, message: str) -> None:
        model = perceptron()
        with pytest.raises(UsageError, match=message):
            gradbatch.backward(model, change(losses_of(model)), BatchGrad())

    def test_losses_of_another_model_are_refused(self) -> None:
        model, other = perceptron(), perceptron()
        with pytest.raises(UsageError, match="no loss depends"):
            gradbatch.per_sample_grads(model, losses_of(other))

    @pytest.mark.parametrize("reduction", ["average", "none", 1, True, "Mean"])
    def test_an_unknown_reduction_is_refused_with_those_there_are(self, reduction: Any) -> None:
        model = perceptron()
        with pytest.raises(UsageError, match=r'reduction is .*"mean", "sum"'):
            gradbatch.backward(model, losses_of(model), BatchGrad(), reduction=reduction)

    @pytest.mark.parametrize("reduction", [None, "average", "none"])
    def test_compute_wants_to_know_how_the_scalar_is_made(self, reduction: Any) -> None:
        with (
            pytest.raises(UsageError, match=r'loss_reduction is .*"mean" or "sum".*gradbatch\.backward'),
            gradbatch.compute(perceptron(), BatchGrad(), loss_reduction=reduction),
        ):
            pass


class TestTheRequest:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        ("quantities", "message"),
        [
            ((), r"no quantity.*BatchGrad\(\)"),
            ((BatchGrad,), r"BatchGrad is a class.*BatchGrad\(\)$"),
            ((gradbatch.ClippedSum,), r"ClippedSum is a class.*ClippedSum\(max_norm=\.\.\.\)$"),
            ((BatchGrad(), gradbatch.WeightedSum), r"such as WeightedSum\(weights=\.\.\.\)$"),
            ((gradbatch.Variance,), r"such as Variance\(\)$"),
            ((gradbatch.Quantity,), r"Quantity is a class.*such as gradbatch\.BatchGrad\(\)$"),
            (("grad_batch",), r"instance of gradbatch\.Quantity, not a str.*such as BatchGrad\(\)"),
            ((BatchGrad(), "mean"), r'options go by name, such as reduction="mean"'),
            (([BatchGrad(), BatchL2Grad()],), r"not a list; pass several one by one"),
            ((torch.ones(4),), r"not a Tensor; the losses come before the quantities"),
            ((BatchGrad(), torch.sum), "not a builtin_function_or_method"),
        ],
    )
    def test_a_quantity_is_an_instance_of_quantity(
        self, way: str, quantities: tuple[Any, ...], message: str
    ) -> None:
        model = perceptron()

        def ask() -> None:
            if way == "backward":
                gradbatch.backward(model, losses_of(model), *quantities)
            else:
                with gradbatch.compute(model, *quantities, loss_reduction="sum"):
                    losses_of(model).sum().backward()

        with pytest.raises(UsageError, match=message):
            ask()

    @pytest.mark.parametrize("first", [None, "model", [nn.Linear(2, 2)]])
    def test_the_first_argument_is_a_model(self, first: Any) -> None:
        with pytest.raises(UsageError, match="first argument is the extended model"):
            gradbatch.backward(first, torch.zeros(2), BatchGrad())

    def test_a_pattern_without_a_match_is_refused_with_the_names_there_are(self) -> None:
        model = perceptron()
        with pytest.raises(
            UsageError, match=r"'head\.\*' matches none of 0\.weight, 0\.bias, 2\.weight, 2\.bias"
        ):
            gradbatch.per_sample_grads(model, losses_of(model), parameters=["0.*", "head.*"])

    def test_a_pattern_of_frozen_parameters_alone_is_refused_with_the_trainable_ones(self) -> None:
        model = perceptron()
        model[0].requires_grad_(False)
        message = r"'0\.\*' matches frozen parameters.*none of 2\.weight, 2\.bias$"
        with pytest.raises(UsageError, match=message):
            gradbatch.per_sample_grads(model, losses_of(model), parameters="0.*")
        with pytest.raises(UsageError, match=message):
            verify(model, draw(4, 3), parameters=["2.*", "0.*"])
        with pytest.raises(UsageError, match="no pattern given"):
            gradbatch.per_sample_grads(model, losses_of(model), parameters=[])

    def test_weights_of_another_number_of_samples_are_refused_with_the_shapes(self) -> None:
        model = perceptron()
        with pytest.raises(UsageError, match=r"\[3\].*N = 4"):
            gradbatch.backward(model, losses_of(model), gradbatch.WeightedSum(torch.ones(3)))


class TestTheOrder:
    def test_results_are_not_there_before_the_context_is_left(self) -> None:
        model = perceptron()
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
            losses_of(model).sum().backward()
            with pytest.raises(UsageError, match="after the with block ends"):
                results[BatchGrad]
            assert repr(results) == "Results(not computed yet)"
        assert results[BatchGrad]

    def test_a_context_without_a_forward_or_without_a_backward_is_refused(self) -> None:
        model = perceptron()
        with (
            pytest.raises(UsageError, match=r"not called inside.*loss\.backward\(\) inside"),
            gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
        ):
            pass
        with (
            pytest.raises(UsageError, match="no backward pass reached"),
            gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
        ):
            losses_of(model)

    def test_a_context_of_a_model_inside_a_context_of_it_is_refused_and_the_outer_one_goes_on(self) -> None:
        model = perceptron()
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
            with (
                pytest.raises(UsageError, match="already inside"),
                gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
            ):
                pass
            losses_of(model).sum().backward()
        assert results[BatchGrad]["0.weight"].shape == (4, 4, 3)

    def test_an_output_with_other_rows_than_the_input_is_refused_with_both(self) -> None:
        model = wired(lambda self, x: self.layer(x).view(2, -1), layer=nn.Linear(3, 2))
        with pytest.raises(UsageError, match=r"2 rows on axis 0.*\[4\].*what is a sample"):
            WAYS["compute"](model, lambda: losses_of(model))

    def test_a_layer_that_was_deleted_or_replaced_since_the_forward_is_refused(self) -> None:
        model = perceptron()
        losses = losses_of(model)
        model[2] = gradbatch.extend(nn.Linear(4, 2).double())
        with pytest.raises(StaleCapture, match="deleted between forward and backward"):
            gradbatch.per_sample_grads(model, losses)
