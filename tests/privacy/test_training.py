"""A private step is the formula; and what is no private step does not happen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradbatch
from gradbatch import privacy
from gradbatch.errors import UsageError
from tests.privacy.models import MODELS, Adapted, clipped_sum, gradients, mlp, one_by_one
from tests.privacy.runs import RECORDS, Run, losses_of, poisson, seeded, sgd

EXPECTED = RECORDS * 0.25


def test_a_step_takes_the_clipped_sum_and_the_noise_over_the_expected_batch_size() -> None:
    run = Run(noise_multiplier=1.3, max_norm=0.2)
    noise = privacy.GaussianNoise(generator=seeded())
    twin, optimizer = copy.deepcopy(run.model), None
    optimizer = sgd(twin)
    sizes = []
    for batch in run.private.loader:
        sums = list(clipped_sum(one_by_one(twin, losses_of(twin, batch)), 0.2).values())
        noise.add_to(sums, 1.3 * 0.2)
        for p, total in zip(twin.parameters(), sums, strict=True):
            p.grad = total / EXPECTED
        optimizer.step()
        run.step(batch)
        torch.testing.assert_close(run.parameters(), dict(twin.named_parameters()), rtol=1e-9, atol=1e-11)
        sizes.append(len(batch[0]))
    assert len(set(sizes)) > 2 and run.private.steps == run.private.accountant.steps == len(sizes) == 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_layer": True},
        {"max_norm": {"0.*": 0.1, "*": 0.3}},
        {"style": "normalise"},
        {"adaptive": privacy.AdaptiveClipping(count_noise=5.0)},
        {"adaptive": privacy.AdaptiveClipping(count_noise=5.0), "per_layer": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_micro_batches_make_the_step_of_the_whole_batch(options: dict[str, Any], size: int) -> None:
    whole, parts = Run(**options).train(), Run(**options).train(size=size)
    torch.testing.assert_close(parts.parameters(), whole.parameters(), rtol=1e-9, atol=1e-11)
    assert parts.private.max_norm == pytest.approx(whole.private.max_norm)


@pytest.mark.parametrize("size", [None, 4])
def test_an_empty_batch_is_a_step_of_noise_alone(size: int | None) -> None:
    run = Run(loader=lambda: poisson(steps=3, rate=1e-9))
    expected = list(map(torch.zeros_like, run.model.parameters()))
    privacy.GaussianNoise(generator=seeded()).add_to(expected, 0.5)
    before = run.parameters()
    run.step(next(iter(run.private.loader)), size)
    for (name, after), noise in zip(run.parameters().items(), expected, strict=True):
        torch.testing.assert_close(after, before[name] - 0.1 * noise / (RECORDS * 1e-9))
    assert run.private.steps == run.private.accountant.steps == 1


@pytest.mark.parametrize(
    ("options", "sensitivity"),
    [
        ({"max_norm": 0.2}, 0.2),
        ({"max_norm": 0.2, "per_layer": True}, 0.2),
        ({"max_norm": {"0.*": 0.3, "*": 0.4}}, 0.5),
        ({"max_norm": {"0": 0.3, "2": 0.4}, "per_layer": True}, 0.5),
        ({"max_norm": 0.2, "style": "normalise"}, 0.2),
    ],
    ids=str,
)
def test_noise_is_in_units_of_the_most_that_a_record_moves_the_sum(
    options: dict[str, Any], sensitivity: float
) -> None:
    run = Run(noise_multiplier=1.5, loader=lambda: poisson(rate=1e-9), **options)
    noise = list(map(torch.zeros_like, run.model.parameters()))
    privacy.GaussianNoise(generator=seeded()).add_to(noise, 1.0)
    batch = next(iter(run.private.loader))
    run.private.backward(losses_of(run.model, batch))
    run.optimizer.step()
    for p, drawn in zip(run.model.parameters(), noise, strict=True):
        torch.testing.assert_close(p.grad, drawn * 1.5 * sensitivity / (RECORDS * 1e-9))


def test_without_noise_epsilon_is_infinite() -> None:
    assert Run(noise_multiplier=0.0, delta=1e-3).train().private.epsilon() == float("inf")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_layer": True},
        {"style": "normalise"},
        {"adaptive": privacy.AdaptiveClipping(count_noise=5.0)},
        {"adaptive": privacy.AdaptiveClipping(count_noise=5.0), "per_layer": True},
    ],
    ids=str,
)
def test_empty_batches_need_no_forward(options: dict[str, Any]) -> None:
    run = Run(loader=lambda: poisson(steps=3, rate=1e-9), **options)
    for _ in run.private.loader:
        assert "0 samples" in repr(run.private.backward(torch.zeros(0)))
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.private.steps == 3


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "groups": lambda p: torch.optim.Adam([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], lr=0.01),
    "maximised": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_plain_optimizers_take_private_gradients_as_any_others(name: str, set_to_none: bool) -> None:
    run = Run(optimizer=lambda model: OPTIMIZERS[name](list(model.parameters())))
    twin = copy.deepcopy(run.model)
    optimizer = OPTIMIZERS[name](list(twin.parameters()))
    taken: list[Tensor] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: taken.extend(p.grad.clone() for p in run.model.parameters())
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (run.optimizer, optimizer)]
    for batch in run.private.loader:
        taken.clear()
        run.private.backward(losses_of(run.model, batch))
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none)
        for p, grad in zip(twin.parameters(), taken, strict=True):
            p.grad = grad
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close(run.parameters(), dict(twin.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_tied_and_raw_parameters_are_trained_as_they_are(name: str) -> None:
    make, draw = MODELS[name]
    data = torch.utils.data.TensorDataset(draw(20), torch.randint(0, 3, (20,)))
    run = Run(make, loader=lambda: privacy.poisson_loader(data, sample_rate=0.5, steps=4, generator=seeded()))
    before = run.parameters()
    run.train()
    trainable = {name for name, p in run.model.named_parameters() if p.requires_grad}
    moved = {name for name, after in run.parameters().items() if not after.equal(before[name])}
    assert moved == trainable


def test_the_norm_goes_over_what_the_optimizer_releases() -> None:
    run = Run(optimizer=lambda model: sgd(model[2]), noise_multiplier=0.0)
    batch = next(iter(run.private.loader))
    grads = one_by_one(run.model, losses_of(run.model, batch))
    run.private.backward(losses_of(run.model, batch))
    head = {name: grad for name, grad in grads.items() if name.startswith("2.")}
    torch.testing.assert_close(gradients(run.model), clipped_sum(head, 0.5), rtol=1e-10, atol=1e-12)


def test_parameters_may_be_unfrozen_between_steps() -> None:
    run = Run(Adapted, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for number, batch in enumerate(run.private.loader):
        if number == 4:
            run.model.base.requires_grad_()
            frozen = run.model.base.weight.clone()
        run.step(batch)
    assert not run.model.base.weight.equal(frozen)


def test_half_precision_parameters_are_summed_and_noised_in_single_precision() -> None:
    runs = [Run(lambda: mlp(), noise_multiplier=0.0, max_norm=1e-3) for _ in range(2)]
    data = torch.utils.data.TensorDataset(torch.randn(400, 6).bfloat16(), torch.randint(0, 3, (400,)))
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        model = runs[0].model.to(torch.bfloat16).to(dtype)
        loader = privacy.poisson_loader(data, sample_rate=1.0, steps=1)
        model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        private = privacy.make_private(model, optimizer, loader, noise_multiplier=0.0, max_norm=1e-3)
        for batch in private.loader:
            for x, y in private.parts(batch, 10):
                losses = nn.functional.cross_entropy(model(x.to(dtype)).float(), y, reduction="none")
                private.backward(losses)
            optimizer.step()
        found.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
        assert all(p.grad.dtype == dtype for p in model.parameters())
    # Forty parts, each rounded to eight bits, would add up an error of several percent.
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.02


def test_an_optimizer_is_private_once() -> None:
    run = Run()
    with pytest.raises(UsageError, match="already private"):
        privacy.make_private(run.model, run.optimizer, poisson(), noise_multiplier=1.0)
    run.private.close()
    run.private = privacy.make_private(run.model, run.optimizer, poisson(), noise_multiplier=1.0)
    run.train()
    run.private.close()
    losses_of(run.model, next(iter(poisson()))).sum().backward()
    run.optimizer.step()


def test_epsilon_is_that_of_the_steps_taken() -> None:
    run = Run(delta=1e-3)
    assert run.private.epsilon() == 0
    batches = iter(run.private.loader)
    for number in range(1, 4):
        run.step(next(batches))
        expected = privacy.epsilon(noise_multiplier=1.0, sample_rate=0.25, steps=number, delta=1e-3)
        assert run.private.epsilon() == expected
    assert run.private.epsilon(delta=1e-5) > run.private.epsilon()
    with pytest.raises(UsageError, match="needs a delta"):
        Run().private.epsilon()


def test_the_model_is_extended_and_otherwise_as_it_was() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    data = torch.utils.data.TensorDataset(torch.randn(9, 6))
    loader = privacy.poisson_loader(data, sample_rate=0.5, steps=1)
    privacy.make_private(model, sgd(model), loader, noise_multiplier=1.0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert gradbatch.per_sample_grads(model, model(torch.randn(2, 6)).sum(1))["0.bias"].shape == (2, 8)


def test_a_delta_that_one_record_published_outright_would_have_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=rf"delta is 0\.1, with {RECORDS} records"):
        Run(noise_multiplier=1.0, delta=0.1)
