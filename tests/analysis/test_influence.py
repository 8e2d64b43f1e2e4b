"""Scores of samples, influence between sets, and statistics of single elements."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchGrad, SumGradSquared, UsageError, Variance
from gradbatch.analysis import FisherDiagonal, SampleScores, influence, stopping_evidence


def network() -> nn.Sequential:
    return gradbatch.extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double())


def losses_of(model: nn.Module, count: int) -> Tensor:
    x, y = torch.randn(count, 5, dtype=torch.double), torch.randint(3, (count,))
    return F.cross_entropy(model(x), y, reduction="none")


def test_scores_are_means_over_visits() -> None:
    scores, other = SampleScores(6), SampleScores(6)
    seen: dict[int, list[float]] = {}
    for turn in range(8):
        ids, values = torch.randint(5, (4,)), torch.randn(4, dtype=torch.double)
        (scores if turn % 2 else other).update(ids, values)
        for place, value in zip(ids.tolist(), values.tolist(), strict=True):
            seen.setdefault(place, []).append(value)
    scores.merge(other)
    for place in range(6):
        values = torch.tensor(seen.get(place, []), dtype=torch.double)
        assert float(scores.visits()[place]) == len(values)
        assert float(scores.sum()[place]) == pytest.approx(float(values.sum()))
        assert float(scores.mean()[place]) == pytest.approx(
            float(values.sum()) / len(values) if len(values) else math.nan, nan_ok=True
        )
        error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
        assert float(scores.standard_error()[place]) == pytest.approx(error, nan_ok=True)
    assert scores.largest(6) == sorted(seen, key=lambda place: -sum(seen[place]) / len(seen[place]))


def test_influence_is_the_dot_product_of_materialised_gradients() -> None:
    model = network()
    train, test = losses_of(model, 4), losses_of(model, 3)

    def rows(losses: Tensor) -> Tensor:
        grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        return torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])

    expected = rows(train) @ rows(test).mT
    torch.testing.assert_close(influence(model, train, test), expected, rtol=1e-9, atol=1e-12)


def test_evidence_is_its_definition_and_zero_where_only_noise_is_left() -> None:
    model = network()
    losses = losses_of(model, 10)
    results = gradbatch.backward(model, losses, BatchGrad(), Variance(unbiased=True), reduction="mean")
    means = {name: parameter.grad for name, parameter in model.named_parameters()}
    flat = torch.cat([grad.flatten(1) for grad in results[BatchGrad].values()], 1)
    expected = 1 - 10 * (flat.mean(0).square() / flat.var(0)).mean()
    assert stopping_evidence(10, means, results[Variance]) == pytest.approx(float(expected), rel=1e-9)  # type: ignore[arg-type]

    found = [
        stopping_evidence(50, {"w": noise.mean(0)}, {"w": noise.var(0)})
        for noise in torch.randn(2000, 50, 4, dtype=torch.double)
    ]
    # Each term is the square of Student's t with 49 degrees of freedom, of mean 49 / 47.
    mean, error = torch.tensor(found).mean(), torch.tensor(found).std() / math.sqrt(2000)
    assert abs(float(mean) - (1 - 49 / 47)) < 3.5 * float(error)


def test_evidence_of_units_that_are_dead_or_without_noise() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert math.isnan(stopping_evidence(4, {"w": zero}, {"w": zero}))
    assert stopping_evidence(4, {"w": one}, {"w": zero}) == -math.inf
    both = torch.tensor([0.0, 1.0])
    assert stopping_evidence(4, {"w": both}, {"w": 8 * both}) == 0.5


def test_the_fisher_diagonal_is_the_mean_of_squares_over_all_batches() -> None:
    model, fisher, squares = network(), FisherDiagonal(), []
    for count in (3, 5):
        losses = losses_of(model, count)
        results = gradbatch.backward(model, losses, SumGradSquared(), BatchGrad())
        fisher.update(results[SumGradSquared], count)
        squares.append({name: grad.square() for name, grad in results[BatchGrad].items()})
    anchor = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
    expected = 0.0
    for name, value in fisher.value().items():
        torch.testing.assert_close(value, torch.cat([part[name] for part in squares]).mean(0))
        expected += 0.5 * 0.01 * float(value.sum())
    penalty = fisher.penalty(model, anchor)
    assert penalty.item() == pytest.approx(expected)
    penalty.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mistakes_are_named() -> None:
    scores = SampleScores(3)
    for ids, values, message in (
        ([0, 1], torch.ones(3), r"ids \[2\] and values \[3\]"),
        ([0, 3], torch.ones(2), "ids from 0 to 3, of 3 samples"),
        ([-1, 0], torch.ones(2), "ids from -1 to 0"),
    ):
        with pytest.raises(UsageError, match=message):
            scores.update(ids, values)
    with pytest.raises(UsageError, match="do not merge"):
        scores.merge(SampleScores(4))
    with pytest.raises(UsageError, match="different parameters"):
        stopping_evidence(3, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    fisher = FisherDiagonal()
    fisher.update({"a": torch.ones(1)}, 1)
    with pytest.raises(UsageError, match="other parameters than before"):
        fisher.update({"b": torch.ones(1)}, 1)


def test_scores_take_ids_of_any_whole_type_and_no_others() -> None:
    scores = SampleScores(4)
    for kind in (torch.uint8, torch.int16, torch.int32):
        scores.update(torch.tensor([1, 3, 3], dtype=kind), torch.tensor([1.0, 2.0, 3.0]))
    assert scores.visits().tolist() == [0, 3, 0, 6] and scores.sum().tolist() == [0, 3, 0, 15]
    for ids in (torch.tensor([0.5, 1.5]), torch.tensor([True, False]), torch.tensor([[0], [1]])):
        with pytest.raises(UsageError, match=r"^ids "):
            scores.update(ids, torch.ones(2))
    assert scores.visits().tolist() == [0, 3, 0, 6]


def test_a_sample_whose_gradient_is_not_finite_is_the_largest_of_all() -> None:
    scores = SampleScores(5)
    scores.update([0, 1, 2, 3], torch.tensor([2.0, math.nan, 7.0, math.inf]))
    assert scores.largest(5) == [1, 3, 2, 0] and scores.largest(1) == [1] and scores.largest(0) == []


def test_a_penalty_that_would_miss_all_parameters_is_refused() -> None:
    model, fisher = network(), FisherDiagonal()
    fisher.update(gradbatch.backward(model, losses_of(model, 3), SumGradSquared())[SumGradSquared], 3)
    anchor = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=r"the model has none of these: the penalty would be zero"):
        fisher.penalty(nn.ModuleDict({"module": model}), anchor)
    with pytest.raises(UsageError, match=r"anchor has no 0\.weight; it has 2\.bias"):
        fisher.penalty(model, {"2.bias": anchor["2.bias"]})
    assert float(FisherDiagonal().penalty(model, {})) == 0, "of no earlier task"


def test_what_is_no_vector_of_losses_has_no_influence() -> None:
    model = network()
    losses = losses_of(model, 3)
    for given in ((losses, losses.sum()), (losses.sum(), losses)):
        with pytest.raises(UsageError, match="the loss is a scalar"):
            influence(model, *given)
