r"""Tests of whether a batch is large enough, and rules for its size, from the sums of one batch.

All take the batch's ``N``, the sum of squared norms :math:`\sum_n \lVert g_n \rVert^2`, the squared norm of the sum
:math:`\lVert \sum_n g_n \rVert^2`, and where needed the sum of squared dot products
:math:`\sum_n \langle g_n, \sum_m g_m \rangle^2`; a :class:`~gradbatch.analysis.Record` holds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradbatch.errors import UsageError


@dataclass(frozen=True)
class BatchTest:
    """How a batch did in a test of its size.

    Args:
        ratio: of the scatter of its mean gradient to what the test allows; NaN where nothing can be said.
        batch_size: by this batch, the size at which the test would just be passed.
    """

    ratio: float
    batch_size: float

    @property
    def passed(self) -> bool:
        """Whether the batch is large enough by the test."""
        return self.ratio <= 1


def norm_test(count: int, sum_of_squares: float, square_of_sum: float, theta: float = 0.9) -> BatchTest:
    r"""Whether the mean gradient is as close to the true one as a fraction of its own norm.

    .. math:: \frac{\widehat{\operatorname{tr} \Sigma}}{N} \le \theta^2 \lVert \bar g \rVert^2

    The norm of the mean is biased by the noise itself (:func:`~gradbatch.analysis.squared_gradient` is not), so a test
    that is passed narrowly is passed in part by noise.

    Args:
        count: ``N``.
        sum_of_squares, square_of_sum: of the batch.
        theta: the fraction.

    Raises:
        UsageError: ``theta`` is not positive.

    Edge cases: NaN, and not passed, for fewer than two samples and for gradients that are zero or not finite.

    References:
        Sample Size Selection in Optimization Methods for Machine Learning (Byrd et al., 2012),
        https://doi.org/10.1007/s10107-012-0572-5

    Example:
        >>> from gradbatch.analysis import norm_test
        >>> norm_test(2, sum_of_squares=14.0, square_of_sum=20.0, theta=1.0)  # of [1, 0] and [3, 2]
        BatchTest(ratio=0.4, batch_size=0.8)
    """
    if count < 2:
        return _nothing(theta, "theta")
    variance = (sum_of_squares - square_of_sum / count) / (count - 1)
    return _test(count, variance, square_of_sum / count**2, theta, "theta")


def inner_product_test(count: int, square_of_sum: float, dot_squares: float, theta: float = 0.9) -> BatchTest:
    r"""Whether a step along the mean gradient goes downhill with high probability.

    .. math:: \frac{1}{N (N - 1)} \sum_n \left( \langle g_n, \bar g \rangle - \lVert \bar g \rVert^2 \right)^2
        \le \theta^2 \lVert \bar g \rVert^4

    Weaker than the norm test: noise at right angles to the gradient is not counted.

    Args:
        count: ``N``.
        square_of_sum, dot_squares: of the batch.
        theta: half width of what is allowed, in parts of the squared norm.

    Raises:
        UsageError: ``theta`` is not positive.

    Edge cases: as for :func:`norm_test`.

    References:
        Adaptive Sampling Strategies for Stochastic Optimization (Bollapragada, Byrd, Nocedal, 2018),
        https://arxiv.org/abs/1710.11258

    Example:
        >>> from gradbatch.analysis import inner_product_test
        >>> inner_product_test(2, square_of_sum=20.0, dot_squares=272.0, theta=1.0).ratio  # of [1, 0] and [3, 2]
        0.36
    """
    if count < 2:
        return _nothing(theta, "theta")
    variance = (dot_squares - square_of_sum * square_of_sum / count) / (count**2 * (count - 1))
    square = square_of_sum / count**2
    return _test(count, variance, square * square, theta, "theta")


def orthogonality_test(
    count: int,
    sum_of_squares: float,
    square_of_sum: float,
    dot_squares: float,
    nu: float = math.tan(math.radians(80)),
) -> BatchTest:
    r"""Whether what is at right angles to the mean gradient averages out; goes with :func:`inner_product_test`.

    .. math:: \frac{1}{N (N - 1)} \sum_n \Big\lVert g_n
        - \frac{\langle g_n, \bar g \rangle}{\lVert \bar g \rVert^2} \bar g \Big\rVert^2
        \le \nu^2 \lVert \bar g \rVert^2

    Args:
        count: ``N``.
        sum_of_squares, square_of_sum, dot_squares: of the batch.
        nu: tangent of the largest angle between the mean gradient and the true one.

    Raises:
        UsageError: ``nu`` is not positive.

    Edge cases: as for :func:`norm_test`.

    References:
        Adaptive Sampling Strategies for Stochastic Optimization (Bollapragada, Byrd, Nocedal, 2018),
        https://arxiv.org/abs/1710.11258
    """
    if count < 2 or not square_of_sum > 0:
        return _nothing(nu, "nu")
    variance = (sum_of_squares - dot_squares / square_of_sum) / (count - 1)
    return _test(count, variance, square_of_sum / count**2, nu, "nu")


def cabs_batch_size(variance: float, loss: float, learning_rate: float) -> float:
    r"""The batch size that fits the learning rate: :math:`\alpha \operatorname{tr} \Sigma / L`.

    For stochastic gradient descent on a loss whose least value is zero; it grows as the loss falls.

    Args:
        variance: :math:`\operatorname{tr} \Sigma`, such as :meth:`NoiseScale.variance
            <gradbatch.analysis.NoiseScale.variance>`.
        loss: the mean loss ``L``.
        learning_rate: :math:`\alpha`.

    Returns: in samples; round it, and bound it by what the memory holds.

    Raises:
        UsageError: the loss or the learning rate is not positive, or the variance is negative.

    References:
        Coupling Adaptive Batch Sizes with Learning Rates (Balles, Romero, Hennig, 2017),
        https://arxiv.org/abs/1612.05086

    Example:
        >>> from gradbatch.analysis import cabs_batch_size
        >>> cabs_batch_size(variance=100.0, loss=0.5, learning_rate=0.1)
        20.0
    """
    if not (loss > 0 and learning_rate > 0 and variance >= 0):
        raise UsageError(
            f"variance {variance!r}, loss {loss!r}, learning rate {learning_rate!r}: the rule is for a loss above 0 "
            "(its least value), a learning rate above 0, and a variance of 0 or more"
        )
    return learning_rate * variance / loss


def _test(count: int, variance: float, scale: float, bound: float, name: str) -> BatchTest:
    """The test ``variance / count <= bound² scale``."""
    if not bound > 0:
        raise UsageError(f"{name} is {bound!r}; it is positive")
    allowed = bound**2 * scale
    if not (0 < allowed < math.inf and math.isfinite(variance)):
        return BatchTest(math.nan, math.nan)
    # A sum of squares, below zero by rounding alone.
    needed = max(variance, 0.0) / allowed
    return BatchTest(needed / count, needed)


def _nothing(bound: float, name: str) -> BatchTest:
    return _test(1, math.nan, math.nan, bound, name)
