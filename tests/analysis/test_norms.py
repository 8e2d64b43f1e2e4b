"""Quantiles of norms, and how well they are known."""

import math

import pytest
import torch

from gradbatch import UsageError
from gradbatch.analysis import norm_histogram, norm_quantiles, quantile_interval
from gradbatch.analysis.norms import LEVELS


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_quantiles_are_those_of_torch(count: int) -> None:
    norms = torch.rand(count, dtype=torch.double)
    expected = torch.quantile(norms, torch.tensor(LEVELS, dtype=torch.double))
    torch.testing.assert_close(norm_quantiles(norms), expected)


def test_what_is_not_finite_is_left_out() -> None:
    norms = torch.tensor([3.0, math.nan, 1.0, math.inf, 2.0])
    assert norm_quantiles(norms, (0.0, 0.5, 1.0)).tolist() == [1, 2, 3]
    assert bool(norm_quantiles(norms[1:2]).isnan().all())
    assert bool(norm_quantiles(norms[:0]).isnan().all())


@pytest.mark.parametrize("at", [0.5, 0.9])
def test_the_interval_covers_the_true_quantile_at_least_as_often_as_it_says(at: float) -> None:
    truth, runs = -math.log(1 - at), 1000
    covered = 0
    for norms in torch.empty(runs, 60, dtype=torch.double).exponential_():
        low, high = quantile_interval(norms, at)
        covered += low <= truth <= high
    assert 0.94 <= covered / runs <= 0.99  # exact from 95% on; the numbers are discrete


def test_few_norms_do_not_bound_the_quantile() -> None:
    assert quantile_interval(torch.ones(3), 0.5) == (0.0, math.inf)
    assert quantile_interval(torch.ones(0), 0.5) == (0.0, math.inf)
    assert quantile_interval(torch.tensor([math.nan] * 50 + [1.0] * 50), 0.5) == (1.0, math.inf)


def test_what_is_no_vector_of_norms_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shape \[2, 2\]"):
        norm_quantiles(torch.ones(2, 2))
    with pytest.raises(UsageError, match="levels are"):
        norm_quantiles(torch.ones(2), (50,))
    with pytest.raises(UsageError, match="two numbers between 0 and 1"):
        quantile_interval(torch.ones(2), 50)


def test_a_histogram_counts_each_norm_in_its_half_octave() -> None:
    norms = torch.cat([torch.randn(500, dtype=torch.double).exp(), torch.tensor([0.0, math.inf, math.nan])])
    first, counts = norm_histogram(norms)
    assert sum(counts) == 500
    for place, count in enumerate(counts):
        low, high = 2 ** ((first + place) / 2), 2 ** ((first + place + 1) / 2)
        assert count == int(((norms >= low) & (norms < high)).sum())
    assert counts[0] and counts[-1]
    first, counts = norm_histogram(torch.tensor([1e-30, 1e-20, 1.0]))
    assert len(counts) == 64 and counts[0] == 2 and first == -63
    assert norm_histogram(torch.zeros(3)) == (0, [])
    with pytest.raises(UsageError, match=r"norms has shape \[2, 2\]"):
        norm_histogram(torch.ones(2, 2))
