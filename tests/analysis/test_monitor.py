"""What a monitor logs is what materialised gradients say, and training is what it is without one."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbatch import CoupledSamples, UsageError
from gradbatch.analysis import (
    GradientMonitor,
    NoiseScale,
    logarithmic,
    norm_quantiles,
    read_log,
)
from tests.analysis.monitored import assert_is_of, batch, network, one_by_one


@pytest.mark.parametrize("preset", ["economy", "standard", "full"])
@pytest.mark.parametrize("way", ["mean", "sum", "scaled", "micro-batches", "losses", "losses summed"])
def test_a_record_is_that_of_materialised_gradients(preset: str, way: str) -> None:
    model, (x, y) = network(), batch(9)
    monitor = GradientMonitor(model, preset=preset)  # type: ignore[arg-type]
    if way == "micro-batches":
        with monitor.step(0, loss_scale=0.5) as step:
            for part in (slice(0, 6), slice(6, 9)):
                (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
    elif way.startswith("losses"):
        reduction = "sum" if way == "losses summed" else "mean"
        losses = F.cross_entropy(model(x), y, reduction="none")
        step = monitor.backward(16 * losses, 0, reduction=reduction, loss_scale=16)  # type: ignore[arg-type]
        assert step.record and step.record.loss == pytest.approx(float(losses.detach().mean()))
    else:
        reduction, scale = ("sum" if way == "sum" else "mean"), (1024.0 if way == "scaled" else 1.0)
        with monitor.step(0, loss_reduction=reduction, loss_scale=scale) as step:  # type: ignore[arg-type]
            (scale * F.cross_entropy(model(x), y, reduction=reduction)).backward()
    assert_is_of(step.record, one_by_one(model, x, y))
    assert (step.record.dot_squares is None) == (preset == "economy")
    for part in (step.record.evidence_sums, step.record.cosines):
        assert (part is None) == (preset != "full")


def train(model: nn.Module, monitor: GradientMonitor | None, by_losses: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(7):
        x = torch.randn(6 if k % 3 else 4, 4, 5, 5, dtype=torch.double, generator=generator)
        y = torch.randint(3, (len(x),), generator=generator)
        optimizer.zero_grad()
        if monitor is None:
            F.cross_entropy(model(x), y).backward()
        elif by_losses:
            monitor.backward(F.cross_entropy(model(x), y, reduction="none"), k)
        else:
            with monitor.step(k):
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("by_losses", [False, True])
def test_training_with_a_monitor_is_training_without(by_losses: bool) -> None:
    plain, watched = network(), network()
    expected = train(plain, None, by_losses)
    found = train(watched, GradientMonitor(watched, every=2), by_losses)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_running_noise_is_that_of_the_measured_batches_and_goes_on_after_a_restart() -> None:
    model = network()
    monitor, expected, layers = GradientMonitor(model, every=2), NoiseScale(), NoiseScale((3,))
    assert monitor.layer_names == ["0", "3", "5"]
    for k in range(8):
        x, y = batch(4 + k)
        if k == 4:
            state = monitor.state_dict()
            monitor = GradientMonitor(model, every=2)
            monitor.load_state_dict(state)
        with monitor.step(k) as step:
            F.cross_entropy(model(x), y).backward()
        assert step.measured == (k % 2 == 0) == (step.record is not None)
        if step.measured:
            grads = one_by_one(model, x, y)
            whole = torch.cat(grads, 1)
            expected.update(len(x), whole.square().sum(), whole.sum(0).square().sum())
            of_layers = [torch.cat(grads[i : i + 2], 1) for i in (0, 2, 4)]
            squares = torch.stack([g.square().sum() for g in of_layers])
            layers.update(len(x), squares, torch.stack([g.sum(0).square().sum() for g in of_layers]))
    torch.testing.assert_close(monitor.noise.value(), expected.value(), rtol=1e-9, atol=0)
    torch.testing.assert_close(monitor.layers.value(), layers.value(), rtol=1e-9, atol=0)
    assert int(monitor.noise.batches()) == 4


def test_a_sample_that_is_not_finite_is_counted_and_its_batch_left_out() -> None:
    model, (x, y) = network(), batch(5)
    x[2] = math.inf
    monitor = GradientMonitor(model)
    step = monitor.backward(F.cross_entropy(model(x), y, reduction="none"), 0, ids=[10, 11, 12, 13, 14])
    record = step.record
    assert record and record.non_finite == 1 and record.samples == 5
    rest = torch.cat(one_by_one(model, x[[0, 1, 3, 4]], y[[0, 1, 3, 4]]), 1).norm(dim=1)
    assert record.mean_norm == pytest.approx(float(rest.mean()), rel=1e-9)
    assert record.quantiles == pytest.approx(norm_quantiles(rest).tolist(), rel=1e-9)
    assert record.hardest and record.hardest[0][0] == 12
    assert int(monitor.noise.batches()) == 0


@pytest.mark.parametrize("count", [0, 1])
def test_batches_of_none_and_one_are_logged_and_say_nothing_of_noise(count: int) -> None:
    model, (x, y) = network(), batch(count)
    monitor = GradientMonitor(model)
    step = monitor.backward(F.cross_entropy(model(x), y, reduction="none"), 0)
    assert step.record and step.record.samples == count and step.record.non_finite == 0
    assert int(monitor.noise.batches()) == 0


def test_the_hardest_samples_are_named_by_their_ids() -> None:
    model, (x, y) = network(), batch(20)
    ids = torch.randperm(100)[:20]
    with GradientMonitor(model).step(0, ids=ids) as step:
        F.cross_entropy(model(x), y).backward()
    norms = torch.cat(one_by_one(model, x, y), 1).norm(dim=1)
    order = norms.argsort(descending=True)[:8]
    assert step.record and step.record.hardest
    assert [sample for sample, _ in step.record.hardest] == ids[order].tolist()
    assert [norm for _, norm in step.record.hardest] == pytest.approx(norms[order].tolist(), rel=1e-9)


def test_a_pattern_chooses_the_parameters() -> None:
    model, (x, y) = network(), batch(6)
    monitor = GradientMonitor(model, parameters="5.*")
    with monitor.step(0) as step:
        F.cross_entropy(model(x), y).backward()
    assert monitor.layer_names == ["5"]
    assert_is_of(step.record, one_by_one(model, x, y)[-2:])


def test_logarithmic_cadences_are_dense_at_the_start() -> None:
    measured = [step for step in range(100_001) if logarithmic(10)(step)]
    assert measured[:6] == [0, 1, 2, 3, 4, 5]
    for low in (100, 1000, 10_000):
        assert sum(low <= step < 10 * low for step in measured) == 10
        assert low in measured
    monitor = GradientMonitor(network(), every=logarithmic(10))
    assert [k for k in range(30) if monitor.measures(k)] == [k for k in measured if k < 30]


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_many_steps_leave_no_tensors_behind() -> None:
    model, (x, y) = network(), batch(6)
    monitor = GradientMonitor(model, every=1)

    def steps(numbers: range) -> Iterator[int]:
        for k in numbers:
            model.zero_grad()
            with monitor.step(k, ids=range(6)):
                F.cross_entropy(model(x), y).backward()
            yield k

    list(steps(range(5)))
    before = live_tensors()
    list(steps(range(5, 40)))
    assert live_tensors() <= before


def test_what_cannot_be_monitored_is_refused_before_training() -> None:
    with pytest.raises(UsageError, match="preset is 'cheap'; there are 'economy', 'standard', 'full'"):
        GradientMonitor(network(), preset="cheap")  # type: ignore[arg-type]
    for every in (0, -3, 2.5, True, "5"):
        with pytest.raises(UsageError, match="every is"):
            GradientMonitor(network(), every=every)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every is 0 for 'norms'"):
        GradientMonitor(network(), every={"norms": 0})
    with pytest.raises(UsageError, match="every names 'gram'; the preset measures 'norms', 'tests'"):
        GradientMonitor(network(), every={"gram": 5})
    with pytest.raises(UsageError, match="matches none of"):
        GradientMonitor(network(), parameters="head.*")
    with pytest.raises(UsageError, match=r"groups: 'head\.\*' of group 'heads' matches none of 0\.weight"):
        GradientMonitor(network(), groups={"heads": "head.*"})
    with pytest.raises(CoupledSamples):
        GradientMonitor(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    for groups in (["head.*"], {"heads": []}, {1: "*"}):
        with pytest.raises(UsageError, match="groups"):
            GradientMonitor(network(), groups=groups)  # type: ignore[arg-type]
    for per_decade in (0, math.nan, math.inf):
        with pytest.raises(UsageError, match="per_decade is"):
            logarithmic(per_decade)  # type: ignore[arg-type]


def test_mistakes_in_a_step_are_named() -> None:
    model, (x, y) = network(), batch(4)
    monitor = GradientMonitor(model)

    def step_with(loss: object) -> None:
        with monitor.step(0) as step:
            F.cross_entropy(model(x), y).backward()
            step.loss = loss  # type: ignore[assignment]

    with pytest.raises(UsageError, match="3 ids for 4 samples"), monitor.step(0, ids=[1, 2, 3]):
        F.cross_entropy(model(x), y).backward()
    for ids in (
        torch.rand(4),
        torch.ones(4, dtype=torch.bool),
        torch.zeros(4, 1, dtype=torch.long),
        ["a"] * 4,
        [0, 1, -2, 3],
        4,
    ):
        with pytest.raises(UsageError, match=r"^ids "), monitor.step(0, ids=ids):  # type: ignore[arg-type]
            F.cross_entropy(model(x), y).backward()
    for scale in (0, -1, math.inf, math.nan, None):
        with pytest.raises(UsageError, match="loss_scale is"), monitor.step(0, loss_scale=scale):  # type: ignore[arg-type]
            F.cross_entropy(model(x), y).backward()
    for loss in (torch.ones(4), "low"):
        with pytest.raises(UsageError, match="the batch's mean loss, one number"):
            step_with(loss)
    assert int(monitor.noise.batches()) == 0
    model[0].requires_grad_(False)
    with pytest.raises(UsageError, match=r"0\.(weight|bias) was frozen or unfrozen"), monitor.step(0):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(UsageError, match="the state is None"):
        monitor.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no state of a monitor: group_names, groups"):
        monitor.load_state_dict({"noise": {}, "layers": {}, "names": []})
    with pytest.raises(UsageError, match=r"layers \['a'\]; this monitor has"):
        monitor.load_state_dict({**monitor.state_dict(), "names": ["a"]})
    weights = GradientMonitor(network(), parameters="*.weight", groups={"all": "*"})
    biases = GradientMonitor(network(), parameters="*.bias", groups={"all": "*"})
    with pytest.raises(UsageError, match=r"the state is of other parameters: \{'0\.weight': 108"):
        biases.load_state_dict(weights.state_dict())
    heads = GradientMonitor(network(), parameters="*.weight", groups={"all": "5.*"})
    with pytest.raises(UsageError, match=r"the state is of other members: \{'all': \['0\.weight'"):
        heads.load_state_dict(weights.state_dict())


def test_mistakes_show_in_steps_that_are_not_measured() -> None:
    model, (x, y) = network(), batch(4)
    monitor = GradientMonitor(model)
    losses = F.cross_entropy(model(x), y, reduction="none")
    for step, reduction, given, message in (
        (1, None, losses, "reduction is None"),
        (1, "avg", losses, "reduction is 'avg'"),
        (1, "mean", losses[:, None], "losses have shape"),
        (0.5, "mean", losses, "step is 0.5"),
        (None, "mean", losses, "step is None"),
        (-1, "mean", losses, "step is -1; steps are counted from 0"),
    ):
        with pytest.raises(UsageError, match=message):
            monitor.backward(given, step, reduction=reduction)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_is_measured_once(tmp_path: Path) -> None:
    model, (x, y) = network(), batch(4)
    monitor = GradientMonitor(model, tmp_path / "run.jsonl", every=2)
    state = monitor.state_dict()

    def step(number: int) -> None:
        with monitor.step(number):
            F.cross_entropy(model(x), y).backward()

    with monitor:
        step(1)
        step(1)  # nothing is measured
        with pytest.raises(UsageError, match="3 ids for 4 samples"), monitor.step(2, ids=[1, 2, 3]):
            F.cross_entropy(model(x), y).backward()
        step(2)  # which nothing was logged of yet
        for again in (
            lambda: step(2),
            lambda: monitor.backward(F.cross_entropy(model(x), y, reduction="none"), 2),
        ):
            with pytest.raises(
                UsageError, match=r"step 2 was measured just now.*all micro-batches of a step into one"
            ):
                again()
        assert [record.step for record in read_log(tmp_path / "run.jsonl").records] == [2]
        assert int(monitor.noise.batches()) == 1
        monitor.load_state_dict(state)
        step(2)


def test_errors_say_that_they_are_the_monitors() -> None:
    model, (x, y) = network(), batch(4)
    monitor, prefix = GradientMonitor(model), r"^GradientMonitor \(step measures with gradbatch\.compute"
    with pytest.raises(UsageError, match=prefix), monitor.step(0):
        pass
    with pytest.raises(UsageError, match=prefix):
        monitor.backward(F.cross_entropy(model(x), y), 1)
    coupled = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    allow = prefix + r'.*Or make the monitor with samples_coupled="allow"$'
    with pytest.raises(CoupledSamples, match=allow), GradientMonitor(coupled).step(0):
        coupled(torch.randn(4, 4)).square().mean().backward()


def test_steps_and_losses_may_be_numbers_of_any_kind(tmp_path: Path) -> None:
    model, (x, y) = network(), batch(4)
    steps = (torch.tensor(0), True, numpy.int64(2))
    with GradientMonitor(model, tmp_path / "run.jsonl", every=1) as monitor:
        for k in steps:
            with monitor.step(k) as step:  # type: ignore[arg-type]
                F.cross_entropy(model(x), y).backward()
                step.loss = numpy.float32(0.5)  # type: ignore[assignment]
    assert [(r.step, r.loss) for r in read_log(tmp_path / "run.jsonl").records] == [
        (0, 0.5),
        (1, 0.5),
        (2, 0.5),
    ]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + 100 * self.b(x)


def test_parameters_that_change_places_are_not_taken_for_each_other() -> None:
    model, x = Two(), torch.randn(4, 4, dtype=torch.double)
    monitor, first = GradientMonitor(model), model.a
    del model.a
    model.a = first
    with pytest.raises(UsageError, match="the order of the parameters was changed"), monitor.step(0):
        model(x).square().mean().backward()
