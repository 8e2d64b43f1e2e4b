"""Gradients that are zero but for rounding, and batches of which one sample alone is alive."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, CoupledSamples
from tests.capture.reference import assert_refused, assert_right_both_ways, draw, sum_of_squares, wired


class Residue(torch.autograd.Function):
    """A sum that cancels: its gradient is zero while ``size`` is, and little else afterwards."""

    size = torch.zeros(())

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * Residue.size


def watched_with(size: Tensor) -> None:
    """By ``compute``, where ``Residue`` shows its size in the user's backward alone."""
    model = wired(
        lambda self, x: self.layer(x) + Residue.apply(self.other(x)),
        layer=nn.Linear(3, 2),
        other=nn.Linear(3, 2),
    )
    x, Residue.size = draw(4, 3), torch.where(size == 1, 1.0, 0.0)
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
        losses = sum_of_squares(model(x))
        Residue.size = size
        losses.sum().backward()
    assert results[BatchGrad]["layer.weight"].any()


# All of a gradient left out; and a part of one kept whose owners the rest of it shows.
PART = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64)


@pytest.mark.parametrize("size", [torch.tensor(1e-15), torch.where(PART == 1, PART, 1e-11)])
def test_rounding_errors_are_not_taken_for_gradients_from_elsewhere(size: Tensor) -> None:
    watched_with(size)


@pytest.mark.parametrize("size", [torch.tensor(1e-9), torch.where(PART == 1, PART, 1e-6)])
def test_what_is_no_rounding_error_is_refused(size: Tensor) -> None:
    with pytest.raises(CoupledSamples, match="a gradient arrived where none does"):
        watched_with(size)


@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
def test_a_normalised_weight_is_right_where_one_sample_alone_is_alive() -> None:
    def standardised(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.layer.weight.flatten(1).unsqueeze(0), None, None, training=True, eps=0.1)
        return F.conv1d(x, weight.view_as(self.layer.weight))

    model, x = wired(standardised, layer=nn.Conv1d(2, 4, 2, bias=False)), draw(4, 2, 5)
    for alive in range(4):
        weights = F.one_hot(torch.tensor(alive), 4).double()
        assert_right_both_ways(model, lambda weights=weights: sum_of_squares(model(x)) * weights)


def test_a_batch_that_is_normalised_is_refused_where_one_sample_alone_is_alive() -> None:
    model = wired(
        lambda self, x: F.batch_norm(self.layer(x), None, None, self.layer.bias, training=True),
        layer=nn.Linear(3, 4),
    )
    x, weights = draw(4, 3), torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert_refused(model, lambda: sum_of_squares(model(x)) * weights, CoupledSamples, "layer|normalises")


@pytest.mark.parametrize("samples", [3, 4])
def test_rows_of_a_frozen_table_are_positions(samples: int) -> None:
    table = nn.Embedding(6, 4).requires_grad_(False)
    model = wired(
        lambda self, x: x + self.layer(self.table(torch.arange(3))),
        layer=nn.Linear(4, 4, bias=False),
        table=table,
    )
    x = draw(samples, 3, 4)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
