"""What is no private step does not happen: it raises before anything is changed, and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbatch import privacy
from gradbatch.errors import CoupledSamples, UsageError
from tests.privacy.models import Adapted
from tests.privacy.runs import Run, dataset, losses_of, seeded


def unchanged(run: Run, says: str, step: Callable[[], object] | None = None) -> None:
    before, steps = run.parameters(), run.private.steps
    with pytest.raises(UsageError, match=says):
        (step or run.optimizer.step)()
    torch.testing.assert_close(run.parameters(), before, rtol=0, atol=0)
    assert run.private.steps == run.private.accountant.steps == steps


def begun(**options: Any) -> tuple[Run, Any]:
    run = Run(**options)
    batch = next(iter(run.private.loader))
    run.private.backward(losses_of(run.model, batch))
    return run, batch


def plain_backward(run: Run, batch: Any) -> None:
    losses_of(run.model, batch).sum().backward()


def clip(run: Run, batch: Any) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)


def replace(run: Run, batch: Any) -> None:
    run.model[0].weight.grad = run.model[0].weight.grad.clone()


def scale_in_place(run: Run, batch: Any) -> None:
    run.model[2].bias.grad.mul_(1)


def scale_unseen(run: Run, batch: Any) -> None:
    run.model[0].bias.grad.data.mul_(2)


def unscale(run: Run, batch: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(run.optimizer)


@pytest.mark.parametrize("change", [plain_backward, clip, replace, scale_in_place, scale_unseen, unscale])
def test_a_gradient_that_something_else_changed_is_not_stepped_on(
    change: Callable[[Run, Any], object],
) -> None:
    run, batch = begun()
    change(run, batch)
    unchanged(run, "is not what private.backward left")
    run.private.discard()
    run.optimizer.zero_grad()
    run.train()


def test_a_gradient_that_was_zeroed_is_not_stepped_on() -> None:
    run, batch = begun()
    run.optimizer.zero_grad()
    unchanged(run, "is gone: optimizer.zero_grad")
    with pytest.raises(UsageError, match="is gone"):
        run.private.backward(losses_of(run.model, batch))


def test_a_scaler_may_not_step() -> None:
    run, _ = begun(optimizer=lambda model: torch.optim.Adam(model.parameters(), fused=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    unchanged(run, "GradScaler", lambda: scaler.step(run.optimizer))
    run, _ = begun()
    unchanged(run, "GradScaler", lambda: scaler.step(run.optimizer))


def test_plain_gradients_alone_or_before_are_not_stepped_on() -> None:
    run = Run()
    batch = next(iter(run.private.loader))
    plain_backward(run, batch)
    unchanged(run, r"a plain loss\.backward\(\) leaves it\. Call private.backward")
    with pytest.raises(UsageError, match=r"0\.weight has a gradient before private.backward"):
        run.private.backward(losses_of(run.model, batch))
    run.optimizer.zero_grad()
    run.step(batch)


def test_a_step_needs_a_batch_of_its_own() -> None:
    run, batch = begun()
    run.optimizer.step()
    unchanged(run, "without a batch")
    run.optimizer.zero_grad()
    with pytest.raises(UsageError, match="no batch to go backward"):
        run.private.backward(losses_of(run.model, batch))
    unchanged(run, "without a batch")


def test_a_closure_is_refused() -> None:
    run, batch = begun()
    unchanged(run, "closure", lambda: run.optimizer.step(lambda: losses_of(run.model, batch).sum()))
    run.optimizer.step(closure=None)
    assert run.private.steps == 1


def test_a_batch_whose_parts_are_not_all_in_is_not_stepped_on() -> None:
    run = Run()
    batches = iter(run.private.loader)
    batch = next(batches)
    for part in run.private.parts(batch, 2):
        run.private.backward(losses_of(run.model, part))
        break
    unchanged(run, f"2 of the batch's {len(batch[0])} records")
    with pytest.raises(UsageError, match="was not used"):
        next(batches)
    with pytest.raises(UsageError, match="a batch is under way"):
        next(iter(run.private.loader))
    run.private.discard()
    assert all(p.grad is None for p in run.model.parameters())
    run.train()


def test_an_error_in_the_middle_of_a_batch_leaves_it_where_it_was() -> None:
    run, whole = Run(), Run().train()
    for batch in run.private.loader:
        for number, part in enumerate(run.private.parts(batch, 3)):
            if number == 1:
                outputs = run.model(part[0])
                with pytest.raises(CoupledSamples):
                    run.private.backward((outputs - outputs.mean(0)).square().sum(1) + outputs.sum())
            run.private.backward(losses_of(run.model, part))
        run.optimizer.step()
        run.optimizer.zero_grad()
    torch.testing.assert_close(run.parameters(), whole.parameters(), rtol=1e-9, atol=1e-11)


def test_a_record_may_not_be_clipped_twice() -> None:
    run, batch = begun()
    with pytest.raises(UsageError, match="each record may be clipped once"):
        run.private.backward(losses_of(run.model, batch))
    run.optimizer.step()


def test_a_batch_may_not_be_passed_over_in_silence() -> None:
    run = Run()
    batches = iter(run.private.loader)
    next(batches)
    with pytest.raises(UsageError, match="also an empty one"):
        next(batches)
    # Left with a batch that was not begun: the next pass starts anew.
    run.train()
    assert run.private.steps == 8


def test_a_parameter_that_was_not_clipped_is_not_stepped_on() -> None:
    run = Run(Adapted, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    batches = iter(run.private.loader)
    run.private.backward(losses_of(run.model, next(batches)))
    run.model.base.weight.requires_grad_()
    unchanged(run, "base.weight is in the optimizer, but was not among")
    run.model.base.weight.requires_grad_(False)
    run.model.base.weight.grad = torch.ones_like(run.model.base.weight)
    unchanged(run, "base.weight is in the optimizer, but was not among")
    run.optimizer.zero_grad()
    run.private.discard()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    run.private.backward(losses_of(run.model, next(iter(run.private.loader))))
    unchanged(run, r"a parameter of shape \[3\] is in the optimizer")


def test_parameters_stay_the_same_over_the_parts_of_a_batch() -> None:
    run = Run(Adapted)
    batch = next(iter(run.private.loader))
    first, second, *_ = run.private.parts(batch, 2)
    run.private.backward(losses_of(run.model, first))
    run.model.up.requires_grad_(False)
    with pytest.raises(UsageError, match="between two parts"):
        run.private.backward(losses_of(run.model, second))


class Counting(nn.Module):
    """Keeps statistics of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, input.detach().max())
        return self.layer(input)


def test_a_forward_that_keeps_something_of_the_samples_is_refused() -> None:
    run = Run(Counting)
    batch = next(iter(run.private.loader))
    with pytest.raises(UsageError, match="largest: changed since the batch was drawn"):
        run.private.backward(losses_of(run.model, batch))
    Run(Counting, public_state=["largest"]).train()


@pytest.mark.parametrize("spectral", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_normalisation_changes_buffers_by_parameters_alone(
    spectral: Callable[[nn.Module], nn.Module],
) -> None:
    Run(lambda: nn.Sequential(spectral(nn.Linear(6, 3)))).train()


def test_noise_that_fails_leaves_no_gradient_and_no_step() -> None:
    class Failing(privacy.GaussianNoise):
        def add_to(self, tensors: Iterable[Tensor], std: float) -> None:
            next(iter(tensors)).add_(1)
            raise OSError("no randomness")

    run, _ = begun(noise=Failing(generator=seeded()))
    before = run.parameters()
    with pytest.raises(OSError, match="no randomness"):
        run.optimizer.step()
    torch.testing.assert_close(run.parameters(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in run.model.parameters())
    assert run.private.steps == run.private.accountant.steps == 0


def test_steps_beyond_those_the_noise_was_chosen_for_are_refused() -> None:
    run = Run(noise_multiplier=None, target_epsilon=4.0, delta=1e-3, epochs=2, accountant="rdp")
    run.train().train()
    assert run.private.steps == 16
    batch = next(iter(run.private.loader))
    run.private.backward(losses_of(run.model, batch))
    unchanged(run, "chosen for 16 steps")


def test_batches_that_cannot_be_accounted_for_are_refused() -> None:
    def shuffled() -> Any:
        return torch.utils.data.DataLoader(dataset(), batch_size=10, shuffle=True)

    with pytest.raises(UsageError, match=r"poisson_loader\(dataset, expected_batch_size"):
        Run(loader=shuffled)
    with pytest.raises(UsageError, match="has no epsilon to aim at"):
        Run(
            loader=shuffled,
            sampling="shuffle-unaccounted",
            noise_multiplier=None,
            target_epsilon=1.0,
            delta=1e-3,
        )
    run = Run(loader=shuffled, sampling="shuffle-unaccounted", delta=1e-3).train()
    assert run.private.steps == 4 and run.private.expected_batch_size == 10
    with pytest.raises(UsageError, match="shuffle-unaccounted"):
        run.private.epsilon()
    with pytest.raises(UsageError, match="takes a torch DataLoader"):
        Run(loader=lambda: [1, 2], sampling="shuffle-unaccounted")
    with pytest.raises(UsageError, match="sampling is 'uniform'"):
        Run(sampling="uniform")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"noise_multiplier": None}, "give either noise_multiplier or target_epsilon"),
        ({"target_epsilon": 1.0}, "give either noise_multiplier or target_epsilon"),
        ({"noise_multiplier": None, "target_epsilon": 1.0}, "needs a delta"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"max_norm": 0}, "max_norm is 0"),
        ({"max_norm": {"nothing.*": 1.0}}, "no bound for 0.weight"),
        ({"adaptive": privacy.AdaptiveClipping(count_noise=0.4)}, "count_noise is 0.4"),
        ({"adaptive": privacy.AdaptiveClipping(), "style": "normalise"}, "adaptive clipping goes with"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Run(**options)
