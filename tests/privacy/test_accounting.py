"""Epsilon and noise are dp-accounting's, and what the library cannot bound is not reported."""

import json
import logging
import math
import sys

import pytest
import torch

from gradbatch import privacy
from gradbatch.errors import UsageError

dp_accounting = pytest.importorskip("dp_accounting")

SETTINGS = [
    (1.0, 0.01, 1000, 1e-5),
    (0.9, 0.02, 50, 1e-6),
    (4.0, 0.3, 200, 1e-3),
    (2.0, 1.0, 10, 1e-5),
    (20.0, 1e-3, 9999, 1e-8),
]


def librarys_own(kind, steps, delta):
    """The library's accountant, fed as its documentation says."""
    accountant = {"pld": dp_accounting.pld.PLDAccountant, "rdp": dp_accounting.rdp.RdpAccountant}[kind]()
    for noise, rate, count in steps:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), count)
    return accountant.get_epsilon(delta)


def normal_cdf(x):
    return float(torch.special.ndtr(torch.tensor(x, dtype=torch.float64)))


def delta_of_gaussian(epsilon, mu):
    """Closed form for Gaussians whose means are mu standard deviations apart (Balle and Wang, 2018, Theorem 8)."""
    return normal_cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal_cdf(-mu / 2 - epsilon / mu)


def delta_of_one_sampled_step(epsilon, noise, rate):
    """From where the densities cross on: the mass of one less e^epsilon times that of the other, both ways around."""
    mixture_above = lambda x: (1 - rate) * normal_cdf(-x) + rate * normal_cdf((1 / noise) - x)  # noqa: E731
    crossing = lambda ratio: noise * math.log((ratio - 1 + rate) / rate) + 1 / (2 * noise)  # noqa: E731
    added = crossing(math.exp(epsilon))
    removed = crossing(math.exp(-epsilon)) if math.exp(-epsilon) > 1 - rate else -math.inf
    return max(
        mixture_above(added) - math.exp(epsilon) * normal_cdf(-added),
        normal_cdf(removed) - math.exp(epsilon) * (1 - mixture_above(removed)),
    )


@pytest.mark.parametrize("kind", ["pld", "rdp"])
@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), SETTINGS)
def test_epsilon_is_the_librarys(kind, noise, rate, steps, delta):
    ours = privacy.epsilon(
        noise_multiplier=noise, sample_rate=rate, steps=steps, delta=delta, accountant=kind
    )
    assert type(ours) is float
    assert ours == pytest.approx(librarys_own(kind, [(noise, rate, steps)], delta), rel=1e-12)


def test_epsilon_and_noise_are_what_was_measured_before_the_first_line_was_written():
    setting = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000, "delta": 1e-5}
    assert privacy.epsilon(**setting) == pytest.approx(1.828, abs=5e-4)
    assert privacy.epsilon(**setting, accountant="rdp") == pytest.approx(2.101, abs=5e-4)
    del setting["noise_multiplier"]
    assert privacy.noise_multiplier(target_epsilon=3.0, **setting) == pytest.approx(0.814, abs=5e-4)


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_without_sampling_epsilon_is_that_of_the_closed_form_and_never_below(steps, delta):
    spent = privacy.epsilon(noise_multiplier=3.0, sample_rate=1.0, steps=steps, delta=delta)
    mu = math.sqrt(steps) / 3.0
    assert delta_of_gaussian(spent * (1 + 1e-6), mu) <= delta  # but for rounding
    assert delta_of_gaussian(spent - 1e-4, mu) > delta


@pytest.mark.parametrize(("noise", "rate", "delta"), [(1.0, 0.1, 1e-4), (0.5, 0.5, 1e-6), (2.0, 0.01, 1e-7)])
def test_epsilon_of_one_sampled_step_is_that_of_the_closed_form_and_never_below(noise, rate, delta):
    spent = privacy.epsilon(noise_multiplier=noise, sample_rate=rate, steps=1, delta=delta)
    assert delta_of_one_sampled_step(spent * (1 + 1e-6), noise, rate) <= delta
    assert delta_of_one_sampled_step(spent - 2e-4, noise, rate) > delta


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_the_noise_for_a_target_is_the_librarys_and_keeps_the_target(kind):
    target, delta, rate, steps = 1.0, 1e-5, 0.01, 1000
    found = privacy.noise_multiplier(
        target_epsilon=target, delta=delta, sample_rate=rate, steps=steps, accountant=kind
    )
    accountant = {"pld": dp_accounting.pld.PLDAccountant, "rdp": dp_accounting.rdp.RdpAccountant}[kind]
    own = dp_accounting.calibrate_dp_mechanism(
        accountant,
        lambda noise: dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps
        ),
        target,
        delta,
        dp_accounting.ExplicitBracketInterval(1.4, 1.6),
    )
    assert found == pytest.approx(own, abs=2e-6)
    assert librarys_own(kind, [(found, rate, steps)], delta) <= target
    assert librarys_own(kind, [(found - 1e-5, rate, steps)], delta) > target


@pytest.mark.parametrize("target", [0.05, 2.0])
@pytest.mark.parametrize(("rate", "steps"), [(0.2, 30), (1.0, 5)])
def test_the_noise_for_any_target_keeps_it(target, rate, steps):
    setting = {"sample_rate": rate, "steps": steps, "delta": 1e-6}
    noise = privacy.noise_multiplier(target_epsilon=target, **setting)
    spent = privacy.epsilon(noise_multiplier=noise, **setting)
    assert 0.999 * target <= spent <= target
    assert noise <= privacy.noise_multiplier(target_epsilon=target, **setting, accountant="rdp")


def test_no_log_line_is_left_of_what_the_library_says_in_passing(caplog):
    # At this noise most fractional orders do not converge.
    with caplog.at_level(logging.DEBUG):
        privacy.epsilon(noise_multiplier=1e4, sample_rate=0.5, steps=10, delta=1e-5, accountant="rdp")
        privacy.noise_multiplier(
            target_epsilon=1e-3, delta=1e-5, sample_rate=0.01, steps=10, accountant="rdp"
        )
    assert not caplog.records
    logging.getLogger("absl").warning("others are heard")
    assert caplog.records


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_steps_of_different_noise_and_rate_compose(kind):
    steps = [(2.0, 0.01, 300), (2.5, 0.01, 1), (2.0, 0.02, 40), (1.0, 0.0, 5)]
    accountant = privacy.Accountant(kind)
    for noise, rate, count in steps:
        accountant.step(noise_multiplier=noise, sample_rate=rate, count=count)
    assert accountant.steps == 346
    assert accountant.epsilon(1e-5) == pytest.approx(librarys_own(kind, steps[:3], 1e-5), rel=1e-9)


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_asking_between_the_steps_changes_no_answer(kind):
    asked = privacy.Accountant(kind)
    taken = []
    for noise, rate in [(5.0, 0.1), (5.0, 0.1), (8.0, 0.1), (8.0, 0.2), (5.0, 0.1), (8.0, 0.2), (9.0, 0.1)]:
        asked.step(noise_multiplier=noise, sample_rate=rate)
        taken.append((noise, rate, 1))
        assert asked.epsilon(1e-5) == pytest.approx(librarys_own(kind, taken, 1e-5), rel=1e-7)
        assert asked.epsilon(1e-3) == pytest.approx(librarys_own(kind, taken, 1e-3), rel=1e-7)


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_a_resumed_accountant_says_exactly_what_the_uninterrupted_one_says(kind):
    through, first = privacy.Accountant(kind), privacy.Accountant(kind)
    for noise in (5.0, 6.0, 5.0):
        through.step(noise_multiplier=noise, sample_rate=0.05)
        through.epsilon(1e-5)
        first.step(noise_multiplier=noise, sample_rate=0.05)
    resumed = privacy.Accountant(kind)
    resumed.step(noise_multiplier=9.0, sample_rate=1.0)  # replaced by what is loaded
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for accountant in (through, resumed):
        accountant.step(noise_multiplier=6.0, sample_rate=0.05, count=10)
    assert resumed.steps == through.steps == 13
    assert resumed.epsilon(1e-5) == through.epsilon(1e-5)
    assert resumed.state_dict() == through.state_dict()


def test_the_state_of_another_kind_or_of_something_else_is_refused_and_changes_nothing():
    accountant = privacy.Accountant("pld")
    accountant.step(noise_multiplier=1.0, sample_rate=0.5)
    with pytest.raises(UsageError, match="of kind 'rdp'"):
        accountant.load_state_dict(privacy.Accountant("rdp").state_dict())
    with pytest.raises(UsageError, match="not the state"):
        accountant.load_state_dict({"kind": "pld"})
    with pytest.raises(UsageError, match="sample_rate is 2"):
        accountant.load_state_dict({"kind": "pld", "steps": [[1.0, 0.5, 3], [1.0, 2.0, 1]]})
    assert accountant.state_dict() == {"kind": "pld", "steps": [[1.0, 0.5, 1]]}


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_nothing_is_spent_where_nobody_is_drawn_and_everything_without_noise(kind):
    none = {"delta": 1e-5, "accountant": kind}
    assert privacy.epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=0, **none) == 0
    assert privacy.epsilon(noise_multiplier=0.0, sample_rate=0.0, steps=9, **none) == 0
    assert privacy.epsilon(noise_multiplier=0.0, sample_rate=0.1, steps=1, **none) == math.inf
    assert privacy.noise_multiplier(target_epsilon=1.0, sample_rate=0.1, steps=0, **none) == 0
    assert privacy.noise_multiplier(target_epsilon=1.0, sample_rate=0.0, steps=9, **none) == 0


@pytest.mark.parametrize("kind", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-300, 1e-7, 1e-3, 0.03])
def test_next_to_no_noise_is_bounded_from_above_at_once(kind, noise):
    spent = privacy.epsilon(noise_multiplier=noise, sample_rate=0.5, steps=10, delta=1e-5, accountant=kind)
    assert spent > 1000


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_enormous_noise_spends_next_to_nothing(kind):
    setting = {"sample_rate": 0.5, "steps": 10, "delta": 1e-5, "accountant": kind}
    assert privacy.epsilon(noise_multiplier=1e300, **setting) < 1e-3


def test_renyi_divergences_that_rounding_takes_below_zero_do_not_count_as_none():
    """The library's own answer at this setting is 0, from a divergence of -3e-15."""
    with_tail = privacy.epsilon(noise_multiplier=1e6, sample_rate=0.5, steps=10, delta=1e-9, accountant="rdp")
    assert with_tail > 1e-3


def test_a_delta_that_rounding_in_distributions_drowns_is_refused_and_left_to_renyi():
    setting = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 10, "delta": 1e-11}
    with pytest.raises(UsageError, match='Use the accountant "rdp"'):
        privacy.epsilon(**setting)
    assert privacy.epsilon(**setting, accountant="rdp") > 0


def test_targets_out_of_reach_are_refused():
    setting = {"sample_rate": 0.1, "steps": 100, "delta": 1e-9}
    with pytest.raises(UsageError, match="finer than the accountant 'rdp' resolves"):
        privacy.noise_multiplier(target_epsilon=1e-6, **setting, accountant="rdp")
    with pytest.raises(UsageError, match="above 50 there is no privacy"):
        privacy.noise_multiplier(target_epsilon=1000.0, **setting)
    assert privacy.noise_multiplier(target_epsilon=1000.0, **setting, accountant="rdp") > 0


GOOD = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10, "delta": 1e-5, "accountant": "rdp"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("noise_multiplier", -1.0, "noise_multiplier is -1.0"),
        ("noise_multiplier", math.inf, "noise_multiplier is inf"),
        ("noise_multiplier", math.nan, "noise_multiplier is nan"),
        ("noise_multiplier", "1", "noise_multiplier is '1'"),
        ("sample_rate", 1.1, "sample_rate is 1.1"),
        ("sample_rate", -0.1, "sample_rate is -0.1"),
        ("steps", -1, "number of steps is -1"),
        ("steps", 1.0, "number of steps is 1.0"),
        ("steps", True, "number of steps is True"),
        ("delta", 0.0, "delta is 0.0"),
        ("delta", 1, "delta is 1"),
        ("delta", math.nan, "delta is nan"),
        ("accountant", "gdp", "the accountant is 'gdp'"),
    ],
)
def test_arguments_out_of_range_are_named(name, value, message):
    with pytest.raises(UsageError, match=message):
        privacy.epsilon(**{**GOOD, name: value})
    if name != "noise_multiplier":
        target = {key: value for key, value in GOOD.items() if key != "noise_multiplier"}
        with pytest.raises(UsageError, match=message):
            privacy.noise_multiplier(target_epsilon=1.0, **{**target, name: value})


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan, None])
def test_a_target_is_a_positive_number(target):
    with pytest.raises(UsageError, match="target_epsilon is"):
        privacy.noise_multiplier(target_epsilon=target, delta=1e-5, sample_rate=0.1, steps=10)


def test_a_step_that_is_refused_is_not_recorded():
    accountant = privacy.Accountant("rdp")
    with pytest.raises(UsageError, match="sample_rate is 7"):
        accountant.step(noise_multiplier=1.0, sample_rate=7)
    assert accountant.steps == 0 and accountant.epsilon(1e-5) == 0


def test_without_the_library_what_needs_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UsageError, match=r"pip install 'gradbatch\[privacy\]'"):
        privacy.epsilon(noise_multiplier=1.0, sample_rate=0.5, steps=3, delta=1e-5)
    assert privacy.epsilon(noise_multiplier=0.0, sample_rate=0.5, steps=3, delta=1e-5) == math.inf
