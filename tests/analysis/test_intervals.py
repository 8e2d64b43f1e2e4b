"""Intervals cover the truth as often as they say, where samples and batches are drawn anew many times.

Each coverage is of many runs: its standard error is given beside it, and what it may be off by is three of these.
"""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchL2Grad, UsageError
from gradbatch.analysis import (
    BatchDotSum,
    NoiseScale,
    coherence,
    coherence_interval,
    confusion,
    diversity_interval,
    mean_interval,
    stiffness,
    stiffness_interval,
)


def plain(*shape: int, shift: float = 0.3) -> Tensor:
    return shift + torch.randn(*shape, 5, dtype=torch.double)


def mixed(*shape: int) -> Tensor:
    """One gradient in ten is ten times as large as the others."""
    return plain(*shape, shift=0.5) * torch.where(torch.rand(*shape, 1) < 0.1, 5.0, 0.5)


def parts(grads: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms, and dot products with the sum, of ``[..., N, P]``."""
    return grads.square().sum(-1), (grads * grads.sum(-2, keepdim=True)).sum(-1)


def covered(truth: float | Tensor, low: Tensor, high: Tensor) -> float:
    return float(((low <= truth) & (truth <= high)).double().mean())


@pytest.mark.parametrize("kind", [plain, mixed], ids=["plain", "mixed"])
def test_coherence_and_diversity_are_covered(kind: object) -> None:
    assert callable(kind)
    squares, dots = parts(kind(2000, 60))
    # rho by hand: the coordinates have mean 0.3 and variance 1, or 0.5 and 1, times a scale of mean 0.95, square 2.725.
    rho = 0.09 / 1.09 if kind is plain else 0.25 * 0.95**2 / (1.25 * 2.725)
    for level, error in ((0.8, 0.009), (0.95, 0.005)):
        found = coherence_interval(squares, dots, level)
        assert covered(1 + 59 * rho, *found) == pytest.approx(level, abs=3 * error)
        low, high = diversity_interval(squares, dots, level)
        assert torch.equal(low, 1 / found[1]) and torch.equal(high, 1 / found[0])
    assert covered(coherence(squares.sum(-1), dots.sum(-1)), *found) == 1


def test_without_a_common_gradient_the_intervals_are_too_wide_and_not_too_narrow() -> None:
    grads = torch.randn(1000, 20, 20, dtype=torch.double)
    # Coherence of what has no common gradient is 1. The standard error of 95% of 1,000 is 0.7%.
    assert covered(1, *coherence_interval(*parts(grads))) > 0.95 - 0.02
    angles = [stiffness_interval(g @ g.mT, torch.zeros(20))[1:] for g in grads[:300]]
    low, high = map(torch.stack, zip(*angles, strict=True))
    assert covered(0, low, high) > 0.95  # 99% of 300


def test_coherence_of_many_batches_is_that_of_the_noise_scale() -> None:
    noise, sums = NoiseScale(), torch.zeros(2, dtype=torch.double)
    for grads in plain(50, 8):
        squares, dots = parts(grads)
        noise.update(8, squares.sum(), dots.sum())
        sums += torch.stack([squares.sum(), dots.sum()])
    low, high = (1 + 7 / (1 + end) for end in noise.interval())
    assert high < coherence(*sums) < low
    torch.testing.assert_close(1 + 7 / (1 + noise.value()), coherence(*sums), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["cosine", "sign"])
def test_agreement_within_and_between_classes_is_covered(kind: Literal["cosine", "sign"]) -> None:
    means = torch.tensor([[1.0, 0, 0.3], [0.2, 1, 0]], dtype=torch.double)
    labels = torch.tensor([5] * 18 + [2] * 12)

    def draw(place: int, count: int) -> Tensor:
        return means[place] + torch.randn(count, 3, dtype=torch.double)

    big = [F.normalize(draw(place, 1500), dim=1) for place in (1, 0)]
    angles = torch.stack([torch.stack([a @ b.mT for b in big]) for a in big])
    agree = angles if kind == "cosine" else angles.sign()
    # Half of a pair's row: of one class, the diagonal is left out.
    counts = torch.tensor([[1500 * 1499, 1500**2], [1500**2, 1500 * 1499]])
    truth = (agree.sum((-2, -1)) - 1500 * torch.eye(2)) / counts
    found = []
    for _ in range(400):
        grads = torch.cat([draw(0, 18), draw(1, 12)])
        classes, low, high = stiffness_interval(grads @ grads.mT, labels, kind)
        found.append((low, high))
    assert classes.tolist() == [2, 5]
    lows, highs = map(torch.stack, zip(*found, strict=True))
    for a, b in ((0, 0), (0, 1), (1, 1)):
        # The standard error of 400 runs is 1.1%.
        assert covered(truth[a, b], lows[:, a, b], highs[:, a, b]) == pytest.approx(0.95, abs=0.033)
    torch.testing.assert_close((low, high), (low.mT, high.mT))


@pytest.mark.parametrize("kind", ["cosine", "sign"])
def test_the_jackknife_leaves_out_one_sample_after_another(kind: Literal["cosine", "sign"]) -> None:
    grads, labels = plain(24), torch.tensor([0, 1] * 12)
    grads[3] = 0
    _, low, high = stiffness_interval(grads @ grads.mT, labels, kind)
    for a, b in ((0, 0), (0, 1), (1, 1)):
        variance = 0.0
        for label in {a, b}:
            inside = [n for n in range(24) if labels[n] == label and n != 3]
            others = [[m for m in range(24) if m != n] for n in inside]
            left = [stiffness(grads[o] @ grads[o].mT, labels[o], kind)[1][a, b] for o in others]
            variance += float(torch.stack(left).var(unbiased=False)) * (len(inside) - 1)
        middle = stiffness(grads @ grads.mT, labels, kind)[1][a, b]
        assert float(low[a, b] + high[a, b]) / 2 == pytest.approx(float(middle), rel=1e-9)
        # Student's quantile, with 10 or 11 degrees of freedom, or some between 10 and 21.
        assert 2.07 < float(high[a, b] - middle) / math.sqrt(variance) < 2.24

    squares, dots = parts(grads)
    left = [coherence(*(p.sum() for p in parts(grads[[m for m in range(24) if m != n]]))) for n in range(24)]
    # Of one sample less: to compare, without what makes coherence grow with N.
    variance = float(torch.stack(left).sub(1).div(22).var(unbiased=False)) * 23 * 23**2
    low, high = coherence_interval(squares, dots)
    assert float(high - coherence(squares.sum(), dots.sum())) == pytest.approx(
        2.069 * math.sqrt(variance), rel=1e-3
    )


def test_few_pairs_are_worse_than_the_worst_that_was_seen() -> None:
    grads = plain(1000, 32)
    gram = grads @ grads.mT
    worst = torch.stack([confusion(each) for each in gram])
    pairs = (plain(200_000) * plain(200_000)).sum(1).sort().values
    worse = torch.searchsorted(pairs, -worst) / len(pairs)
    assert float((worse <= 1 - 0.05 ** (1 / 16)).double().mean()) >= 0.95


def test_mean_evidence_is_covered_by_batches_and_not_by_the_elements_of_one() -> None:
    # Gradients of a linear layer's weight where nothing is left but noise: outer products.
    inputs, errors = torch.randn(400, 16, 32, 5, 1).abs(), torch.randn(400, 16, 32, 1, 4)
    grads = (inputs * errors).flatten(3).double()
    ratios = 32 * grads.mean(2).square() / grads.var(2)
    evidence = 1 - ratios.mean(2)
    truth = float(evidence.mean())
    assert truth == pytest.approx(-2 / 29, abs=0.02)
    assert covered(truth, *mean_interval(evidence)) == pytest.approx(0.94, abs=0.033)  # standard error 1.1%
    half = 1.96 * (ratios.var(2) / 20).sqrt()
    assert covered(truth, evidence - half, evidence + half) < 0.7, "elements are not independent"


def test_where_nothing_can_be_said_intervals_are_as_wide_as_can_be() -> None:
    assert mean_interval(torch.ones(2, 3))[1].tolist() == [math.inf] * 2
    assert [float(end) for end in mean_interval(torch.tensor([1, 2, 3, 4, math.inf]))] == [
        -math.inf,
        math.inf,
    ]
    assert [float(end) for end in mean_interval(torch.ones(0))] == [-math.inf, math.inf]
    for squares in (torch.ones(3), torch.zeros(6), torch.tensor([1.0, 1, 1, math.nan])):
        assert [float(end) for end in coherence_interval(squares, squares)] == [0, len(squares)]
        assert float(diversity_interval(squares, squares)[1]) == math.inf
    _, low, high = stiffness_interval(torch.ones(8, 8), torch.tensor([0] * 6 + [1] * 2))
    assert bool((low == -1).all()) and bool((high == 1).all()), "all agree equally, or are too few"
    silent = torch.zeros(5, 5)
    assert [float(end) for end in stiffness_interval(silent, torch.zeros(5))[1:]] == [-1, 1]
    assert stiffness_interval(torch.zeros(0, 0), torch.zeros(0))[1].shape == (0, 0)
    for call in (mean_interval, lambda x, level: coherence_interval(x, x, level)):
        with pytest.raises(UsageError, match=r"level is 95; it is the chance"):
            call(torch.rand(5), 95)
    with pytest.raises(UsageError, match=r"squared norms \[5\] and dots \[4\]"):
        coherence_interval(torch.ones(5), torch.ones(4))


def test_the_intervals_take_what_a_backward_pass_gives() -> None:
    model = gradbatch.extend(torch.nn.Linear(4, 3).double())
    x = torch.randn(20, 4, dtype=torch.double) + 1
    results = gradbatch.backward(model, model(x).square().sum(1), BatchL2Grad(), BatchDotSum())
    grads = (2 * model(x)[:, :, None] * F.pad(x, (0, 1), value=1.0)[:, None]).flatten(1).detach()
    for found, expected in zip(
        coherence_interval(results[BatchL2Grad].total(), results[BatchDotSum].total()),
        coherence_interval(*parts(grads)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
