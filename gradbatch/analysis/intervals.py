"""Confidence intervals, from a few sums and without a statistics package."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from gradbatch.errors import UsageError

# Below, Student's distribution is far from the expansion used here, and from anything one would act on.
FEWEST = 4


def student_quantile(level: float, degrees: Tensor) -> Tensor:
    r"""Half width of a two-sided interval in standard errors, by Student's distribution.

    The expansion of the quantile in :math:`1 / \nu` around the normal one, :math:`z`, to third order: within 1% from
    three degrees of freedom on, at 95%.

    Args:
        level: that the interval covers the truth with, between 0 and 1.
        degrees: of freedom, :math:`\nu`; any shape, float64.

    Returns: of the same shape.

    Raises:
        UsageError: the level is not between 0 and 1.

    Edge cases: infinite below three degrees of freedom.

    References:
        Handbook of Mathematical Functions (Abramowitz, Stegun, 1964), 26.7.5.

    Example:
        >>> import torch
        >>> from gradbatch.analysis.intervals import student_quantile
        >>> student_quantile(0.95, torch.tensor([10.0, 1e9], dtype=torch.double))
        tensor([2.2280, 1.9600], dtype=torch.float64)
    """
    if not 0 < level < 1:
        raise UsageError(
            f"level is {level!r}; it is the chance to cover the truth, between 0 and 1, such as 0.95"
        )
    z = NormalDist().inv_cdf((1 + level) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    quantile = z + first / degrees + second / degrees**2 + third / degrees**3
    return torch.where(degrees >= FEWEST - 1, quantile, math.inf)


def fieller(
    numerator: Tensor, denominator: Tensor, covariance: Tensor, quantile: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Confidence interval of a ratio of two means, :math:`\rho = b / a`.

    All :math:`\rho` for which :math:`b - \rho a` is within ``quantile`` standard errors of zero. Unlike the interval of
    the delta method it is right where the denominator is noisy.

    Args:
        numerator: ``b``; any shape, float64.
        denominator: ``a``, positive in truth; of the same shape.
        covariance: of the two means, ``[*shape, 2, 2]``, the denominator first.
        quantile: half width in standard errors.

    Returns: lower and upper ends, of the shape.

    Edge cases: from minus to plus infinity where the denominator may be zero.

    References:
        Some problems in interval estimation (Fieller, 1954), https://www.jstor.org/stable/2984043
    """
    a, b, square = denominator, numerator, quantile**2
    leading = a**2 - square * covariance[..., 0, 0]
    middle = a * b - square * covariance[..., 0, 1]
    constant = b**2 - square * covariance[..., 1, 1]
    # Never negative but by rounding: the estimate itself is in the interval.
    root = (middle**2 - leading * constant).clamp_min(0).sqrt()
    bounded = (leading > 0) & quantile.isfinite()
    low = torch.where(bounded, (middle - root) / leading, -math.inf)
    high = torch.where(bounded, (middle + root) / leading, math.inf)
    return low, high


def mean_interval(values: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Confidence interval of what batches say on average, by Student's distribution.

    For a number that each batch gives anew, such as the evidence for stopping. It takes batches for independent draws
    from one state of the model, and asks nothing of what is inside a batch: elements, layers and samples may depend on
    each other as they like.

    Args:
        values: one a batch, ``[*shape, B]``.
        level: chance to cover the mean over all batches of this size, if these are many or their values near normal.

    Returns: lower and upper ends, ``[*shape]``, float64.

    Raises:
        UsageError: the level is not between 0 and 1.

    Edge cases: from minus to plus infinity for fewer than four batches, and where one is not finite.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import mean_interval
        >>> mean_interval(torch.tensor([0.1, -0.3, -0.2, 0.0, -0.1]))
        (tensor(-0.2958, dtype=torch.float64), tensor(0.0958, dtype=torch.float64))
    """
    known = values.detach().to("cpu", torch.double)
    count, mean = known.shape[-1], known.mean(-1)
    error = ((known - mean[..., None]).square().mean(-1) / (count - 1)).sqrt()
    half = error * student_quantile(level, torch.tensor(count - 1.0))
    return ends(mean, half, -math.inf, math.inf)


def ends(middle: Tensor, half: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    """Both ends of an interval, no further than ``least`` and ``most``, and there where the width is not known."""
    known = half.isfinite()
    low = torch.where(known, middle - half, least).clamp_min(least)
    return low, torch.where(known, middle + half, most).clamp_max(most)


def jackknife_variance(without: Tensor) -> Tensor:
    r"""Variance of an estimate, from the estimates that leave out one sample each.

    .. math:: \frac{N - 1}{N} \sum_n \big( \hat\theta_{-n} - \bar\theta \big)^2

    Args:
        without: the estimates without each sample, ``[*shape, N]``.

    Returns: ``[*shape]``.

    Edge cases: on average not too small, and too large where the estimate is of pairs of samples that have nothing in
    common: twice as large where that is all there is. An interval is then too wide.

    References:
        The Jackknife Estimate of Variance (Efron, Stein, 1981), https://doi.org/10.1214/aos/1176345462
    """
    return (without.shape[-1] - 1) * (without - without.mean(-1, keepdim=True)).square().mean(-1)
