"""What goes wrong elsewhere in Python code and over the life of a model: one test a phrase of the list of failures."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, GradBatchError, StaleCapture, UsageError
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
from tests.findings.whole_models import assert_model_is_right


@dataclass
class Out:
    logits: Tensor
    kept: Tensor | None = None


class Named(NamedTuple):
    logits: Tensor
    kept: Tensor


class TestPython:
    def test_a_keyword_call_is_right(self) -> None:
        assert_model_is_right(lambda self, x: self.layer(input=x), draw(4, 3), layer=nn.Linear(3, 2))

    @pytest.mark.parametrize("name", ["output", "input", "weight_", "metadata", "module", "args", "grad"])
    def test_any_name_of_a_submodule_is_right(self, name: str) -> None:
        assert_model_is_right(lambda self, x: getattr(self, name)(x), draw(4, 3), **{name: nn.Linear(3, 2)})

    @pytest.mark.parametrize(
        ("wrap", "pick"),
        [
            (lambda y, h: (y, h), lambda out: out[0]),
            (lambda y, h: [h, y], lambda out: out[1]),
            (lambda y, h: {"hidden": [h, (h,)], "logits": y}, lambda out: out["logits"]),
            (lambda y, h: Out(y, h), lambda out: out.logits),
            (lambda y, h: Out(y), lambda out: out.logits),
            (lambda y, h: Named(y, h), lambda out: out.logits),
            (lambda y, h: (y, None, 3, "text"), lambda out: out[0]),
        ],
        ids=["tuple", "list", "dict", "dataclass", "dataclass_none", "namedtuple", "mixed"],
    )
    def test_outputs_in_containers_are_right(self, wrap, pick) -> None:
        model = wired(
            lambda self, x: wrap(self.b(h := torch.tanh(self.a(x))), h), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
        )
        x = draw(4, 3)
        assert_right_both_ways(model, lambda: sum_of_squares(pick(model(x))))

    @pytest.mark.parametrize("given", [False, True])
    def test_an_optional_second_input_is_right(self, given: bool) -> None:
        def forward(self: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layer(x) if mask is None else self.layer(x) * mask

        model, x = wired(forward, layer=nn.Linear(3, 2)), draw(4, 3)
        mask = draw(4, 2) if given else None
        assert_right_both_ways(model, lambda: sum_of_squares(model(x, mask=mask)))

    @pytest.mark.parametrize(
        "change",
        [
            lambda h, x: torch.relu_(h),
            lambda h, x: h.add_(x),
            lambda h, x: h.__iadd__(x),
            lambda h, x: h[:, 1:].mul_(2) if h[:, 0].mul_(x[:, 0]) is None else h,
        ],
        ids=["in-place relu", "add_", "h += x", "a slice times a slice"],
    )
    def test_a_change_in_place_behind_a_layer_is_right(
        self, change: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        forward = lambda self, x: self.b(change(self.a(x), x))  # noqa: E731
        assert_model_is_right(forward, draw(4, 3), a=nn.Linear(3, 3), b=nn.Linear(3, 2))

    def test_a_slice_assigned_behind_a_layer_is_right(self) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            h = self.a(x)
            h[:, :2] = torch.tanh(self.b(x))
            return h

        assert_model_is_right(forward, draw(4, 3), a=nn.Linear(3, 3), b=nn.Linear(3, 2))

    def test_in_place_relu_layers_are_right(self) -> None:
        layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ReLU(inplace=True))
        assert_model_is_right(lambda self, x: self.net(x), draw(4, 3), net=layers)

    @pytest.mark.parametrize(
        ("way", "error", "message"),
        [
            # Autograd's own check is pruned away with the weight's gradient.
            ("backward", StaleCapture, r"^0 \(Linear\): its input .* was modified in place"),
            ("compute", RuntimeError, "modified by an inplace operation"),
        ],
    )
    def test_a_captured_input_that_is_changed_later_is_noticed(
        self, way: str, error: type[RuntimeError], message: str
    ) -> None:
        model, x = perceptron(), draw(4, 3)

        def losses() -> Tensor:
            result = sum_of_squares(model(x))
            x.add_(1)
            return result

        with pytest.raises(error, match=message):
            WAYS[way](model, losses)


class TestLifecycle:
    def test_a_backward_in_eval_mode_is_right(self) -> None:
        layers = [nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2)]
        model, x = gradbatch.extend(nn.Sequential(*layers).double().eval()), draw(4, 2, 5)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_an_unused_branch_has_zeros_and_not_the_values_of_the_last_step(self) -> None:
        forward = lambda self, x: self.a(x) if self.first else self.b(x)  # noqa: E731
        model, x = wired(forward, a=nn.Linear(3, 2), b=nn.Linear(3, 2)), draw(4, 3)
        for model.first in (True, False, True):
            assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
            unused = "b" if model.first else "a"
            assert not watched(model, lambda: sum_of_squares(model(x)))[BatchGrad][f"{unused}.weight"].any()

    def test_after_an_exception_in_the_forward_a_second_try_is_right(self) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.fails:
                raise KeyError("a bad sample")
            return self.b(h)

        model, x = wired(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2)), draw(4, 3)
        for way in WAYS.values():
            model.fails = True
            with pytest.raises(KeyError, match="a bad sample"):
                way(model, lambda: sum_of_squares(model(x)))
            model.fails = False
            assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_a_forward_in_train_mode_without_a_backward_leaves_nothing_behind(self) -> None:
        model, x = perceptron().train(), draw(4, 3)
        model(draw(7, 3))
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_a_deep_copy_between_forward_and_backward_disturbs_neither(self) -> None:
        model, x = perceptron(), draw(4, 3)
        losses = sum_of_squares(model(x))
        copied = copy.deepcopy(model)
        right = expected(model, lambda: losses)
        assert_results(gradbatch.backward(model, losses, *QUANTITIES), right)
        assert_right_both_ways(copied, lambda: sum_of_squares(copied(x)))

    @pytest.mark.parametrize("assign", [True, False])
    def test_a_loaded_state_is_right(self, assign: bool) -> None:
        model, x = perceptron(), draw(4, 3)
        model.load_state_dict(perceptron().state_dict(), assign=assign)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_parameters_replaced_after_extending_are_right(self) -> None:
        model, x = perceptron(), draw(4, 3)
        model[0].weight = nn.Parameter(draw(4, 3))
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_parameters_unfrozen_after_extending_are_right(self) -> None:
        model, x = perceptron(), draw(4, 3)
        model[0].requires_grad_(False)
        assert_right_both_ways(gradbatch.extend(model), lambda: sum_of_squares(model(x)))
        model[0].requires_grad_(True)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_a_pickled_model_is_right(self) -> None:
        model, x = pickle.loads(pickle.dumps(perceptron())), draw(4, 3)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_a_gradient_penalty_is_right(self) -> None:
        model, x = perceptron(), draw(4, 3).requires_grad_()

        def losses() -> Tensor:
            values = sum_of_squares(model(x))
            (slopes,) = torch.autograd.grad(values.sum(), x, create_graph=True)
            return values + slopes.square().sum(1)

        right = expected(model, losses)
        assert_results(gradbatch.backward(model, losses(), *QUANTITIES), right)

    def test_a_gradient_penalty_around_the_outputs_is_refused_by_the_layers_name(self) -> None:
        model, x = perceptron(), draw(4, 3).requires_grad_()

        def step() -> None:
            with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
                values = sum_of_squares(model(x))
                (slopes,) = torch.autograd.grad(values.sum(), x, create_graph=True)
                (values + slopes.square().sum(1)).sum().backward()

        with pytest.raises(GradBatchError, match=r"^[02]\b.*from outside of the model's forward"):
            step()

    def test_a_saliency_map_does_not_count(self) -> None:
        model, x = perceptron(), draw(4, 3).requires_grad_()
        with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
            loss = sum_of_squares(model(x)).sum()
            torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
        assert_results(results, expected(model, lambda: sum_of_squares(model(x))))

    def test_two_backward_passes_over_a_graph_that_is_kept_add_up(self) -> None:
        model, x = perceptron(), draw(4, 3)
        with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
            loss = sum_of_squares(model(x)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert_results(results, expected(model, lambda: 2 * sum_of_squares(model(x))))

    def test_a_backward_restricted_to_inputs_is_refused_or_right(self) -> None:
        model, x = perceptron(), draw(4, 3)
        with (
            pytest.raises(UsageError, match=r"restricted to some parameters .*left out 0"),
            gradbatch.compute(model, BatchGrad(), loss_reduction="sum"),
        ):
            sum_of_squares(model(x)).sum().backward(inputs=[*model[2].parameters()])
        with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
            sum_of_squares(model(x)).sum().backward(inputs=[*model.parameters()])
        assert_results(results, expected(model, lambda: sum_of_squares(model(x))))

    def test_gradient_accumulation_keeps_every_micro_batch(self) -> None:
        model, batches = perceptron(), [draw(3, 3), draw(2, 3), draw(4, 3)]
        with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
            for x in batches:
                sum_of_squares(model(x)).sum().backward()
        assert_results(results, expected(model, lambda: sum_of_squares(model(torch.cat(batches)))))

    def test_memory_does_not_grow_over_steps(self) -> None:
        model, x = perceptron(), draw(4, 3)
        counts = []
        for _ in range(4):
            for way in WAYS.values():
                way(model, lambda: sum_of_squares(model(x)))
            gc.collect()
            counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
        assert counts[-1] <= counts[1]
