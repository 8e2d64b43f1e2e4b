"""Two models trained in two threads do not disturb each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from tests.capture.reference import WAYS, assert_results, expected, sum_of_squares, wired

STEPS = 8


def network() -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.first.bias
        return self.second(hidden + self.attention(hidden, hidden, hidden)[0]).flatten(1)

    return wired(
        forward,
        first=nn.Linear(3, 4),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        second=nn.Linear(4, 2),
    )


def train(model: nn.Module, way: str, seed: int) -> int:
    """Steps with checks of every gradient; the number of steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(STEPS):
        x = torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        assert_results(WAYS[way](model, losses), expected(model, losses))
        optimizer.zero_grad()
        losses().mean().backward()
        optimizer.step()
    return STEPS


@pytest.mark.parametrize("ways", [("backward", "compute"), ("compute", "compute"), ("backward", "backward")])
def test_two_models_are_trained_in_two_threads(ways: tuple[str, str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(train, network(), way, seed) for seed, way in enumerate(ways)]
        assert [job.result() for job in running] == [STEPS, STEPS]


def test_one_extended_model_serves_forwards_in_several_threads() -> None:
    model = network()
    with ThreadPoolExecutor(4) as pool:
        inputs = [torch.randn(3, 5, 3, dtype=torch.float64) for _ in range(8)]
        found = list(pool.map(lambda x: gradbatch.per_sample_grads(model, sum_of_squares(model(x))), inputs))
    for x, grads in zip(inputs, found, strict=True):
        for name, right in expected(model, lambda: sum_of_squares(model(x))).items():  # noqa: B023
            torch.testing.assert_close(grads[name], right)
