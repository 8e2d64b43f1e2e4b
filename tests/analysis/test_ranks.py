"""What several ranks measured adds up to what one process would have measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbatch.analysis import NoiseScale, RandomProjection, read_log
from gradbatch.analysis.parts import part_noise
from gradbatch.analysis.summary import whole_noise
from tests.analysis import rank_cases as cases
from tests.privacy.processes import Processes

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes(2)
    yield started
    started.close()


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    rows = [
        torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), list(model.parameters()))
        for n in range(len(x))
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def alone() -> dict[str, NoiseScale]:
    """Training on all data in one process, by plain autograd; each rank's share is a batch."""
    model = cases.network()
    noises = {"noise": NoiseScale(), "layers": NoiseScale((2,)), "groups": NoiseScale((1,))}
    for k in range(cases.STEPS):
        grads = one_by_one(model, *cases.batch(k))
        for rank in (0, 1):
            own = [grad[cases.share(rank)] for grad in grads]
            squares = torch.stack([grad.square().sum() for grad in own])
            square = torch.stack([grad.sum(0).square().sum() for grad in own])
            noises["noise"].update(cases.SHARE, squares.sum(), square.sum())
            noises["layers"].update(cases.SHARE, squares.view(2, 2).sum(1), square.view(2, 2).sum(1))
            noises["groups"].update(cases.SHARE, squares[1::2].sum()[None], square[1::2].sum()[None])
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= cases.RATE * grad.mean(0)
    return noises


def test_running_noise_scales_of_two_ranks_add_up_to_those_of_one_process(
    processes: Processes, tmp_path: Path
) -> None:
    expected = alone()
    for found in processes.run(cases.monitored, str(tmp_path)):
        for name, noise in expected.items():
            for tensor, wanted in zip(found[name], (noise.value(), *noise.interval()), strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=0)

    log = read_log(tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    assert [len(rank) for rank in log.ranks] == [cases.STEPS, cases.STEPS]
    pooled = (
        whole_noise(log.records),
        part_noise(log, log.records)[1],
        part_noise(log, log.records, "group")[1],
    )
    for noise, wanted in zip(pooled, expected.values(), strict=True):
        torch.testing.assert_close(noise.variance(), wanted.variance(), rtol=1e-9, atol=0)
        torch.testing.assert_close(noise.squared_gradient(), wanted.squared_gradient(), rtol=1e-9, atol=0)


def test_scores_fisher_diagonals_and_features_of_two_ranks_are_those_of_one_process(
    processes: Processes,
) -> None:
    model = cases.network()
    grads = one_by_one(model, *cases.batch(0))
    names = [name for name, _ in model.named_parameters()]
    features = []
    for name, grad in zip(names, grads, strict=True):
        a, b = (sign.double() for sign in RandomProjection(16).of(name).signs(grad.shape[1:]))
        features.append(torch.einsum("kr,kc,nrc->nk", a, b, grad.reshape(12, a.shape[1], b.shape[1])) / 4)
    for found in processes.run(cases.collected):
        norms = torch.cat([grad.flatten(1) for grad in grads], 1).norm(dim=1)
        torch.testing.assert_close(found["scores"], norms, rtol=1e-9, atol=0)
        for name, grad in zip(names, grads, strict=True):
            torch.testing.assert_close(found["fisher"][name], grad.square().mean(0), rtol=1e-9, atol=0)
        torch.testing.assert_close(found["features"], torch.stack(features).sum(0), rtol=1e-9, atol=1e-12)


def test_statistics_of_ranks_with_unequal_shares_are_those_of_all_samples_in_one_batch(
    processes: Processes, tmp_path: Path
) -> None:
    model, (x, y) = cases.network(), cases.batch(0)
    chosen = [n for share in cases.UNEQUAL for n in range(12)[share]]
    each = one_by_one(model, x, y)
    grads = torch.cat([grad.flatten(1) for grad in each], 1)[chosen]
    labels, n = y[chosen], len(chosen)
    mean, variance, norms = grads.mean(0), grads.var(0), grads.norm(dim=1)
    along = grads @ mean
    aside = grads - along[:, None] / mean.square().sum() * mean
    angles = F.cosine_similarity(grads[:, None], grads[None], dim=2)
    apart, classes = ~torch.eye(n, dtype=torch.bool), labels.unique()
    between = [
        [angles[apart & (labels[:, None] == a) & (labels == b)].mean() for b in classes] for a in classes
    ]
    # Of each rank the deviations from its own mean, by its degrees of freedom.
    shares = [grads[:5], grads[5:]]
    deviations = sum((share - share.mean(0)).square().sum() for share in shares)
    loss = F.cross_entropy(model(x[chosen]), labels).detach()
    expected = {
        "diversity": norms.square().sum() / grads.sum(0).square().sum(),
        "confusion": -(grads @ grads.mT)[apart].min(),
        "cosines": angles,
        "stiffness": torch.tensor(between),
        "cabs": cases.RATE * deviations / (n - 2) / loss,
        "evidence": 1 - n * (mean.square() / variance).mean(),
        "scores": torch.cat([grad.flatten(1) for grad in each], 1).norm(dim=1),
    }
    tests = {
        "norm": variance.sum() / (0.81 * mean.square().sum()),
        "inner product": along.var() / (0.81 * mean.square().sum() ** 2),
        "orthogonality": aside.square().sum()
        / (n - 1)
        / (math.tan(math.radians(80)) ** 2 * mean.square().sum()),
    }
    features = []
    for (name, _), grad in zip(model.named_parameters(), each, strict=True):
        a, b = (sign.double() for sign in RandomProjection(16).of(name).signs(grad.shape[1:]))
        features.append(torch.einsum("kr,kc,nrc->nk", a, b, grad.reshape(12, a.shape[1], b.shape[1])) / 4)
    projected = torch.stack(features).sum(0)
    for found in processes.run(cases.pooled, str(tmp_path)):
        for name, wanted in expected.items():
            torch.testing.assert_close(
                torch.as_tensor(found[name], dtype=torch.double),
                wanted,
                rtol=1e-9,
                atol=1e-12,
                equal_nan=True,
            )
        value, low, high = found["coherence"]
        torch.testing.assert_close(value, 1 / expected["diversity"], rtol=1e-9, atol=0)
        assert low < value < high
        for name, size in tests.items():
            assert found[name].batch_size == pytest.approx(float(size), rel=1e-9)
            assert found[name].ratio == pytest.approx(float(size) / n, rel=1e-9)
        # A store holds numbers of 32 bits.
        torch.testing.assert_close(
            found["influence"].double(), projected @ projected[:2].mT, rtol=1e-5, atol=1e-5
        )
