"""Samples that depend on each other: refused, unless the user says that the losses' gradients are what is meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import CoupledSamples, UsageError
from tests.capture.reference import (
    QUANTITIES,
    assert_refused,
    assert_results,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    wired,
)

# What couples samples mostly has no rule.
pytestmark = pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")


def centred(hidden: Tensor) -> Tensor:
    return hidden - 0.5 * hidden.mean(0)


def attended(hidden: Tensor) -> Tensor:
    return F.softmax(hidden @ hidden.T, -1) @ hidden


MIXES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "statistics over the batch": lambda self, x: centred(self.a(x)),
    "attention over the batch": lambda self, x: attended(self.a(x)),
    "batch_norm in training": lambda self, x: F.batch_norm(self.a(x), None, None, training=True),
    "a sum over the batch so far": lambda self, x: self.a(x).cumsum(0),
    "negatives from the batch": lambda self, x: self.a(x) @ torch.tanh(self.b(x)).T,
    "samples one by one, then together": lambda self, x: centred(torch.stack([self.a(row) for row in x])),
    "a parameter times one sample after another": lambda self, x: centred(
        torch.stack([row * self.c for row in x])
    ),
    "a sum over samples in a loop": lambda self, x: torch.tanh(x) * sum(row + self.c for row in x),
    "a parameter repeated for each sample": lambda self, x: centred((x + self.c.expand_as(x)).tanh()),
    "a parameter scaled by each sample": lambda self, x: centred(x * self.c.expand_as(x)),
    "a bound of each sample": lambda self, x: centred(torch.clamp(self.c, max=x)),
    "data added to a product": lambda self, x: centred(torch.addmm(x, self.a.weight, self.b.weight)),
    "statistics over nodes, not samples": lambda self, x: (
        torch.stack(centred(self.a(torch.cat([x, x[:2]]))).tanh().split([1, 1, 1, 3])[3:] * 4)
        .sum((1, 2))
        .unsqueeze(1)
        * torch.linspace(1, 2, 4).unsqueeze(1).to(x)
    ),
}


def mixing(kind: str) -> nn.Module:
    model = wired(MIXES[kind], a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.c = nn.Parameter(torch.randn(4, dtype=torch.float64))
    return gradbatch.extend(model)


@pytest.mark.parametrize("kind", MIXES)
def test_samples_that_mix_are_refused_both_ways(kind: str) -> None:
    model, x = mixing(kind), draw(4, 4)
    assert_refused(model, lambda: sum_of_squares(model(x)), CoupledSamples, r"\(Linear\)|the model itself")


@pytest.mark.parametrize("kind", MIXES)
def test_where_it_is_allowed_each_loss_has_its_own_gradient(kind: str) -> None:
    model, x = mixing(kind), draw(4, 4)
    losses = lambda: sum_of_squares(model(x))  # noqa: E731
    right = expected(model, losses)
    assert_results(gradbatch.backward(model, losses(), *QUANTITIES, samples_coupled="allow"), right)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum", samples_coupled="allow") as results:
        losses().sum().backward()
    assert_results(results, right)


def test_batch_norm_in_training_is_allowed_on_request() -> None:
    model = gradbatch.extend(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    )
    x = draw(5, 3)
    losses = lambda: sum_of_squares(model(x))  # noqa: E731
    with pytest.raises(CoupledSamples, match="1 \\(BatchNorm1d\\)"):
        gradbatch.per_sample_grads(model, losses())
    found = gradbatch.backward(model, losses(), *QUANTITIES, samples_coupled="allow")
    assert_results(found, expected(model, losses))


def test_another_word_than_refuse_or_allow_is_refused() -> None:
    model, x = perceptron(), draw(4, 3)
    with pytest.raises(UsageError, match='samples_coupled is True; it is "refuse"'):
        gradbatch.backward(model, sum_of_squares(model(x)), *QUANTITIES, samples_coupled=True)


def test_ids_of_other_samples_are_no_positions() -> None:
    """Whether they happen to go up evenly or not, and whatever their number."""
    model = wired(lambda self, i: self.u(i) @ self.v(i).T, u=nn.Embedding(9, 3), v=nn.Embedding(9, 3))
    for ids in ([0, 1, 2, 3], [7, 2, 0, 3], [7, 2]):
        i = torch.tensor(ids)
        losses = lambda: F.cross_entropy(model(i), torch.arange(len(i)), reduction="none")  # noqa: E731, B023
        assert_refused(model, losses, CoupledSamples, r"v \(Embedding\)", ways=("backward",))
