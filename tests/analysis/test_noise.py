"""The noise scale: equal to what materialised gradients say, unbiased, and honest about how uncertain it is."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchL2Grad, UsageError
from gradbatch.analysis import (
    BatchDotSum,
    GradientMonitor,
    NoiseScale,
    SumL2Grad,
    squared_gradient,
    total_variance,
)
from gradbatch.analysis.intervals import student_quantile


def parts(grads: Tensor) -> tuple[int, Tensor, Tensor]:
    """Of gradients ``[..., N, P]``: what an estimator takes."""
    return grads.shape[-2], grads.square().sum((-2, -1)), grads.sum(-2).square().sum(-1)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5), nn.ReLU(), nn.Linear(5, 3)
    ).double()


def test_the_parts_from_norms_are_those_of_materialised_gradients() -> None:
    model = gradbatch.extend(network())
    x, y = torch.randn(7, 4, 5, 5, dtype=torch.double), torch.randint(3, (7,))
    losses = F.cross_entropy(model(x), y, reduction="none")
    results = gradbatch.backward(model, losses, BatchL2Grad(), SumL2Grad(), BatchDotSum())
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    grads = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])

    squares, square = results[BatchL2Grad].total().sum(), results[SumL2Grad].total()
    assert float(total_variance(7, squares, square)) == pytest.approx(float(grads.var(0).sum()), rel=1e-9)
    pairs = [grads[i] @ grads[j] for i, j in itertools.permutations(range(7), 2)]
    assert float(squared_gradient(7, squares, square)) == pytest.approx(float(sum(pairs) / 42), rel=1e-9)
    torch.testing.assert_close(results[BatchDotSum].total(), grads @ grads.sum(0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[BatchDotSum].total().sum(), square, rtol=1e-9, atol=1e-12)


def test_both_parts_are_unbiased_although_many_squared_gradients_are_negative() -> None:
    mean, deviation = (
        torch.full((20,), 0.1, dtype=torch.double),
        torch.linspace(0.5, 2, 20, dtype=torch.double),
    )
    batches = mean + deviation * torch.randn(2000, 4, 20, dtype=torch.double)
    count, squares, square = parts(batches)
    for estimates, truth in (
        (total_variance(count, squares, square), deviation.square().sum()),
        (squared_gradient(count, squares, square), mean.square().sum()),
    ):
        error = estimates.std() / math.sqrt(2000)
        assert abs(float(estimates.mean() - truth)) < 3.5 * float(error)
        assert float(error) < float(truth) / 2, "batches enough to tell"
    assert float((squared_gradient(count, squares, square) < 0).double().mean()) > 0.3


def test_sums_beyond_what_the_dtype_holds_are_not_taken_for_zero() -> None:
    assert total_variance(21, torch.tensor(1e38), torch.tensor(math.inf)).isnan()
    # Each squared norm is in float32's range, one of the dot products with the sum is below it.
    gradients = torch.tensor([-4 / 3, *[1.0] * 20]) * 4e18
    assert (gradients * gradients.sum()).double().sum() == -math.inf
    model = nn.Linear(1, 1, bias=False)
    monitor = GradientMonitor(model, every=1)
    step = monitor.backward(model(gradients[:, None])[:, 0], 0, reduction="sum")
    assert step.record is not None
    assert step.record.sum_of_squares == pytest.approx([float(gradients.double().square().sum())])
    assert step.record.square_of_sum == pytest.approx([math.nan], nan_ok=True)
    assert monitor.noise.batches() == 0


def test_a_ratio_of_averages_finds_the_truth_where_averaged_ratios_do_not() -> None:
    mean = torch.full((20,), 0.5, dtype=torch.double)
    truth = 20 / float(mean.square().sum())
    batches = mean + torch.randn(4000, 3, 20, dtype=torch.double)
    noise, ratios = NoiseScale(), []
    for batch in batches:
        noise.update(*parts(batch))
        ratios.append(float(total_variance(*parts(batch)) / squared_gradient(*parts(batch))))
    assert float(noise.value()) == pytest.approx(truth, rel=0.1)
    assert abs(sum(ratios) / len(ratios) - truth) > 0.2 * truth


@pytest.mark.parametrize("sizes", [[16] * 60, [16, 16, 4] * 20], ids=["regular", "ragged"])
def test_the_interval_covers_the_truth_as_often_as_it_says(sizes: list[int]) -> None:
    runs, mean = 1000, 0.3
    noise = NoiseScale((runs,))
    for size in sizes:
        noise.update(*parts(mean + torch.randn(runs, size, 5, dtype=torch.double)))
    truth = 1 / mean**2
    for level in (0.8, 0.95):
        low, high = noise.interval(level)
        covered = float(((low <= truth) & (truth <= high)).double().mean())
        # The scatter of 1,000 runs is below 1.3%; the rest is what the estimates are short of normal.
        assert covered == pytest.approx(level, abs=0.03)
    assert bool((low <= noise.value()).all()) and bool((noise.value() <= high).all())


@pytest.mark.parametrize(
    ("sizes", "covered"),
    [
        ([8] * 30 + [128] * 4, (0.935, 0.965)),
        ([2] * 10 + [32] * 10, (0.925, 0.965)),
        ([8] * 20 + [256], (1, 1)),
        ([4] * 20 + [64] * 2, (1, 1)),
    ],
)
def test_batches_that_outweigh_the_rest_leave_the_interval_honest(
    sizes: list[int], covered: tuple[float, float]
) -> None:
    mean, noise = torch.tensor([0.5, *[0.0] * 9], dtype=torch.double), NoiseScale((2000,))
    for size in sizes:
        noise.update(*parts(torch.randn(2000, size, 10, dtype=torch.double) + mean))
    low, high = noise.interval()
    assert covered[0] <= float(((low < 40) & (high > 40)).double().mean()) <= covered[1]


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_batches_at_once_are_batches_one_after_another(decay: float) -> None:
    counts = torch.tensor([5, 1, 8, 0, 2, 7])
    squares, square = 9 * torch.rand(2, 6, 3, dtype=torch.double)
    squares[2, 0], square[5, 1] = math.inf, math.nan
    one, other = NoiseScale((3,), decay), NoiseScale((3,), decay)
    for count, a, b in zip(counts.tolist(), squares, square, strict=True):
        one.update(count, a, b)
    for part in (slice(0, 4), slice(4, 4), slice(4, 6)):
        other.update_all(counts[part], squares[part], square[part])
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_lost_in_noise_leaves_the_interval_open() -> None:
    noise = NoiseScale((400,))
    for _ in range(30):
        noise.update(*parts(torch.randn(400, 8, 5, dtype=torch.double)))
    low, high = noise.interval()
    assert float(high.isinf().double().mean()) > 0.94
    infinite = noise.value().isinf()
    assert 0.3 < float(infinite.double().mean()) < 0.7
    assert bool((noise.signal_to_noise(8)[infinite] == 0).all())
    assert bool((low > 1).double().mean() > 0.9)


def test_batches_without_replacement_say_it_of_the_data_set_with_its_size() -> None:
    grads = torch.randn(6, 3, dtype=torch.double) + 0.7
    noise = NoiseScale()
    for chosen in itertools.combinations(range(6), 2):
        noise.update(*parts(grads[list(chosen)]))
    exact = grads.var(0).sum() / grads.mean(0).square().sum()
    torch.testing.assert_close(noise.value(population=6), exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        noise.value(), total_variance(*parts(grads)) / squared_gradient(*parts(grads)), rtol=1e-12, atol=0
    )
    low, high = noise.interval(population=6)
    assert low < exact < high


def test_on_digits_batches_of_16_are_within_a_tenth_of_the_truth() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn has the digits")
    data, target = datasets.load_digits(return_X_y=True)
    x, y = torch.from_numpy(data) / 16, torch.from_numpy(target).long()
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    gradbatch.extend(model)
    grads = gradbatch.per_sample_grads(model, F.cross_entropy(model(x), y, reduction="none"))
    flat = torch.cat([grad.flatten(1) for grad in grads.values()], 1)
    truth = float(flat.var(0).sum() / flat.mean(0).square().sum())
    assert 20 < truth < 500, "neither trivial nor hopeless"

    noise, gram = NoiseScale(), flat @ flat.mT
    for _ in range(1000):
        chosen = torch.randperm(len(x))[:16]
        block = gram[chosen][:, chosen]
        noise.update(16, block.trace(), block.sum())
    low, high = noise.interval(population=len(x))
    assert float(noise.value(population=len(x))) == pytest.approx(truth, rel=0.1)
    assert low < truth < high


def test_merged_and_restored_sums_are_those_of_all_batches_in_one() -> None:
    batches = [torch.randn(size, 3, dtype=torch.double) + 1 for size in (5, 8, 2, 5, 6, 7)]
    whole, ranks = NoiseScale(), [NoiseScale(), NoiseScale()]
    for place, batch in enumerate(batches):
        whole.update(*parts(batch))
        ranks[place % 2].update(*parts(batch))
    state = ranks[0].state_dict()
    ranks[0].merge(ranks[1])
    for name, tensor in ranks[0].state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[name])
        # What all-reduce over ranks would give.
        torch.testing.assert_close(tensor, state[name] + ranks[1].state_dict()[name])
    restored = NoiseScale()
    restored.load_state_dict(whole.state_dict())
    restored.update(*parts(batches[0]))
    whole.update(*parts(batches[0]))
    assert torch.equal(restored.value(), whole.value())
    assert torch.equal(torch.stack(restored.interval()), torch.stack(whole.interval()))


def test_with_a_decay_recent_batches_count_for_more() -> None:
    early, late = NoiseScale(decay=0.9), NoiseScale()
    for step in range(400):
        batch = torch.randn(8, 3, dtype=torch.double) + (0.1 if step < 200 else 2.0)
        early.update(*parts(batch))
        if step >= 200:
            late.update(*parts(batch))
    assert float(early.value()) == pytest.approx(float(late.value()), rel=0.3)
    assert float(early.batches()) == pytest.approx(1.9 / 0.1, rel=1e-6)


def test_what_cannot_say_anything_adds_nothing() -> None:
    noise = NoiseScale((2,))
    assert bool(noise.value().isnan().all()) and noise.batches().tolist() == [0, 0]
    one = torch.ones(2, dtype=torch.double)
    noise.update(1, one, one)
    noise.update(0, 0 * one, 0 * one)
    assert noise.batches().tolist() == [0, 0]
    noise.update(2, torch.tensor([4.0, math.nan]), torch.tensor([6.0, 5.0]))
    assert noise.batches().tolist() == [1, 0]
    assert float(noise.variance()[0]) == 1 and float(noise.squared_gradient()[0]) == 1
    low, high = noise.interval()
    assert low.tolist() == [0, 0] and high.tolist() == [math.inf, math.inf]
    assert bool(total_variance(1, one, one).isnan().all() and squared_gradient(1, one, one).isnan().all())


def test_samples_that_agree_have_no_noise_and_silent_ones_nothing_to_say() -> None:
    noise = NoiseScale((2,))
    for _ in range(5):
        noise.update(4, torch.tensor([4.0, 0.0]), torch.tensor([16.0, 0.0]))
    assert float(noise.value()[0]) == 0 and bool(noise.value()[1].isnan())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NoiseScale(decay=0.0), "decay is 0.0"),
        (
            lambda: NoiseScale().update(2, torch.ones(3), torch.ones(3)),
            r"shape \[3\] in a noise scale of \[\]",
        ),
        (lambda: NoiseScale().merge(NoiseScale((2,))), r"\[\] and \[2\] do not merge"),
        (lambda: NoiseScale().load_state_dict({}), "sums is missing"),
        (lambda: NoiseScale().interval(95), "level is 95"),
        (lambda: NoiseScale().value(population=0), "population is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=message):
        call()


def test_students_quantiles_are_those_of_the_tables() -> None:
    tables = {3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
    found = student_quantile(0.95, torch.tensor([*tables], dtype=torch.double)).tolist()
    assert found == pytest.approx(list(tables.values()), rel=0.01)
    assert student_quantile(0.95, torch.tensor([2.0])).isinf()
