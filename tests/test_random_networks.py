"""Networks drawn at random are right, step after step and both ways; coupled samples are refused.

``GRADBATCH_NETWORKS`` sets how many are tried, ``GRADBATCH_FIRST_NETWORK`` the first seed.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.random_network_trial import WAYS, Trial, difference
from tests.random_steps.registry import COUPLING, RANDOM, STEPS, STOPPING

# Their seeds are always the same: how many are right is known, whatever else is tried.
NON_FINITE = range(40)
COUNT = int(os.environ.get("GRADBATCH_NETWORKS", "100"))
FIRST = int(os.environ.get("GRADBATCH_FIRST_NETWORK", "0"))
pytestmark = pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")


@pytest.mark.parametrize("step", sorted(STEPS))
def test_every_step_keeps_samples_apart_and_is_right_by_itself(step: str) -> None:
    for seed in range(2):
        trial = Trial(seed, steps=[step, step], kind="plain", batches=1)
        if step not in RANDOM:
            batch, finite = trial.batches[0], trial.batches[0].finite
            off = difference(trial.one_at_a_time(batch), trial.right[0], finite, trial.dtype)
            assert off is None, f"{trial}: the step couples samples: {off}"
        for way in WAYS:
            assert trial.outcome(way) == "right", f"{trial}, {way}"


@pytest.mark.parametrize("step", sorted(STEPS.keys() - RANDOM - STOPPING))
def test_coupled_samples_are_refused_whatever_brought_the_data_in(step: str) -> None:
    number = sorted(STEPS).index(step)
    for seed in range(2):
        coupling = sorted(COUPLING)[(number + 5 * seed) % len(COUPLING)]
        trial = Trial(number + 1000 * seed, coupled=True, steps=[step, coupling], kind="plain", batches=1)
        for way in WAYS:
            assert trial.outcome(way).startswith("refused: coupled"), f"{trial}, {way}"


def test_random_networks_are_right_or_refused_and_those_without_coupling_are_right() -> None:
    outcomes: dict[str, Counter[str]] = {
        "apart": Counter(),
        "non-finite": Counter(),
        "coupled": Counter(),
    }
    readers: Counter[str] = Counter()
    problems = []
    for seed in range(FIRST, FIRST + COUNT):
        trial = Trial(seed, coupled=seed % 5 == 4)
        for way in WAYS:
            outcome = trial.outcome(way)
            word = outcome.split(",")[0].split(": step")[0]
            sort = "coupled" if trial.coupling else "non-finite" if trial.kind == "non-finite" else "apart"
            outcomes[sort][word] += 1
            # In one kernel over all samples, what is not finite in one gets into the others.
            allowed = trial.coupling or trial.kind == "non-finite"
            if word != "right" and not (allowed and word.startswith("refused")):
                problems.append(f"{way} of {trial}: {outcome}")
        if seed % 4 == 0 and not trial.coupling and trial.kind != "non-finite":
            readers += trial.readers()
    print(f"{outcomes}; uses of parameters: {readers}")  # noqa: T201
    assert not problems, "\n".join(problems)
    assert outcomes["apart"]["right"] >= 0.98 * outcomes["apart"].total()


def test_of_networks_with_a_sample_that_is_not_finite_nine_in_ten_are_right_and_the_rest_refused() -> None:
    outcomes: Counter[str] = Counter()
    problems = []
    for seed in NON_FINITE:
        trial = Trial(seed, kind="non-finite", batches=2)
        for way in WAYS:
            outcome = trial.outcome(way)
            outcomes[outcome.split(":")[0]] += 1
            if not outcome.startswith(("right", "refused")):
                problems.append(f"{way} of {trial}: {outcome}")
    assert not problems, "\n".join(problems)
    assert outcomes["right"] >= 0.9 * outcomes.total(), outcomes
