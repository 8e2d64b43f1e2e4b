"""Agreement between samples against pair by pair definitions."""

import itertools
import math

import pytest
import torch
from torch import nn

import gradbatch
from gradbatch import BatchDotGrad, UsageError
from gradbatch.analysis import coherence, confusion, cosines, diversity, stiffness


def gram_and_rows() -> tuple[torch.Tensor, torch.Tensor]:
    model = gradbatch.extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    losses = model(torch.randn(9, 5, dtype=torch.double)).square().sum(1)
    gram = gradbatch.backward(model, losses, BatchDotGrad())[BatchDotGrad].total()
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    return gram, torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_agreement_is_that_of_materialised_gradients() -> None:
    gram, grads = gram_and_rows()
    squares, square = grads.square().sum(), grads.sum(0).square().sum()
    assert float(coherence(gram.trace(), gram.sum())) == pytest.approx(float(square / squares), rel=1e-9)
    assert float(diversity(gram.trace(), gram.sum())) == pytest.approx(float(squares / square), rel=1e-9)
    lowest = min(float(grads[i] @ grads[j]) for i, j in itertools.combinations(range(9), 2))
    assert float(confusion(gram)) == pytest.approx(max(0.0, -lowest), rel=1e-9)
    expected = torch.cosine_similarity(grads[:, None], grads[None], dim=2)
    torch.testing.assert_close(cosines(gram), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["sign", "cosine"])
def test_stiffness_is_the_mean_over_pairs_of_different_samples(kind: str) -> None:
    gram, grads = gram_and_rows()
    labels = torch.tensor([4, 1, 1, 4, 2, 1, 4, 1, 4])
    classes, means = stiffness(gram, labels, kind)  # type: ignore[arg-type]
    assert classes.tolist() == [1, 2, 4]
    for a, b in itertools.product(range(3), range(3)):
        values = []
        for i, j in itertools.permutations(range(9), 2):
            if labels[i] == classes[a] and labels[j] == classes[b]:
                cosine = float(torch.cosine_similarity(grads[i], grads[j], dim=0))
                values.append(math.copysign(1, cosine) if kind == "sign" else cosine)
        expected = sum(values) / len(values) if values else math.nan
        assert float(means[a, b]) == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_extremes() -> None:
    equal, apart = torch.ones(4, 4), torch.eye(4)
    assert (
        float(coherence(equal.trace(), equal.sum())) == 4
        and float(coherence(apart.trace(), apart.sum())) == 1
    )
    assert float(confusion(equal)) == 0 and float(confusion(torch.ones(1, 1))) == 0
    assert float(confusion(torch.ones(0, 0))) == 0
    silent = torch.diag(torch.tensor([1.0, 0.0, 1.0]))
    assert bool(cosines(silent)[1].isnan().all()) and float(cosines(silent)[0, 2]) == 0
    _, means = stiffness(silent, torch.tensor([0, 0, 0]))
    assert float(means) == 0, "the silent sample is left out"
    classes, means = stiffness(torch.ones(0, 0), torch.ones(0))
    assert classes.shape == (0,) and means.shape == (0, 0)


def test_what_is_no_gram_matrix_is_refused() -> None:
    for call in (cosines, confusion, lambda gram: stiffness(gram, torch.ones(2))):
        with pytest.raises(UsageError, match=r"a Gram matrix is \[N, N\], not \[2, 3\]"):
            call(torch.ones(2, 3))
    with pytest.raises(UsageError, match=r"labels \[3\] for a Gram matrix \[2, 2\]"):
        stiffness(torch.ones(2, 2), torch.ones(3))
    with pytest.raises(UsageError, match="kind is 'angle'"):
        stiffness(torch.ones(2, 2), torch.ones(2), "angle")  # type: ignore[arg-type]
