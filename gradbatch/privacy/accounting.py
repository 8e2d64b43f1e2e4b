"""How much privacy steps of DP-SGD spend, and how much noise a target needs: numbers of the dp-accounting library.

A step draws each record with probability ``sample_rate`` (Poisson sampling), sums clipped gradients, and adds Gaussian
noise of standard deviation ``noise_multiplier * max_norm``. An (epsilon, delta) guarantee holds for data sets that
differ by **adding or removing one record**; where a sample is all that a user contributed (``sample_ids``), by adding
or removing one user.

Two accountants: privacy loss distributions ("pld"), which are tight, and Rényi divergences ("rdp"), which are faster
and give a larger epsilon. Both are upper bounds. Approximations by a central limit theorem are none, and not offered.

References:
    Tight on Budget? Tight Bounds for r-Fold Approximate Differential Privacy (Meiser, Mohammadi, 2018),
    https://eprint.iacr.org/2017/1034. Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions
    (Doroshenko et al., 2022), https://arxiv.org/abs/2207.04380. Rényi Differential Privacy of the Sampled Gaussian
    Mechanism (Mironov, Talwar, Zhang, 2019), https://arxiv.org/abs/1908.10530.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from gradbatch.errors import UsageError
from gradbatch.privacy.bounds import (
    LEAST_NOISE,
    MOST_NOISE,
    SMALLEST_DELTA,
    Steps,
    calibrate,
    distribution_of,
    no_loss,
    rdp_epsilon,
)

Kind = Literal["pld", "rdp"]

# Where Rényi divergences say more there is no privacy to be had, and distributions take minutes and gigabytes.
_LARGEST_EPSILON, _LARGEST_TARGET = 500.0, 50.0


def epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: Kind = "pld"
) -> float:
    """Epsilon that a number of equal steps spends.

    Args:
        noise_multiplier: standard deviation of the noise in units of the clipping norm, 0 or more.
        sample_rate: probability with which each record joins a batch, 0 to 1, independently of all others.
        steps: number of steps, 0 or more; empty batches are steps too.
        delta: between 0 and 1, both excluded; far below one over the number of records.
        accountant: ``"pld"``, the tightest, or ``"rdp"``.

    Returns:
        Epsilon, for adding or removing one record.

    Raises:
        UsageError: an argument out of its range, dp-accounting is not installed, or a delta below 1e-9 with ``"pld"``.

    Edge cases: no step or a rate of 0 spends 0; no noise spends infinity; where ``"rdp"`` gives more than 500, its
    bound stands in for the tight one. Batches that were shuffled rather than drawn have no rate, and what this function
    says does not hold for them.

    Example:
        >>> from gradbatch import privacy
        >>> spent = privacy.epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5)
        >>> f"{spent:.3f}"
        '1.828'
    """
    spent = Accountant(accountant)
    spent.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, count=steps)
    return spent.epsilon(delta)


def noise_multiplier(
    *, target_epsilon: float, delta: float, sample_rate: float, steps: int, accountant: Kind = "pld"
) -> float:
    """The least noise with which a number of equal steps spends at most a target epsilon.

    Args:
        target_epsilon: above 0, for adding or removing one record.
        delta, sample_rate, steps, accountant: as for :func:`epsilon`.

    Returns:
        Standard deviation of the noise in units of the clipping norm, at most 1e-6 above what is needed, never below.

    Raises:
        UsageError: as :func:`epsilon`; a target above 50 with ``"pld"``; no noise found that is enough.

    Edge cases: where no record is ever drawn (no step, a rate of 0), 0.

    Example:
        >>> from gradbatch import privacy
        >>> noise = privacy.noise_multiplier(
        ...     target_epsilon=3.0, delta=1e-5, sample_rate=0.01, steps=1000, accountant="rdp"
        ... )
        >>> f"{noise:.3f}"
        '0.865'
    """
    _check_steps(0.0, sample_rate, steps)
    _check_delta(delta, accountant)
    if not (isinstance(target_epsilon, float | int) and 0 < target_epsilon < math.inf):
        raise UsageError(f"target_epsilon is {target_epsilon!r}; it is a number above 0")
    if accountant == "pld" and target_epsilon > _LARGEST_TARGET:
        raise UsageError(
            f"target_epsilon is {target_epsilon!r}; above {_LARGEST_TARGET:.0f} there is no privacy to be had, and the "
            'tight accountant takes minutes. Use the accountant "rdp"'
        )
    if steps == 0 or sample_rate == 0:
        return 0.0

    def is_enough(noise: float) -> bool:
        spent = epsilon(
            noise_multiplier=noise, sample_rate=sample_rate, steps=steps, delta=delta, accountant=accountant
        )
        return spent <= target_epsilon

    noise = calibrate("rdp", target_epsilon, delta, sample_rate, steps)
    if accountant == "pld":
        # Rényi divergences are cheap, and ask for a few percent more than is needed: there the dear search begins.
        guess, lower = noise, 0.9 * noise
        while is_enough(lower):
            guess, lower = lower, 0.8 * lower
        noise = calibrate("pld", target_epsilon, delta, sample_rate, steps, lower, guess)
    if not is_enough(noise):
        raise UsageError(
            f"epsilon {target_epsilon} at delta {delta} is finer than the accountant {accountant!r} resolves; ask for "
            "more"
        )
    return noise


class Accountant:
    """Keeps count of the steps taken, and says what they have spent.

    Steps may differ in noise and rate, as long as these do not depend on the data. What is spent is computed from the
    counts alone, so a run that was stopped and resumed reports exactly what it would have without.

    Args:
        kind: ``"pld"``, the tightest, or ``"rdp"``.

    Example:
        >>> from gradbatch import privacy
        >>> accountant = privacy.Accountant(kind="rdp")
        >>> for _ in range(100):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> accountant.steps, f"{accountant.epsilon(delta=1e-5):.3f}"
        (100, '1.214')
    """

    def __init__(self, kind: Kind = "pld") -> None:
        self.kind: Kind = _checked_kind(kind)
        self._counts: dict[tuple[float, float], int] = {}
        # The distribution of all steps but the last kind of step, which is the one that grows; and the last answer.
        self._before: tuple[list[Steps], Any] = ([], None)
        self._answer: tuple[list[Steps], float, float] | None = None

    def step(self, *, noise_multiplier: float, sample_rate: float, count: int = 1) -> None:
        """Record steps that were taken.

        Args:
            noise_multiplier, sample_rate: as for :func:`epsilon`.
            count: number of such steps, 0 or more.

        Raises:
            UsageError: an argument out of its range; nothing is recorded.
        """
        _check_steps(noise_multiplier, sample_rate, count)
        setting = (float(noise_multiplier), float(sample_rate))
        if count:
            self._counts[setting] = self._counts.get(setting, 0) + count

    @property
    def steps(self) -> int:
        """Number of steps recorded."""
        return sum(self._counts.values())

    def epsilon(self, delta: float) -> float:
        """Epsilon that the steps recorded so far have spent together.

        The same steps are not computed twice; one step more costs a tenth of a second or two with ``"pld"``, and
        next to nothing with ``"rdp"``.

        Args:
            delta: as for :func:`gradbatch.privacy.epsilon`.

        Returns:
            Epsilon, for adding or removing one record.

        Raises:
            UsageError: as :func:`gradbatch.privacy.epsilon`.
        """
        _check_delta(delta, self.kind)
        counts = self._counts.items()
        taken = [(min(noise, MOST_NOISE), rate, count) for (noise, rate), count in counts if rate > 0]
        if not taken:
            return 0.0
        if any(noise < LEAST_NOISE for noise, _, _ in taken):
            return math.inf
        if self._answer is None or self._answer[:2] != (taken, delta):
            self._answer = (taken, delta, self._compute(taken, delta))
        return self._answer[2]

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs: the kind, and noise, rate and count of the steps; fit for JSON."""
        return {
            "kind": self.kind,
            "steps": [[noise, rate, count] for (noise, rate), count in self._counts.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the steps of another accountant, in place of one's own.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            UsageError: a state of another kind of accountant, or no such state; nothing is changed.
        """
        if not isinstance(state, Mapping) or set(state) != {"kind", "steps"}:
            raise UsageError("not the state of a gradbatch.privacy.Accountant: it has a kind and steps")
        if state["kind"] != self.kind:
            raise UsageError(
                f"this state is of an accountant of kind {state['kind']!r}, this accountant is {self.kind!r}; "
                "the two report different epsilons for the same steps"
            )
        loaded = Accountant(self.kind)
        for noise, rate, count in state["steps"]:
            loaded.step(noise_multiplier=noise, sample_rate=rate, count=count)
        self._counts = loaded._counts

    def _compute(self, taken: list[Steps], delta: float) -> float:
        by_divergences = rdp_epsilon(taken, delta)
        if self.kind == "rdp" or by_divergences > _LARGEST_EPSILON:
            return by_divergences
        *earlier, last = taken
        known, distribution = self._before
        if distribution is None or earlier[: len(known)] != known:
            known, distribution = [], no_loss()
        for steps in earlier[len(known) :]:
            distribution = distribution.compose(distribution_of(*steps))
        self._before = (earlier, distribution)
        return float(distribution.compose(distribution_of(*last)).get_epsilon_for_delta(delta))


def _check_steps(noise_multiplier: float, sample_rate: float, count: int) -> None:
    if not (isinstance(noise_multiplier, float | int) and 0 <= noise_multiplier < math.inf):
        raise UsageError(
            f"noise_multiplier is {noise_multiplier!r}; it is the standard deviation of the noise over the clipping "
            "norm, a finite number of 0 or more"
        )
    if not (isinstance(sample_rate, float | int) and 0 <= sample_rate <= 1):
        raise UsageError(
            f"sample_rate is {sample_rate!r}; it is the probability with which a record joins a batch, 0 to 1"
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise UsageError(f"the number of steps is {count!r}; it is a whole number, 0 or more")


def _check_delta(delta: float, kind: Kind) -> None:
    if not (isinstance(delta, float | int) and 0 < delta < 1):
        raise UsageError(
            f"delta is {delta!r}; it is a probability between 0 and 1, both excluded, and far below one over the "
            "number of records"
        )
    if _checked_kind(kind) == "pld" and delta < SMALLEST_DELTA:
        raise UsageError(
            f"delta is {delta!r}; below {SMALLEST_DELTA} rounding in privacy loss distributions is as large as delta, "
            'and what they give is no bound. Use the accountant "rdp"'
        )


def _checked_kind(kind: Kind) -> Kind:
    if kind not in ("pld", "rdp"):
        raise UsageError(f'the accountant is {kind!r}; it is "pld", the tightest, or "rdp"')
    return kind
