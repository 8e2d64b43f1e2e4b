"""Steps with reentrant checkpoints: random numbers, several passes, what is refused and what is not kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import gradbatch
from gradbatch import BatchGrad, CoupledSamples, StaleCapture, UnsupportedLayer
from tests.capture.reentrant import around, assert_right, layers, one_by_one, reentrant
from tests.capture.reference import WAYS, assert_refused, draw, sum_of_squares, wired

# torch's own: the inner one of two checkpoints is first called without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@pytest.mark.parametrize("kind", ["inside", "outside", "both"])
def test_frozen_parameters_have_no_results_and_the_others_are_right(kind: str) -> None:
    model, x = wired(around, **layers()), draw(3, 4)
    for layer in {"inside": [model.a], "outside": [model.first], "both": [model.last, model.b]}[kind]:
        layer.weight.requires_grad_(False)
    assert_right(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("pattern", ["a.*", "first.*", "*.bias"])
def test_parameters_may_be_selected(pattern: str) -> None:
    model, x = wired(around, **layers()), draw(3, 4)
    right = one_by_one(model, lambda: sum_of_squares(model(x)))
    found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)), parameters=pattern)
    assert found and all(name.startswith("a.") for name in found) == (pattern == "a.*")
    torch.testing.assert_close(found, {name: right[name] for name in found})


def test_parameters_behind_inputs_without_a_gradient_get_none_as_in_torch() -> None:
    model = wired(lambda self, x: self.last(reentrant(self.a, x)), **layers())
    x = draw(3, 4)
    assert_right(model, lambda: sum_of_squares(model(x)))
    found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
    assert found["last.weight"].any() and not found["a.weight"].any()


def dropped(self: nn.Module, x: Tensor) -> Tensor:
    hidden = self.first(F.dropout(x))
    for layer in (self.a, self.b):
        hidden = reentrant(lambda h, layer=layer: F.dropout(layer(F.dropout(h))), hidden)
    return self.last(F.dropout(hidden))


def test_dropout_falls_as_in_the_forward_and_draws_of_the_user_stay_what_they_are() -> None:
    model, x = wired(dropped, **layers()), draw(3, 4)
    assert_right(model, lambda: sum_of_squares(model(x)))
    drawn = []
    for way in (
        lambda: model(x).sum().backward(),
        *(partial(run, model, lambda: model(x).sum(1)) for run in WAYS.values()),
    ):
        torch.manual_seed(2)
        way()
        drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_without_preserved_random_numbers_only_what_draws_some_is_refused() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        block = lambda h: self.drop(self.a(h))  # noqa: E731
        return self.last(reentrant(block, self.first(x), preserve_rng_state=False))

    model, x = wired(forward, **layers(drop=nn.Dropout(0.5))), draw(3, 4)
    assert_refused(model, lambda: sum_of_squares(model(x)), UnsupportedLayer, "preserve_rng_state=True")
    model.eval()
    assert_right(model, lambda: sum_of_squares(model(x)))


COUPLED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a mean": lambda self, h: self.a(h) - self.a(h).mean(0),
    "in front of a mean": lambda self, h: torch.tanh(self.a(h)).cumsum(0),
    "batch norm": lambda self, h: self.norm(self.a(h)),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_coupled_samples_inside_are_refused(kind: str) -> None:
    model = wired(
        lambda self, x: self.last(reentrant(lambda h: COUPLED[kind](self, h), self.first(x))),
        **layers(norm=nn.BatchNorm1d(4)),
    )
    x = draw(4, 4)
    assert_refused(model, lambda: sum_of_squares(model(x)), CoupledSamples, "samples")


def test_what_a_checkpoint_uses_besides_its_arguments_is_refused_if_others_use_it_too() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden, other = self.first(x), self.b(x)
        return self.last(reentrant(lambda h: self.a(h) * other, hidden) + other)

    model, x = wired(forward, **layers()), draw(3, 4)
    assert_refused(model, lambda: sum_of_squares(model(x)), UnsupportedLayer, "none of its arguments")


def test_losses_and_several_outputs_may_be_computed_by_a_checkpoint() -> None:
    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reentrant(
            lambda h: (self.a(h), torch.tanh(self.b(h)), self.b.weight.square().sum()), self.first(x)
        )

    model, x = wired(forward, **layers()), draw(3, 4)
    assert_right(model, lambda: reentrant(lambda y, z: sum_of_squares(y * z), *model(x)[:2]))
    with pytest.raises(UnsupportedLayer, match="the model returned a scalar"):  # noqa: SIM117
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            sum(map(torch.sum, model(x))).backward()


def test_micro_batches_and_several_passes_add_up() -> None:
    model, batches = wired(around, **layers()), [draw(3, 4), draw(2, 4)]
    right = [one_by_one(model, lambda: sum_of_squares(model(x))) for x in batches]  # noqa: B023
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
        for x in batches:
            sum_of_squares(model(x)).sum().backward()
    for name, found in results[BatchGrad].items():
        torch.testing.assert_close(found, torch.cat([gradients[name] for gradients in right]))
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
        losses = sum_of_squares(model(batches[0]))
        losses.sum().backward(retain_graph=True)
        losses.sum().backward()
    for name, found in results[BatchGrad].items():
        torch.testing.assert_close(found, 2 * right[0][name])


def test_forwards_on_results_of_each_other_are_right() -> None:
    model, x = wired(around, **layers()), draw(3, 4)
    assert_right(model, lambda: sum_of_squares(model(model(x)) + model(x)))


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_penalty_outside_of_the_forward_is_refused_in_compute(where: str) -> None:
    model, x = wired(around, **layers()), draw(3, 4)
    layer = model.a if where == "inside" else model.first
    with pytest.raises(UnsupportedLayer, match="outside of the model's forward"):  # noqa: SIM117
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            (sum_of_squares(model(x)).sum() + layer.weight.square().sum()).backward()
    plain = model.a.weight.grad.clone()
    model.zero_grad()
    (sum_of_squares(model(x)).sum() + layer.weight.square().sum()).backward()
    assert torch.equal(plain, model.a.weight.grad)


def test_a_second_use_under_a_checkpoint_outside_of_the_forward_is_refused_in_compute() -> None:
    model, x = wired(around, **layers()), draw(3, 4)
    with pytest.raises(UnsupportedLayer, match="outside of the model's forward"):  # noqa: SIM117
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            sum_of_squares(reentrant(model.a, model(x))).sum().backward()


def test_a_pass_that_fails_inside_a_checkpoint_is_refused_if_the_context_goes_on() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        def block(hidden: Tensor) -> Tensor:
            hidden = self.a(hidden)
            if failing and hidden.requires_grad:
                hidden.register_hook(fail)
            return torch.tanh(hidden)

        return self.last(reentrant(block, self.first(x)))

    def fail(_: Tensor) -> None:
        if failing[-1]:
            raise ValueError("on purpose")

    failing = [False]
    model, x = wired(forward, **layers()), draw(3, 4)

    def go_on_after_a_failure() -> None:
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
            losses = sum_of_squares(model(x))
            failing.append(True)
            with pytest.raises(ValueError, match="on purpose"):
                losses.sum().backward()
            failing.append(False)
            sum_of_squares(model(x)).sum().backward()

    with pytest.raises(gradbatch.UsageError, match="inside of a checkpoint"):
        go_on_after_a_failure()


@pytest.mark.parametrize("what", ["its input", "the graph"])
def test_what_was_changed_or_freed_is_refused(what: str) -> None:
    hidden: list[Tensor] = []

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden.append(self.first(x).clone())
        return self.last(reentrant(lambda h: torch.tanh(self.a(h)), hidden[-1]))

    model = wired(forward, **layers())
    losses = sum_of_squares(model(draw(3, 4)))
    if what == "its input":
        hidden[-1].detach().zero_()
    else:
        losses.sum().backward()
    with pytest.raises(StaleCapture, match="use_reentrant=True"):
        gradbatch.per_sample_grads(model, losses)


def test_a_function_that_changes_what_its_backward_needs_is_refused() -> None:
    model = wired(
        lambda self, x: self.last(reentrant(lambda h: self.a(h).exp().mul_(2), self.first(x))), **layers()
    )
    with pytest.raises(StaleCapture, match="in place"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(draw(3, 4))))


def test_a_function_that_computes_something_else_each_time_is_refused() -> None:
    calls: list[int] = []

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        def block(hidden: Tensor) -> Tensor:
            calls.append(1)
            return torch.tanh(self.a(hidden)) if len(calls) % 2 else self.a(hidden)

        return self.last(reentrant(block, self.first(x)))

    model = wired(forward, **layers())
    with pytest.raises(UnsupportedLayer, match="something else each time"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(draw(3, 4))))


def test_a_function_that_fails_when_run_again_is_refused() -> None:
    def block(hidden: Tensor) -> Tensor:
        if hidden.requires_grad and torch.is_grad_enabled():
            raise ValueError("only once")
        return hidden * 2

    model = wired(lambda self, x: self.last(reentrant(block, self.first(x))), **layers())
    with pytest.raises(UnsupportedLayer, match="only once"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(draw(3, 4))))


@pytest.mark.parametrize("way", WAYS)
def test_under_autocast_it_is_what_it_is_without_a_checkpoint(way: str) -> None:
    def forward(self: nn.Module, x: Tensor, checkpointed: bool) -> Tensor:
        block = lambda h: torch.tanh(self.a(h)) @ self.b.weight + self.a(h)  # noqa: E731
        hidden = self.a(self.first(x))
        return self.last(reentrant(block, hidden) if checkpointed else block(hidden)).float()

    model, x = wired(forward, **layers()).float(), draw(3, 4, dtype=torch.float32)

    def losses(checkpointed: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return sum_of_squares(model(x, checkpointed))

    plain = WAYS[way](model, lambda: losses(False))[BatchGrad]
    for name, found in WAYS[way](model, lambda: losses(True))[BatchGrad].items():
        assert (found - plain[name]).norm() <= 1e-2 * plain[name].norm(), name


@pytest.mark.parametrize("way", WAYS)
def test_samples_on_another_axis_and_of_several_rows_are_right(way: str) -> None:
    model, x, ids = wired(around, **layers()), draw(4, 4), torch.tensor([0, 1, 1, 0])
    right = one_by_one(model, lambda: sum_of_squares(model(x)))
    right = {name: torch.stack([g[[0, 3]].sum(0), g[[1, 2]].sum(0)]) for name, g in right.items()}
    if way == "backward":
        found = gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad(), sample_ids=ids)
    else:
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum", sample_ids=ids) as found:
            sum_of_squares(model(x)).sum().backward()
    torch.testing.assert_close(dict(found[BatchGrad]), right)


def test_a_whole_model_under_a_checkpoint_is_right_both_ways() -> None:
    model, x = (
        wired(lambda self, x: self.last(torch.tanh(self.a(x))), **layers()),
        draw(3, 4).requires_grad_(),
    )
    assert_right(model, lambda: sum_of_squares(reentrant(model, x)))


def test_nothing_of_a_region_is_kept() -> None:
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        pytest.skip("this torch does not tell that saved tensors are packed away; inputs are kept then")
    seen: list[StorageWeakRef] = []

    def block(self: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        seen.append(StorageWeakRef(hidden.untyped_storage()))
        return self.b(hidden)

    model = wired(lambda self, x: self.last(reentrant(lambda h: block(self, h), self.first(x))), **layers())
    losses = sum_of_squares(model(draw(3, 4)))
    gradbatch.per_sample_grads(model, losses)
    assert len(seen) > 2 and all(storage.expired() for storage in seen)
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
        losses = sum_of_squares(model(draw(3, 4))).sum()
        assert all(storage.expired() for storage in seen)
        losses.backward()


def test_hooks_of_the_user_are_there_afterwards() -> None:
    block = lambda self, h, w: F.linear(h, w * self.a.weight, self.b.bias)  # noqa: E731
    model = wired(lambda self, x: reentrant(partial(block, self), self.first(x), self.b.weight), **layers())
    x, called = draw(3, 4), []
    used = [model.first.weight, model.a.weight, model.b.weight, model.b.bias]
    for parameter in used:
        parameter.register_hook(lambda _, parameter=parameter: called.append(parameter))
    for way in WAYS.values():
        way(model, lambda: sum_of_squares(model(x)))
    called.clear()
    sum_of_squares(model(x)).sum().backward()
    assert {*map(id, called)} == {*map(id, used)}
