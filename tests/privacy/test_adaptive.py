"""Adaptive bounds find the quantile, see norms by noised counts alone, and cost the gradients what they should."""

from __future__ import annotations

import math

import pytest
import torch

from gradbatch import privacy
from gradbatch.errors import UsageError
from tests.privacy.models import norms_of, one_by_one
from tests.privacy.runs import RECORDS, Run, losses_of, poisson, seeded

EXPECTED = RECORDS * 0.25


def test_the_bound_moves_by_the_noised_share_of_samples_within_it() -> None:
    settings = privacy.AdaptiveClipping(quantile=0.7, learning_rate=0.5, count_noise=3.0)
    run = Run(adaptive=settings, max_norm=0.9, noise_multiplier=1.5)
    noise, bound = privacy.GaussianNoise(generator=seeded()), 0.9
    of_gradients = (1.5**-2 - (2 * 3.0) ** -2) ** -0.5
    for batch in run.private.loader:
        assert run.private.max_norm == pytest.approx(bound)
        norms = norms_of(one_by_one(run.model, losses_of(run.model, batch)))
        run.private.backward(losses_of(run.model, batch))
        sums = [p.grad.clone() for p in run.model.parameters()]
        run.optimizer.step()
        noise.add_to(sums, of_gradients * bound)
        for p, total in zip(run.model.parameters(), sums, strict=True):
            torch.testing.assert_close(p.grad, total / EXPECTED, rtol=1e-9, atol=1e-12)
        run.optimizer.zero_grad()
        count = [((norms <= bound).double() - 0.5).sum(0, keepdim=True)]
        noise.add_to(count, 3.0)
        share = min(max(0.5 + float(count[0]) / EXPECTED, 0.0), 1.0)
        bound *= math.exp(-0.5 * (share - 0.7))
    assert run.private.steps == 8


@pytest.mark.parametrize("groups", [1, 2])
def test_one_record_moves_gradients_and_counts_together_by_one_over_the_noise_multiplier(groups: int) -> None:
    z, count_noise = 1.5, 3.0
    run = Run(
        adaptive=privacy.AdaptiveClipping(count_noise=count_noise), noise_multiplier=z, per_layer=groups > 1
    )
    of_gradients = run.private._bounds.noise_multiplier
    # Each part moved by as much as one record can, in units of the noise on it.
    moved = math.hypot(1 / of_gradients, math.sqrt(groups) * 0.5 / count_noise)
    assert moved == pytest.approx(1 / z)
    assert run.private.noise_multiplier == z


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_bound_comes_to_the_quantile(quantile: float) -> None:
    settings = privacy.AdaptiveClipping(quantile=quantile, learning_rate=0.3, count_noise=0.5)
    run = Run(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        loader=lambda: poisson(steps=150, rate=0.5),
        adaptive=settings,
        noise_multiplier=0.5,
        max_norm=50.0,
    )
    x, y = run.private._source.dataset.tensors
    norms = norms_of(one_by_one(run.model, losses_of(run.model, (x, y))))
    bounds = []
    for batch in run.private.loader:
        run.step(batch)
        bounds.append(run.private.max_norm)
    settled = torch.tensor(bounds[50:]).mean()
    assert float((norms <= settled).double().mean()) == pytest.approx(quantile, abs=0.1)


def test_each_layer_follows_its_own_quantile() -> None:
    settings = privacy.AdaptiveClipping(count_noise=2.0, learning_rate=0.5)
    run = Run(loader=lambda: poisson(steps=60, rate=0.5), adaptive=settings, per_layer=True, max_norm=1.0)
    assert run.private.max_norm == pytest.approx({"0": 0.5**0.5, "2": 0.5**0.5})
    run.train()
    first, last = run.private.max_norm["0"], run.private.max_norm["2"]
    assert abs(math.log(first / last)) > 0.1


def test_norms_that_are_not_finite_are_no_more_than_above_the_bound() -> None:
    run = Run(adaptive=privacy.AdaptiveClipping(count_noise=2.0))
    batch = next(iter(run.private.loader))
    losses = losses_of(run.model, batch)
    clipped = run.private.backward(losses * torch.full_like(losses, torch.nan))
    run.optimizer.step()
    assert clipped.non_finite == run.private.non_finite == len(losses)
    assert math.isfinite(run.private.max_norm) and run.private.max_norm > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantile", 0.0),
        ("quantile", 1.0),
        ("learning_rate", 0.0),
        ("count_noise", 0.0),
        ("count_noise", math.inf),
    ],
)
def test_settings_out_of_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} is {value}"):
        privacy.AdaptiveClipping(**{name: value})


def test_the_noise_on_the_count_may_not_cost_more_than_the_step() -> None:
    with pytest.raises(UsageError, match=r"count_noise is 0\.5; it has to be well above 0\.5"):
        Run(adaptive=privacy.AdaptiveClipping(count_noise=0.5), noise_multiplier=1.0)
    Run(adaptive=privacy.AdaptiveClipping(count_noise=0.51), noise_multiplier=1.0)
    Run(adaptive=privacy.AdaptiveClipping(count_noise=0.51), noise_multiplier=0.0)
