"""Samples that the user names: several losses, or rows of the outputs, that belong to one sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, UsageError
from tests.capture.reference import (
    QUANTITIES,
    assert_results,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    wired,
)

IDS = {
    "augmentations side by side": [0, 0, 1, 1, 2, 2],
    "augmentations one after another": [0, 1, 2, 0, 1, 2],
    "unequal numbers": [0, 0, 0, 1, 2, 2],
    "out of order": [2, 0, 1, 0, 2, 2],
    "one sample": [0, 0, 0, 0, 0, 0],
    "each its own": [0, 1, 2, 3, 4, 5],
    "one without rows": [0, 0, 3, 3, 1, 1],
}
every_kind = pytest.mark.parametrize("ids", [torch.tensor(ids) for ids in IDS.values()], ids=list(IDS))


def grouped(gradients: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """The sum over each sample's rows."""
    count = int(ids.max()) + 1
    return {
        name: torch.stack([rows[ids == sample].sum(0) for sample in range(count)])
        for name, rows in gradients.items()
    }


def network() -> nn.Module:
    """Layers of every structure, a raw parameter, and an axis of positions."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) * self.first.bias
        return self.conv(torch.tanh(hidden).mT).flatten(1)

    return wired(forward, first=nn.Linear(3, 4), norm=nn.LayerNorm(4), conv=nn.Conv1d(4, 2, 2))


@every_kind
def test_a_samples_gradient_is_the_sum_over_its_losses_in_every_quantity(ids: Tensor) -> None:
    model, x = network(), draw(6, 5, 3)
    losses = lambda: sum_of_squares(model(x))  # noqa: E731
    right = grouped(expected(model, losses), ids)
    assert_results(gradbatch.backward(model, losses(), *QUANTITIES, sample_ids=ids), right)
    for reduction in ("mean", "sum"):
        with gradbatch.compute(model, *QUANTITIES, loss_reduction=reduction, sample_ids=ids) as results:
            getattr(losses(), reduction)().backward()
        assert_results(results, right)


@every_kind
def test_several_steps_with_the_same_and_other_ids_are_right(ids: Tensor) -> None:
    model = network()
    for step in range(6):
        x = draw(6, 5, 3)
        now = ids if step % 3 else ids.flip(0)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        found = gradbatch.backward(model, losses(), *QUANTITIES, sample_ids=now)
        assert_results(found, grouped(expected(model, losses), now))


def test_nodes_of_several_graphs_in_one_batch() -> None:
    """Messages go along edges within each graph; its loss is the sum over its nodes."""
    graphs, x = torch.tensor([0, 0, 0, 1, 1, 2]), draw(6, 3)
    edges = torch.tensor([[0, 1, 2, 0, 3, 4, 5], [1, 2, 0, 2, 4, 3, 5]])

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            messages = layer(x)[edges[0]]
            x = x + torch.tanh(torch.zeros_like(x).index_add(0, edges[1], messages))
        return x

    model = wired(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    losses = lambda: sum_of_squares(model(x))  # noqa: E731
    found = gradbatch.backward(model, losses(), *QUANTITIES, sample_ids=graphs)
    assert_results(found, grouped(expected(model, losses), graphs))


def test_steps_of_packed_sequences() -> None:
    """One loss a step: the steps of all sequences lie in one packed tensor."""
    lengths = torch.tensor([4, 2, 3])
    packed = nn.utils.rnn.pack_padded_sequence(draw(3, 4, 2), lengths, batch_first=True, enforce_sorted=False)
    steps = nn.utils.rnn.pack_padded_sequence(
        torch.arange(3).unsqueeze(1).expand(3, 4), lengths, batch_first=True, enforce_sorted=False
    )
    model = wired(
        lambda self, x: self.head(self.lstm(x)[0].data),
        lstm=nn.LSTM(2, 3, batch_first=True),
        head=nn.Linear(3, 2),
    )
    losses = lambda: sum_of_squares(model(packed))  # noqa: E731
    found = gradbatch.backward(model, losses(), *QUANTITIES, sample_ids=steps.data)
    assert_results(found, grouped(expected(model, losses), steps.data))


def test_rows_that_are_coupled_within_a_sample_are_no_coupling_of_samples() -> None:
    """Two views of each sample are compared with each other."""
    model, x, ids = perceptron(), draw(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])

    def losses() -> Tensor:
        first, second = model(x).chunk(2)
        distance = (first - second).square().sum(1)
        return torch.cat([distance, 2 * distance])

    found = gradbatch.backward(model, losses(), *QUANTITIES, sample_ids=ids)
    assert_results(found, grouped(expected(model, losses), ids))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0, 1]), r"sample_ids is \[2\]; expected a tensor \[6\]"),
        ([0, 0, 1, 1, 2, 2], "sample_ids is list"),
        (torch.zeros(6), "whole numbers"),
        (torch.tensor([0, 0, -1, 1, 2, 2]), "numbered from 0"),
    ],
)
def test_ids_that_make_no_sense_are_refused(ids: Tensor, message: str) -> None:
    model, x = perceptron(), draw(6, 3)
    with pytest.raises(UsageError, match=message):
        gradbatch.per_sample_grads(model, sum_of_squares(model(x)), sample_ids=ids)
    with (
        pytest.raises(UsageError, match=message),
        gradbatch.compute(model, BatchGrad(), loss_reduction="sum", sample_ids=ids),
    ):
        sum_of_squares(model(x)).sum().backward()
