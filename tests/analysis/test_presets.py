"""What is measured and when, of which groups of parameters, and in which precision."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradbatch import UsageError
from gradbatch.analysis import GradientMonitor, NoiseScale, norm_quantiles, read_log, stopping_evidence
from tests.analysis.monitored import assert_is_of, batch, network, one_by_one


def test_each_statistic_has_its_cadence_and_norms_come_with_all() -> None:
    model, (x, y) = network(), batch(4)
    monitor = GradientMonitor(
        model, preset="full", every={"norms": 6, "evidence": 4, "gram": lambda k: k == 3}, groups={"all": "*"}
    )
    found = {}
    for k in range(13):
        step = monitor.backward(F.cross_entropy(model(x), y, reduction="none"), k)
        assert step.measured == (step.record is not None) == monitor.measures(k)
        if step.record:
            assert_is_of(step.record, one_by_one(model, x, y))
            there = {
                "tests": step.record.dot_squares,
                "evidence": step.record.evidence_sums,
                "gram": step.record.cosines,
            }
            found[k] = {name for name, part in there.items() if part is not None}
    # Tests come every 20 steps, as they are not named.
    assert found == {
        0: {"tests", "evidence"},
        3: {"gram"},
        4: {"evidence"},
        6: set(),
        8: {"evidence"},
        12: {"evidence"},
    }
    assert int(monitor.noise.batches()) == int(monitor.groups.batches()) == 6


def test_evidence_of_a_record_is_that_of_the_function_and_the_gram_is_of_the_first_samples() -> None:
    model, (x, y) = network(), batch(40)
    step = GradientMonitor(model, preset="full").backward(
        F.cross_entropy(model(x), y, reduction="none"), 0, ids=range(100, 140)
    )
    grads = one_by_one(model, x, y)
    names = [name for name, _ in model.named_parameters()]
    expected = stopping_evidence(
        40,
        dict(zip(names, [g.mean(0) for g in grads], strict=True)),
        dict(zip(names, [g.var(0) for g in grads], strict=True)),
    )
    record = step.record
    assert record and record.evidence_sums and record.evidence_elements and record.cosines
    found = 1 - 40 * math.fsum(record.evidence_sums) / sum(record.evidence_elements)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(record.cosines) == 32 and record.ids == list(range(100, 132))


def test_groups_are_sums_over_their_parameters_and_may_overlap() -> None:
    model, noise = network(), NoiseScale((3,))
    groups = {"weights": "*.weight", "heads": ["3.*", "5.*"], "last": "5.bias"}
    monitor = GradientMonitor(model, every=1, groups=groups)
    for k in range(5):
        x, y = batch(7)
        with monitor.step(k):
            F.cross_entropy(model(x), y).backward()
        grads = one_by_one(model, x, y)
        of_groups = [torch.cat([grads[i] for i in members], 1) for members in ((0, 2, 4), (2, 3, 4, 5), (5,))]
        squares = torch.stack([g.square().sum() for g in of_groups])
        noise.update(7, squares, torch.stack([g.sum(0).square().sum() for g in of_groups]))
    assert monitor.group_names == ["weights", "heads", "last"]
    torch.testing.assert_close(monitor.groups.variance(), noise.variance(), rtol=1e-9, atol=0)
    torch.testing.assert_close(monitor.groups.value(), noise.value(), rtol=1e-9, atol=0)
    again = GradientMonitor(model, groups=groups)
    again.load_state_dict(monitor.state_dict())
    torch.testing.assert_close(again.groups.value(), noise.value(), rtol=1e-9, atol=0)
    with pytest.raises(UsageError, match=r"of groups \['weights', 'heads', 'last'\]; this monitor has \[\]"):
        GradientMonitor(model).load_state_dict(monitor.state_dict())


def test_a_tied_parameter_is_in_the_groups_of_all_its_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    monitor = GradientMonitor(model, groups={"second": "1.*"})
    assert monitor._run.groups == {"second": ["0.weight", "1.bias"]}


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_in_mixed_precision_a_record_is_that_of_the_gradients_without_the_scaler(kind: torch.dtype) -> None:
    model, (x, y) = network().float(), batch(9)
    # Smaller than what float16 holds: without the scaler, the gradients would be zero or a few steps above it.
    truth = [1e-5 * grad.double() for grad in one_by_one(model, x.float(), y)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientMonitor(model).step(0, loss_scale=scaler.get_scale()) as step:
        with torch.autocast("cpu", kind):
            loss = 1e-5 * F.cross_entropy(model(x.float()).float(), y)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert step.record and step.record.non_finite == 0
    norms = torch.cat(truth, 1).norm(dim=1)
    assert step.record.quantiles == pytest.approx(norm_quantiles(norms).tolist(), rel=0.03)


def test_a_step_that_the_scaler_skips_is_logged_and_left_out_of_the_noise() -> None:
    model, (x, y) = network().float(), batch(9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, monitor = [p.detach().clone() for p in model.parameters()], GradientMonitor(model)
    with monitor.step(0, loss_scale=scaler.get_scale()) as step:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x.float()).float(), y)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert step.record and step.record.non_finite == 9 and int(monitor.noise.batches()) == 0


def test_evidence_leaves_out_what_is_too_small_to_be_squared() -> None:
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    monitor = GradientMonitor(model, preset="full")
    # In float32, squares of gradients of 1e-25 are zero.
    losses = model(x) @ torch.tensor([1.0, 1e-25])
    record = monitor.backward(losses, 0).record
    assert record and record.evidence_sums and record.evidence_elements == [4, 1]
    grads = x.double()
    expected = float((grads.mean(0).square() / grads.var(0)).sum())
    assert record.evidence_sums[0] == pytest.approx(expected, rel=1e-5)
    assert record.evidence_sums[1] == math.inf, "a bias has one gradient for all samples"


class Odd(nn.Module):
    """Parameters without elements, with one, and that nothing comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(4, 3), nn.Parameter(torch.zeros(0, 3))
        self.factor, self.unused = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor + self.empty.sum()


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_parameters_of_any_size_are_measured(count: int, tmp_path: Path) -> None:
    model, x, y = Odd().double(), torch.randn(count, 4, dtype=torch.double), torch.randint(3, (count,))
    log = tmp_path / "run.jsonl"
    with GradientMonitor(model, log, preset="full", groups={"empty": "empty", "all": "*"}) as monitor:
        step = monitor.backward(F.cross_entropy(model(x), y, reduction="none"), 0, ids=range(count))
    record = step.record
    assert record and record.samples == count
    assert list(read_log(log).run.parameters.values()) == [0, 1, 2, 12, 3]
    if count < 2:
        assert record.evidence_elements == [0] * 5 and monitor.groups.value().isnan().all()
        return
    reached = [model.factor, model.layer.weight, model.layer.bias]
    rows = [
        torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), reached) for n in range(count)
    ]
    grads = [torch.stack(column).view(count, -1) for column in zip(*rows, strict=True)]
    zero = torch.zeros(count, 0, dtype=torch.double)
    assert_is_of(record, [zero, grads[0], torch.zeros(count, 2, dtype=torch.double), *grads[1:]])
    assert monitor.groups.value()[0].isnan() and not monitor.groups.value()[1].isnan()
