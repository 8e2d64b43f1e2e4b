"""Bounds on what steps spend, by the dp-accounting library: the one place that knows it, and where its numbers end.

The library is imported when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from gradbatch.errors import UsageError

Steps = tuple[float, float, int]
"""Noise multiplier, sample rate, number of steps taken with these two."""

# Distributions are composed by FFT, whose rounding errors are of the order of 1e-13. Down to this delta, epsilon is an
# upper bound to five digits (against the closed form for Gaussians); at 1e-12 it can come out a percent too small.
SMALLEST_DELTA = 1e-9
# Noise outside of this range overflows the library's arithmetic: none, or as much as can be told from it.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
# The library's default. Losses are rounded to its multiples such that the result stays an upper bound.
_INTERVAL = 1e-4
# Rényi divergences are computed to about 1e-15, and one that rounding takes below zero would count as none at all.
_SMALLEST_DIVERGENCE = 1e-14


def no_loss() -> Any:
    """The privacy loss distribution of no step at all."""
    return _library().pld.privacy_loss_distribution.identity(value_discretization_interval=_INTERVAL)


def distribution_of(noise_multiplier: float, sample_rate: float, count: int) -> Any:
    """The privacy loss distribution of a number of equal steps."""
    return _distribution_of_a_step(noise_multiplier, sample_rate).self_compose(count)


@lru_cache(maxsize=8)  # a megabyte each, more with little noise
def _distribution_of_a_step(noise_multiplier: float, sample_rate: float) -> Any:
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=_INTERVAL
    )


def rdp_epsilon(taken: list[Steps], delta: float) -> float:
    """Epsilon of some steps by their Rényi divergences."""
    rdp = _library().rdp
    orders, total = rdp.RdpAccountant().orders, 0.0
    for noise, rate, count in taken:
        total = total + count * _divergences_of_a_step(noise, rate)
    return float(rdp.compute_epsilon(orders, total, delta)[0])


@lru_cache(maxsize=4096)
def _divergences_of_a_step(noise_multiplier: float, sample_rate: float) -> Any:
    """Rényi divergence of one step at each of the accountant's orders, ``[orders]``."""
    library = _library()
    with _quietly():
        one_step = library.rdp.RdpAccountant().compose(_event(library, noise_multiplier, sample_rate, 1))
    return one_step.rdp.clip(_SMALLEST_DIVERGENCE)


def calibrate(
    kind: str, target: float, delta: float, rate: float, steps: int, lower: float = 0.0, guess: float = 1.0
) -> float:
    """The least noise, to 1e-6, that spends at most ``target``; more than ``lower``, and perhaps about ``guess``."""
    library = _library()
    accountants = {"pld": library.pld.PLDAccountant, "rdp": library.rdp.RdpAccountant}
    try:
        with _quietly():
            noise = library.calibrate_dp_mechanism(
                accountants[kind],
                lambda noise: _event(library, noise, rate, steps),
                target,
                delta,
                library.LowerEndpointAndGuess(lower, guess),
            )
    except library.mechanism_calibration.NoBracketIntervalFoundError as error:
        raise UsageError(
            f"no noise was found that spends at most epsilon {target} at delta {delta} in {steps} steps at a rate of "
            f"{rate}; ask for more epsilon, a lower rate or fewer steps"
        ) from error
    return float(noise)


def _event(library: Any, noise_multiplier: float, sample_rate: float, count: int) -> Any:
    step = library.PoissonSampledDpEvent(sample_rate, library.GaussianDpEvent(noise_multiplier))
    return library.SelfComposedDpEvent(step, count)


def _library() -> Any:
    """Import dp-accounting where it is needed: a second, and no part of gradbatch's own requirements."""
    try:
        import dp_accounting
    except ImportError as error:
        raise UsageError(
            f"accounting needs the package dp-accounting ({error}); pip install 'gradbatch[privacy]'"
        ) from error
    return dp_accounting


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the library logs of each Rényi order that it leaves out, or that rounding takes below zero.

    A bound holds without the first; the second happens at noises that a search passes, and is excluded in its result.
    """

    def keeps(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    logger = logging.getLogger("absl")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)
