"""How the norms of a batch's gradients are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.errors import UsageError

LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
MOST_BINS = 64


def norm_quantiles(norms: Tensor, levels: Sequence[float] = LEVELS) -> Tensor:
    """Quantiles of the norms of samples' gradients, linear between neighbours.

    Args:
        norms: ``[N]``, norms and not their squares.
        levels: which quantiles, from 0 (the smallest) over 0.5 (the median) to 1 (the largest).

    Returns: ``[len(levels)]``, float64.

    Raises:
        UsageError: the norms are no vector, or a level is not between 0 and 1.

    Edge cases: norms that are not finite are left out; NaN where none is left.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import norm_quantiles
        >>> norm_quantiles(torch.tensor([1.0, 2.0, 9.0, float("inf")]), (0.0, 0.5, 1.0))
        tensor([1., 2., 9.], dtype=torch.float64)
    """
    if norms.dim() != 1:
        raise UsageError(f"norms has shape {list(norms.shape)}; expected [N], one norm a sample")
    if not all(0 <= level <= 1 for level in levels):
        raise UsageError(f"levels are {tuple(levels)}; each is between 0 and 1")
    finite = norms.detach().to("cpu", torch.double)
    finite = finite[finite.isfinite()].sort().values
    if not len(finite):
        return torch.full((len(levels),), math.nan, dtype=torch.double)
    # Not torch.quantile, which takes at most 16 million numbers.
    place = torch.tensor(levels, dtype=torch.double) * (len(finite) - 1)
    below = place.floor().long()
    return torch.lerp(finite[below], finite[(below + 1).clamp_max(len(finite) - 1)], place - below)


def norm_histogram(norms: Tensor) -> tuple[int, list[int]]:
    """How many norms there are in each half octave.

    Bin ``i`` is from ``2 ** (i / 2)`` up to ``2 ** ((i + 1) / 2)``, whatever the norms, so that the histograms of
    several batches add up.

    Args:
        norms: ``[N]``, norms and not their squares.

    Returns: the number of the first bin, and the counts from there on.

    Raises:
        UsageError: the norms are no vector.

    Edge cases: norms that are zero or not finite are left out; those more than 32 octaves below the largest are counted
    there. No counts where none is left.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import norm_histogram
        >>> norm_histogram(torch.tensor([1.0, 1.1, 2.5, 0.0]))
        (0, [2, 0, 1])
    """
    if norms.dim() != 1:
        raise UsageError(f"norms has shape {list(norms.shape)}; expected [N], one norm a sample")
    known = norms.detach().to("cpu", torch.double)
    bins = (2 * known[(known > 0) & known.isfinite()].log2()).floor().long()
    if not len(bins):
        return 0, []
    first = max(int(bins.min()), int(bins.max()) - MOST_BINS + 1)
    return first, torch.bincount((bins - first).clamp_min(0)).tolist()


def quantile_interval(norms: Tensor, at: float, level: float = 0.95) -> tuple[float, float]:
    r"""Confidence interval of a quantile of the distribution that the samples were drawn from.

    Between two of the norms themselves, whatever the distribution: how many of ``N`` norms lie below the true quantile
    is binomial.

    Args:
        norms: ``[N]``, independent.
        at: which quantile, between 0 and 1.
        level: least chance to cover the truth.

    Returns: lower and upper end.

    Raises:
        UsageError: the norms are no vector, or ``at`` or ``level`` is not between 0 and 1.

    Edge cases: an end is 0 or infinite where ``N`` norms are too few to bound it. Norms that are not finite count as
    larger than any other.

    References:
        Nonparametric confidence and tolerance intervals (Hahn, Meeker: Statistical Intervals, 1991), chapter 5.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import quantile_interval
        >>> quantile_interval(torch.arange(1.0, 101.0), 0.5)
        (40.0, 61.0)
    """
    if norms.dim() != 1 or not (0 < at < 1 and 0 < level < 1):
        raise UsageError(
            f"norms {list(norms.shape)}, at {at!r}, level {level!r}; expected [N] and two numbers between 0 and 1"
        )
    count = len(norms)
    ordered = (
        norms.detach()
        .to("cpu", torch.double)
        .nan_to_num(nan=math.inf, posinf=math.inf)
        .sort()
        .values.tolist()
    )
    low = _most_below((1 - level) / 2, count, at)
    high = count - _most_below((1 - level) / 2, count, 1 - at)
    return (ordered[low - 1] if low > 0 else 0.0), (ordered[high] if high < count else math.inf)


def _most_below(chance: float, count: int, at: float) -> int:
    """Largest ``k`` with at most this chance that fewer than ``k`` of ``count`` lie below the quantile."""
    total = 0.0
    for k in range(count + 1):
        logarithm = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        total += math.exp(logarithm + k * math.log(at) + (count - k) * math.log1p(-at))
        if total > chance:
            return k
    return count
