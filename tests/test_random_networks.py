"""Networks drawn at random are right or refused, and those whose samples lie regularly are right.

``GRADBATCH_NETWORKS`` sets how many are tried, ``GRADBATCH_FIRST_NETWORK`` the first seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

import gradbatch
from gradbatch import BatchDotGrad, BatchGrad, BatchL2Grad, GradBatchError, SumGradSquared
from tests.oracle import one_hot_of, trainable
from tests.random_network import IRREGULAR, REGULAR, RandomNetwork

COUNT = int(os.environ.get("GRADBATCH_NETWORKS", "100"))
FIRST = int(os.environ.get("GRADBATCH_FIRST_NETWORK", "0"))
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
FACTORS = {
    "plain": (1.0,),
    "scaled": (1.0, 1e3, 1e-3),
    "wild": (1.0, 1e8, 1e-12),
    "some dead": (1.0, 0.0),
    "all tiny": (1e-30,),
    "non-finite": (1.0,),
}


class Trial:
    """A network with its inputs, the losses' factors, and what the per-sample gradients should be."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        samples = draw.choice([1, 2, 2, 3, 3, 4, 5])
        positions, channels = draw.choice([1, 2, 3, samples, samples]), draw.choice([samples, 2, 3, 4])
        self.kind = draw.choice(["plain", *FACTORS])
        self.dtype = draw.choice([torch.float64, torch.float64, torch.float32])
        steps = REGULAR + IRREGULAR if draw.random() < 0.4 else REGULAR
        self.network = RandomNetwork(seed, samples, positions, channels, steps, self.dtype)
        torch.manual_seed(seed)
        self.input = torch.randn(samples, positions, channels, dtype=self.dtype)
        self.network(self.input)  # makes the layers
        gradbatch.extend(self.network)
        self.regular = not set(self.network.drawn) & set(IRREGULAR)
        self.factors = torch.tensor(
            [draw.choice(FACTORS[self.kind]) for _ in range(samples)], dtype=self.dtype
        )
        self.right = one_hot_of(self.losses(), trainable(self.network))
        self.finite = list(range(samples))
        if self.kind == "non-finite" and self.regular and samples > 1:
            bad = draw.randrange(samples)
            self.finite.remove(bad)
            self.input[bad, draw.randrange(positions)] = draw.choice([float("nan"), float("inf")])

    def losses(self) -> Tensor:
        return self.network(self.input).square().sum(1) * self.factors

    def __repr__(self) -> str:
        network = self.network
        sizes = f"N={network.samples} T={network.positions} C={network.channels}"
        return f"network {network.seed}: {sizes}, {self.dtype}, {self.kind}, steps {' '.join(network.drawn)}"

    def outcome(self, way: str) -> gradbatch.Results | GradBatchError:
        try:
            return self.run(way)
        except GradBatchError as refusal:
            return refusal

    def run(self, way: str) -> gradbatch.Results:
        quantities = BatchGrad(), BatchL2Grad(), BatchDotGrad(), SumGradSquared()
        if way == "backward":
            return gradbatch.backward(self.network, self.losses(), *quantities)
        with gradbatch.compute(self.network, *quantities, loss_reduction="mean") as results:
            self.losses().mean().backward()
        return results

    def check(self, results: gradbatch.Results) -> None:
        """Each sample's gradient is right relative to its own size, and the quantities are those of the gradients."""
        tolerance = TOLERANCE[self.dtype]
        for name, gradient in self.right.items():
            right, found = gradient.double().flatten(1), results[BatchGrad][name].double().flatten(1)
            right, found = right[self.finite], found[self.finite]
            # Rounding is relative to what was added up, and a parameter's share of a sample's gradient may be tiny.
            whole = torch.stack([g.double().flatten(1)[self.finite].norm(dim=1) for g in self.right.values()])
            allowed = tolerance * right.norm(dim=1) + tolerance * 1e-2 * whole.amax(0)
            smallest = torch.finfo(self.dtype).smallest_normal
            error = (found - right).norm(dim=1)
            assert (error <= allowed + smallest).all(), (
                f"{self}: {name} is off by {error / right.norm(dim=1)}"
            )
            if self.kind in ("plain", "scaled", "some dead") and self.dtype == torch.float64:
                self.check_quantities(results, name, found)

    def check_quantities(self, results: gradbatch.Results, name: str, found: Tensor) -> None:
        sizes = found.norm(dim=1)
        norms, gram = results[BatchL2Grad][name][self.finite], results[BatchDotGrad][name][self.finite]
        torch.testing.assert_close(
            norms, sizes.square(), rtol=1e-9, atol=1e-200, msg=f"{self}: norm of {name}"
        )
        error = (gram[:, self.finite] - found @ found.T).abs()
        assert (error <= 1e-9 * sizes * sizes.unsqueeze(1) + 1e-200).all(), f"{self}: gram of {name}"
        if len(self.finite) == len(self.input):
            squares = results[SumGradSquared][name].flatten()
            torch.testing.assert_close(
                squares, found.square().sum(0), rtol=1e-8, atol=1e-12 * float(sizes.amax()) ** 2
            )


@pytest.mark.parametrize("way", ["backward", "compute"])
def test_random_networks_are_right_or_refused_and_regular_ones_are_right(way: str) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + COUNT):
        trial = Trial(seed)
        outcome = trial.outcome(way)
        if isinstance(outcome, GradBatchError):
            # A sample of which nothing is finite may leave open where the samples lie.
            assert not trial.regular or trial.kind == "non-finite", f"{trial}: {outcome}"
            assert "layers." in str(outcome), f"{trial}: {outcome}"
            outcomes[type(outcome).__name__] += 1
        else:
            trial.check(outcome)
            outcomes["right"] += 1
    print(f"{way}: {dict(outcomes)}")  # noqa: T201
    assert outcomes["right"] >= 0.6 * COUNT
