"""An attacker who knows everything but one record, or but a coin flip for each record, learns no more than epsilon.

The attack has teeth: private training with any of the usual mistakes in it is found out by the same attack.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbatch import privacy
from tests.privacy import broken
from tests.privacy.auditing import (
    CHANCE,
    coin_flips,
    guessing_bound,
    one_run_bound,
    standard_deviation_limits,
    stats,
    two_worlds_bound,
)
from tests.privacy.canaries import Claim, Records, released

pytest.importorskip("dp_accounting")

# ---------------------------------------------------------------- one run, and a coin flip for each of many canaries

CANARIES = 2000
IN = coin_flips(CANARIES)
RUN = Claim(noise_multiplier=4.0, sample_rate=0.5, steps=10, delta=1e-7)
PARTS, PART = 32, 17  # of some 500 records that are drawn


def canaries() -> Records:
    """Each with a gradient of its own, far beyond the bound, nearly all of it in the second table."""
    place = IN.nonzero()[:, 0]
    return Records(CANARIES, place, torch.tensor([0.5, 100.0]).repeat(len(place), 1))


def bound_of(**options: Any) -> float:
    """What an attacker proves who sees all steps of one run: by sums over steps, and by differences between them."""
    own = released(RUN, canaries(), **options)[..., 1]
    return one_run_bound({"sum": own.sum(0), "range": own.amax(0) - own.amin(0)}, IN, RUN.delta)


ways = pytest.mark.parametrize(
    "options",
    [{}, {"part": PART}, {"noise": privacy.GaussianNoise(secure=True)}],
    ids=["whole batches", "parts", "secure noise"],
)


@ways
def test_one_run_proves_no_more_than_epsilon(options: dict[str, Any]) -> None:
    proven = bound_of(**options)
    assert 0.1 < proven <= RUN.epsilon


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "no noise": lambda _: {"noise": broken.Scaled(0.0)},
    "noise over the batch size": lambda _: {"noise": broken.Scaled(1 / 500)},
    "the same noise in each step": lambda _: {"noise": broken.Repeated()},
    "a share of the noise with each part": lambda patch: broken.noise_in_parts(patch, 4 / PARTS, PART),
    "mean of the batch clipped": lambda patch: broken.batches_clipped(patch, divisor=500),
    "layer unclipped": lambda patch: broken.layer_left_out(patch, "second", scaled=False),
    "layer not in the norm": lambda patch: broken.layer_left_out(patch, "second", scaled=True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_run_finds(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound_of(**MISTAKES[mistake](monkeypatch)) > RUN.epsilon


# ---------------------------------------------------------------- two data sets, and many runs on both

STEP = Claim(noise_multiplier=1.0, sample_rate=1.0, steps=1, delta=0.05)
RUNS = 1000


def two_worlds() -> float:
    """A record that outweighs five others of the opposite direction. No gradient depends on the weights: steps are
    independent runs of one step."""
    others = Records(1, torch.zeros(5, dtype=torch.long), torch.tensor([[0.0, -100.0]]).repeat(5, 1))
    record = torch.tensor([[0.0, 1e4]])
    joined = Records(1, torch.zeros(6, dtype=torch.long), torch.cat([others.sizes, record]))
    many = replace(STEP, steps=RUNS)
    inside, outside = (
        released(many, records, seed=seed)[:, 0, 1] for seed, records in ((5, joined), (7, others))
    )
    return two_worlds_bound({"sum": (inside, outside)}, STEP.delta)


def test_many_runs_prove_no_more_than_epsilon() -> None:
    assert 0.2 * STEP.epsilon < two_worlds() <= STEP.epsilon


def test_many_runs_find_the_sum_of_the_batch_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum never exceeds the bound, but one record moves it by twice that."""
    broken.batches_clipped(monkeypatch)
    assert two_worlds() > STEP.epsilon


# ---------------------------------------------------------------- who is in a batch

TRIALS, OF_A_RUN = 2000, 500
SAMPLED = Claim(noise_multiplier=0.6, sample_rate=0.02, steps=50, delta=0.01)


def bound_of_batches(draw: Callable[[int], None] = lambda _: None) -> float:
    """Each place is a trial of its own: 49 records of one direction, and one of the other direction, or of no size.

    Where every record is in one batch exactly, the attacker knows what the others add to each, and sees one go the
    other way. Where batches are drawn, nobody knows how many others there are in it.
    """
    inside = coin_flips(TRIALS)
    peaks = []
    for run, there in enumerate(inside.split(OF_A_RUN)):
        sizes = torch.zeros(OF_A_RUN, SAMPLED.steps, 2)
        sizes[..., 1] = -100.0
        sizes[:, 0, 1] = torch.where(there, 100.0, 0.0)
        place = torch.arange(OF_A_RUN).repeat_interleave(SAMPLED.steps)
        draw(run)
        own = released(SAMPLED, Records(OF_A_RUN, place, sizes.flatten(0, 1)), seed=5 + 2 * run)[..., 1]
        peaks.append(own.amax(0))
    peak, count = torch.cat(peaks), int(min(inside.sum(), (~inside).sum()))
    return two_worlds_bound({"peak": (peak[inside][:count], peak[~inside][:count])}, SAMPLED.delta)


def test_drawn_batches_give_away_no_more_than_epsilon() -> None:
    assert bound_of_batches() <= SAMPLED.epsilon


def test_batches_cut_from_a_permutation_give_away_more_than_is_accounted_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(run: int) -> None:
        order = torch.rand(OF_A_RUN, SAMPLED.steps, generator=torch.Generator().manual_seed(run)).argsort(1)
        own = order + SAMPLED.steps * torch.arange(OF_A_RUN)[:, None]
        broken.shuffled(monkeypatch, own.mT)

    assert bound_of_batches(cut) > SAMPLED.epsilon


# ---------------------------------------------------------------- the noise itself


def noise_of(**options: Any) -> Tensor:
    """What is released where no record is."""
    return released(RUN, canaries(), **options)[:, ~IN]


@ways
def test_the_noise_is_what_is_accounted_for(options: dict[str, Any]) -> None:
    least, most = standard_deviation_limits(noise_of(**options))
    assert least <= RUN.noise_multiplier <= most < 1.05 * least


def test_noise_once_for_each_part_is_found_to_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    mistaken = broken.noise_in_parts(monkeypatch, RUN.noise_multiplier, PART)
    least, _ = standard_deviation_limits(noise_of(**mistaken))
    assert least > 4 * RUN.noise_multiplier


def test_a_little_less_noise_is_found() -> None:
    _, most = standard_deviation_limits(noise_of(noise=broken.Scaled(0.97)))
    assert most < RUN.noise_multiplier


# ---------------------------------------------------------------- the audit itself


def test_without_delta_the_bound_of_guesses_is_that_of_clopper_and_pearson() -> None:
    for correct, guesses in ((60, 100), (90, 100), (100, 100), (1200, 2000)):
        rate = stats.beta.ppf(CHANCE, correct, guesses - correct + 1)
        expected = max(0.0, math.log(rate / (1 - rate)))
        assert guessing_bound(correct, guesses, 5000, 0.0, CHANCE) == pytest.approx(expected, abs=2e-3)


def test_delta_weakens_the_bound_of_guesses() -> None:
    bounds = [guessing_bound(95, 100, 1000, delta, 0.05) for delta in (0.0, 1e-6, 1e-5, 1e-4, 1e-2)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 2 > 0 == bounds[-1]


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
def test_randomised_response_is_bounded_by_its_epsilon_nearly_always_and_closely(epsilon: float) -> None:
    """It answers truly with odds of e^epsilon to one, so that guesses are as good as the claim allows."""
    guesses, trials, chance = 1000, 2000, 0.05
    right = stats.binom(guesses, 1 / (1 + math.exp(-epsilon))).rvs(trials, random_state=0)
    bounds = {count: guessing_bound(int(count), guesses, guesses, 0.0, chance) for count in set(right)}
    too_high = sum(bounds[count] > epsilon for count in right) / trials
    assert too_high <= chance + 3 * math.sqrt(chance / trials)
    assert sum(bounds[count] for count in right) / trials > 0.75 * epsilon - 0.05


def test_gaussians_are_bounded_by_their_epsilon_in_two_worlds() -> None:
    drawn = torch.Generator().manual_seed(1)
    bounds = []
    for _ in range(20):
        inside, outside = torch.randn(2, 2000, generator=drawn) + torch.tensor([[1.0], [0.0]])
        bounds.append(two_worlds_bound({"": (inside, outside)}, STEP.delta))
    assert max(bounds) <= STEP.epsilon < 3 * sum(bounds) / len(bounds)
