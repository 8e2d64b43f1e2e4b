"""Materialising into memory of the caller's: every structure, every kernel, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import (
    BatchGrad,
    BatchL2Grad,
    Concat,
    Dense,
    OuterProduct,
    PerSampleGrad,
    Planner,
    RowScatter,
    Sum,
)
from gradbatch.errors import UsageError
from gradbatch.plans.convolutions import CORRELATE_METHODS
from gradbatch.plans.windows import Patches, Window


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def structures() -> dict[str, PerSampleGrad]:
    outer = OuterProduct(draw(5, 1, 4, 3), draw(5, 1, 2, 3), (4, 2))
    rows = RowScatter(torch.randint(0, 4, (5, 6)), draw(5, 6, 2), (4, 2))
    dense = Dense(draw(5, 4, 2))
    found = {
        "outer product": outer,
        "rows": rows,
        "dense": dense,
        "expanded": Dense(draw(4, 2).expand(5, 4, 2)),
        "sum": Sum([outer, rows, dense]),
        "micro-batches": Concat([Dense(draw(2, 4, 2)), outer.select(torch.arange(3))]),
    }
    window = Window((3,), (2,), (1,), (1,))
    patches = Patches(draw(5, 4, 9), window, 2)
    folded = OuterProduct(draw(5, 2, 3, patches.shape[3]), patches, (6, 2, 3))
    for method in CORRELATE_METHODS:
        found[method] = folded.with_planner(Planner(force={"dense": method}))
    return found


@pytest.mark.parametrize("structure", structures())
def test_writes_what_it_would_return(structure: str) -> None:
    grad = structures()[structure]
    out = torch.full((grad.num_samples, *grad.shape), torch.nan, dtype=torch.float64)
    assert grad.dense(out) is out
    torch.testing.assert_close(out, grad.dense())


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(5, 4, 3, dtype=torch.float64),
        torch.zeros(4, 4, 2, dtype=torch.float64),
        torch.zeros(5, 4, 2),
        torch.zeros(5, 2, 4, dtype=torch.float64).mT,
        torch.zeros(5, 4, 2, dtype=torch.float64, requires_grad=True),
    ],
)
def test_what_does_not_fit_is_refused(out: Tensor) -> None:
    with pytest.raises(UsageError, match=r"out is .*expected contiguous memory"):
        structures()["outer product"].dense(out)


def test_a_loop_keeps_its_memory() -> None:
    model = gradbatch.extend(
        nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(12, 3)).double()
    )
    results, places = None, {}
    for step in range(3):
        x = draw(4, 2, 5)
        expected = gradbatch.per_sample_grads(model, model(x).square().sum(1))
        losses = model(x).square().sum(1)
        results = gradbatch.backward(model, losses, BatchL2Grad(), BatchGrad(), out=results)
        torch.testing.assert_close(dict(results[BatchGrad]), expected)
        norms = sum(g.flatten(1).square().sum(1) for g in expected.values())
        torch.testing.assert_close(results[BatchL2Grad].total(), norms)
        now = {name: tensor.data_ptr() for name, tensor in results[BatchGrad].items()}
        assert step == 0 or (now["0.weight"] == places["0.weight"] and now["2.weight"] == places["2.weight"])
        places = now


def test_a_ragged_last_batch_gets_memory_of_its_own() -> None:
    model = gradbatch.extend(nn.Linear(3, 2))
    first = gradbatch.backward(model, model(torch.randn(4, 3)).sum(1), BatchGrad())
    kept = first[BatchGrad]["weight"].clone()
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum", out=first) as results:
        model(torch.ones(3, 3)).sum().backward()
    assert torch.equal(results[BatchGrad]["weight"], torch.ones(3, 2, 3))
    assert torch.equal(first[BatchGrad]["weight"], kept)


def test_other_quantities_and_results_without_the_quantity_leave_it_alone() -> None:
    model = gradbatch.extend(nn.Linear(3, 2))
    norms = gradbatch.backward(model, model(torch.ones(4, 3)).sum(1), BatchL2Grad())
    found = gradbatch.backward(model, model(torch.ones(4, 3)).sum(1), BatchGrad(), BatchL2Grad(), out=norms)
    assert torch.equal(found[BatchGrad]["weight"], torch.ones(4, 2, 3))
    assert norms[BatchL2Grad]["weight"].tolist() == [6, 6, 6, 6]


def test_out_takes_the_results_of_a_step() -> None:
    model = gradbatch.extend(nn.Linear(3, 2))
    first = gradbatch.backward(model, model(torch.ones(4, 3)).sum(1), BatchGrad())
    for wrong in (first[BatchGrad], dict(first[BatchGrad])):
        with pytest.raises(UsageError, match=r"results, not results\[BatchGrad\]"):
            gradbatch.backward(model, model(torch.ones(4, 3)).sum(1), BatchGrad(), out=wrong)
        with (
            pytest.raises(UsageError, match="out is a"),
            gradbatch.compute(model, BatchGrad(), loss_reduction="sum", out=wrong),
        ):
            pass
