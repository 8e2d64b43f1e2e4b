"""Random features are the projection of materialised gradients, and keep their dot products on average."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import UsageError
from gradbatch.analysis import FeatureStore, RandomProjection
from gradbatch.plans.contractions import Planner

N = 5


class Bag(nn.Module):
    """Embedded words, some of them several times, and the table again as the last layer (a sum of two structures)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.between = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.between(self.table(ids)).mean(1) @ self.table.weight.mT


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0].flatten(1)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 4), lambda: double(N, 6)),
    "positions": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Flatten()),
        lambda: double(N, 7, 6),
    ),
    "grouped convolution": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.PReLU(6), nn.Flatten()),
        lambda: double(N, 4, 5, 5),
    ),
    "pointwise convolution": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 1, groups=2), nn.Flatten()),
        lambda: double(N, 4, 2),
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Flatten()),
        lambda: double(N, 4, 3, 3),
    ),
    "tied embedding": (Bag, lambda: torch.tensor([[1, 2, 2], [0, 0, 3], [4, 4, 4], [8, 1, 0], [5, 6, 7]])),
    "recurrent": (Recurrent, lambda: double(N, 3, 3)),
}


def one_by_one(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    rows = [
        torch.autograd.grad(model(x[n : n + 1]).square().sum(), list(model.parameters()))
        for n in range(len(x))
    ]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def brute_force(quantity: RandomProjection, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, grad in grads.items():
        a, b = (sign.double() for sign in quantity.of(name).signs(grad.shape[1:]))
        elements = grad.reshape(len(grad), a.shape[1], b.shape[1])
        found[name] = torch.einsum("kr,kc,nrc->nk", a, b, elements) / math.sqrt(len(a))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("features", [1, 40])
@pytest.mark.parametrize("budget", [2**30, 1])
def test_features_are_those_of_materialised_gradients(case: str, features: int, budget: int) -> None:
    model, x = CASES[case][0]().double(), CASES[case][1]()
    quantity, grads = RandomProjection(features, seed=3), one_by_one(model, x)
    gradbatch.extend(model)
    losses = model(x).square().sum(1)
    found = gradbatch.backward(model, losses, quantity, planner=Planner(budget=budget))[quantity]
    expected = brute_force(quantity, grads)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        found.total(), torch.stack(list(expected.values())).sum(0), rtol=1e-9, atol=1e-10
    )


def test_micro_batches_have_the_features_of_one_batch_and_autocast_leaves_them_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, quantity = double(7, 6), RandomProjection(16)
    expected = brute_force(quantity, one_by_one(model, x))
    gradbatch.extend(model)
    with gradbatch.compute(model, quantity, loss_reduction="sum") as results:
        for part in x.split(4):
            model(part).square().sum().backward()
    for name, tensor in expected.items():
        torch.testing.assert_close(results[quantity][name], tensor, rtol=1e-9, atol=1e-11)
    grad = gradbatch.OuterProduct(double(3, 1, 4, 1).float(), double(3, 1, 6, 1).float(), (4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantity.reduce(grad)
    torch.testing.assert_close(inside, quantity.reduce(grad), rtol=0, atol=0)


@pytest.mark.parametrize("case", ["linear", "tied embedding"])
def test_where_the_structure_allows_it_nothing_is_materialised(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_elements(grad: gradbatch.PerSampleGrad, a: Tensor, b: Tensor) -> Tensor:
        assert len(grad.shape) == 1, f"{grad} was materialised"
        return torch.zeros(N, len(a))

    monkeypatch.setitem(RandomProjection.reduce.__globals__, "_of_elements", of_elements)
    model = gradbatch.extend(CASES[case][0]().double())
    gradbatch.backward(model, model(CASES[case][1]()).square().sum(1), RandomProjection(4))


def test_dot_products_are_right_on_average_and_as_close_as_promised() -> None:
    model = gradbatch.extend(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    losses = F.cross_entropy(model(double(4, 6)), torch.tensor([0, 1, 2, 1]), reduction="none")
    grads = gradbatch.per_sample_grads(model, losses)
    rows = torch.cat([grad.flatten(1) for grad in grads.values()], 1)
    truth, bound = rows @ rows.mT, torch.outer(rows.norm(dim=1), rows.norm(dim=1))
    grams = []
    for seed in range(2000):
        features = torch.stack(list(brute_force(RandomProjection(8, seed), grads).values())).sum(0)
        grams.append(features @ features.mT)
    found = torch.stack(grams)
    errors = found.std(0) / math.sqrt(len(grams))
    assert ((found.mean(0) - truth).abs() < 4 * errors).all()
    assert ((found - truth).square().mean(0).sqrt() < 3 / math.sqrt(8) * bound).all()


def filled(path: Path, size: int = 11) -> tuple[FeatureStore, Tensor]:
    store, rows = FeatureStore(path, size, RandomProjection(16, seed=2)), double(size, 16)
    for ids in torch.randperm(size).split(4):
        store.write(ids, rows[ids])
    return store, rows


def test_a_store_is_there_when_it_is_opened_again_and_knows_what_is_missing(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "features", 11, RandomProjection(16, seed=2))
    assert store.missing() == list(range(11))
    store.write([4, 0], double(2, 16))
    assert store.missing() == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    store, rows = filled(tmp_path / "features")
    del store
    again = FeatureStore(tmp_path / "features")
    assert again.projection == RandomProjection(16, seed=2) and again.missing() == []
    assert torch.equal(again.features, rows.float())
    assert (tmp_path / "features").stat().st_size == 11 * 16 * 4


@pytest.mark.parametrize("block", [4, 4096])
def test_influence_is_its_definition(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbatch.analysis.store.BLOCK", block)
    store, rows = filled(tmp_path / "features")
    others, stored = double(3, 16), rows.float().double()
    torch.testing.assert_close(store.influence(others), stored @ others.mT, rtol=1e-9, atol=1e-12)
    inverse = (stored.mT @ stored / 11 + 0.1 * torch.eye(16, dtype=torch.double)).inverse()
    torch.testing.assert_close(
        store.influence(others, damping=0.1), stored @ inverse @ others.mT, rtol=1e-9, atol=1e-11
    )


def test_influence_from_a_store_is_near_that_of_gradients(tmp_path: Path) -> None:
    model = gradbatch.extend(nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 3)))
    x, y = torch.randn(30, 20), torch.randint(3, (30,))
    store = FeatureStore(tmp_path / "features", 30, RandomProjection(4096))
    for ids in torch.arange(30).split(7):
        losses = F.cross_entropy(model(x[ids]), y[ids], reduction="none")
        store.write(ids, gradbatch.backward(model, losses, store.projection)[RandomProjection].total())
    losses = F.cross_entropy(model(x), y, reduction="none")
    gram = gradbatch.backward(model, losses, gradbatch.BatchDotGrad())[gradbatch.BatchDotGrad].total()
    norms = gram.diagonal().sqrt()
    error = (store.influence(store.features) - gram) / torch.outer(norms, norms)
    assert error.square().mean().sqrt() < 3 / math.sqrt(4096)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for features in (0, 2.5, True, "3", None):
        with pytest.raises(UsageError, match="features is"):
            RandomProjection(features)  # type: ignore[arg-type]
    for seed in (1.0, True, "a", None):
        with pytest.raises(UsageError, match="seed is"):
            RandomProjection(3, seed)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no store at"):
        FeatureStore(tmp_path / "none")
    store, _ = filled(tmp_path / "features")
    with pytest.raises(UsageError, match=r"holds 11 samples of RandomProjection\(16, seed=2\), not 12 of"):
        FeatureStore(tmp_path / "features", 12, RandomProjection(16, seed=2))
    with pytest.raises(UsageError, match=r"not 11 of RandomProjection\(16, seed=0\)"):
        FeatureStore(tmp_path / "features", 11, RandomProjection(16))
    with pytest.raises(UsageError, match=r"ids \[2\] and features \[3, 16\]; expected \[N\] and \[N, 16\]"):
        store.write([1, 2], double(3, 16))
    with pytest.raises(UsageError, match="ids from -1 to 2, of 11 samples"):
        store.write([-1, 2], double(2, 16))
    with pytest.raises(UsageError, match=r"others is \[3, 5\]; expected \[M, 16\]"):
        store.influence(double(3, 5))
    with pytest.raises(UsageError, match="damping is 0"):
        store.influence(double(3, 16), damping=0)
    os.truncate(filled(tmp_path / "cut")[0].path, 100)
    with pytest.raises(UsageError, match="has 100 bytes, not 704"):
        FeatureStore(tmp_path / "cut")
    store.write([3], torch.full((1, 16), math.inf))
    with pytest.raises(UsageError, match="samples without finite features: 1, the first is 3"):
        store.influence(double(3, 16), damping=1)
