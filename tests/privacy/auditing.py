"""Lower bounds of epsilon from what an attacker guesses right, each with its confidence.

An audit refutes: where a bound exceeds the epsilon that is claimed, the claim is false, but for the stated chance. It
never proves a claim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

stats = pytest.importorskip("scipy.stats", reason="scipy comes with dp-accounting, which is not installed")

# The chance that an audit accuses an innocent: of one claim, over all its scores and thresholds together.
CHANCE = 1e-3
# Of the canaries, how many are guessed to be in, and as many to be out.
SHARES = (0.005, 0.01, 0.03, 0.1, 0.25, 0.5)


def guessing_bound(correct: int, guesses: int, canaries: int, delta: float, chance: float) -> float:
    r"""Epsilon at least, where so many guesses which records were in or out, by coin flips, are right in one run.

    If the run is :math:`(\varepsilon, \delta)`-private for adding or removing a record, ``v`` of ``r`` guesses or more
    are right with a probability of at most

    .. math:: P[W \ge v] + 2 m \delta \max_{1 \le i \le v} \frac{P[v > W \ge v - i]}{i},
        \qquad W \sim \mathrm{Binomial}\left(r, \frac{e^\varepsilon}{1 + e^\varepsilon}\right)

    for ``m`` canaries. The bound is the largest epsilon for which that is at most ``chance``, or 0.

    References:
        Privacy Auditing with One (1) Training Run (Steinke, Nasr, Jagielski, 2023), https://arxiv.org/abs/2305.08846
    """

    def probability(epsilon: float) -> float:
        of_guesses, steps = stats.binom(guesses, 1 / (1 + math.exp(-epsilon))), np.arange(1, correct + 1)
        just_below = of_guesses.cdf(correct - 1) - of_guesses.cdf(correct - 1 - steps)
        return float(of_guesses.sf(correct - 1) + 2 * canaries * delta * (just_below / steps).max())

    if correct == 0 or probability(0.0) > chance:
        return 0.0
    low, high = 0.0, 30.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) <= chance else (low, middle)
    return low


def one_run_bound(scores: Mapping[str, Tensor], included: Tensor, delta: float) -> float:
    """The best :func:`guessing_bound` of an attacker who guesses by each of some scores, and abstains where unsure.

    Args:
        scores: ``[m]`` each; high where a canary seems to be in.
        included: ``[m]``, whether it is.
        delta: of the claim.
    """
    size, bounds = len(included), [0.0]
    chance = CHANCE / (len(scores) * len(SHARES) * 3)
    for score in scores.values():
        ranked = included[score.argsort(descending=True, stable=True)]
        for share in SHARES:
            count = int(share * size)
            is_in, is_out = int(ranked[:count].sum()), int((~ranked[size - count :]).sum())
            for correct, guesses in ((is_in, count), (is_out, count), (is_in + is_out, 2 * count)):
                bounds.append(guessing_bound(correct, guesses, size, delta, chance))
    return max(bounds)


def two_worlds_bound(scores: Mapping[str, tuple[Tensor, Tensor]], delta: float) -> float:
    """Epsilon at least, by runs on two neighbouring data sets: how often one is told, how seldom the other mistaken.

    Both rates have the confidence limits of Clopper and Pearson. The threshold of each score is chosen on one half of
    the runs, the bound is that of the other.

    Args:
        scores: of ``R`` runs with the record, and of as many without it, ``[R]``.
        delta: of the claim.

    References:
        Adversary Instantiation: Lower Bounds for Differentially Private Machine Learning (Nasr, Song, Thakurta,
        Papernot, Carlini, 2021), https://arxiv.org/abs/2101.04535
    """
    bounds, chance = [0.0], CHANCE / (4 * len(scores))
    for inside, outside in scores.values():
        for one, other in ((inside, outside), (outside, inside)):
            for sign in (1, -1):
                threshold = _threshold(sign * one[::2], sign * other[::2], delta)
                told = int((sign * one[1::2] > threshold).sum())
                mistaken = int((sign * other[1::2] > threshold).sum())
                bounds.append(_epsilon(told, mistaken, len(one[1::2]), delta, chance))
    return max(bounds)


def _threshold(one: Tensor, other: Tensor, delta: float) -> Tensor:
    told = (one > one[:, None]).double().mean(1)
    mistaken = (other > one[:, None]).double().mean(1)
    # A few more than were seen: where none was mistaken, more may be.
    return one[((told - delta) / (mistaken + 4 / len(other))).argmax()]


def _epsilon(told: int, mistaken: int, runs: int, delta: float, chance: float) -> float:
    if told == 0 or mistaken == runs:
        return 0.0
    least = stats.beta.ppf(chance / 2, told, runs - told + 1)
    most = stats.beta.ppf(1 - chance / 2, mistaken + 1, runs - mistaken)
    return math.log((least - delta) / most) if least > delta else 0.0


def standard_deviation_limits(numbers: Tensor) -> tuple[float, float]:
    """Between which the standard deviation of independent Gaussian numbers of mean 0 lies, but for :data:`CHANCE`."""
    squares = float(numbers.square().sum())
    most, least = stats.chi2.ppf([1 - CHANCE / 2, CHANCE / 2], numbers.numel())
    return math.sqrt(squares / most), math.sqrt(squares / least)


def coin_flips(count: int, seed: int = 11) -> Tensor:
    """``[count]`` booleans."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5
