"""A random network on several batches, with what its per-sample gradients should be, and how a run turned out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gradbatch
from gradbatch import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    CoupledSamples,
    GradBatchError,
    Planner,
    SumGradSquared,
)
from gradbatch.capture.direct import capture_losses
from gradbatch.selection import select
from tests.oracle import one_hot_of, trainable
from tests.random_network import RandomNetwork
from tests.random_steps.registry import COUPLING, LEAKY, RANDOM, STEPS, STOPPING

WAYS = ("backward", "compute")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3}
FACTORS = {
    "plain": (1.0,),
    "scaled": (1.0, 1e3, 1e-3),
    "wild": (1.0, 1e8, 1e-12),
    "some dead": (1.0, 0.0),
    "all tiny": (1e-30,),
    "non-finite": (1.0,),
}
Gradients = dict[str, Tensor]


@dataclass
class Batch:
    """Inputs ``[N, T, C]``, the samples' numbers ``[N]``, and factors of their losses ``[N]``.

    ``finite`` are the samples in which every number is.
    """

    input: Tensor
    which: Tensor
    factors: Tensor
    finite: list[int]

    def alone(self, sample: int) -> Batch:
        """A batch of this sample only."""
        own = slice(sample, sample + 1)
        return Batch(self.input.detach()[own], self.which[own], self.factors[own], [0])


class Trial:
    """A network, extended, with its batches.

    Args:
        seed: of everything.
        coupled: whether a coupling step may be among the steps.
        steps: what to do, in this order; drawn from everything that fits if it is not given.
        kind: of the losses' factors; drawn if it is not given.
        batches: how many, one training step each; the third is the first that relies on what two have agreed on.
    """

    def __init__(
        self,
        seed: int,
        coupled: bool = False,
        steps: Sequence[str] | None = None,
        kind: str | None = None,
        batches: int = 3,
    ) -> None:
        draw = random.Random(seed)
        samples = draw.choice([1, 2, 2, 3, 3, 4, 5] if not coupled else [2, 3, 4])
        positions, channels = draw.choice([1, 2, 3, samples, samples]), draw.choice([samples, 2, 3, 4])
        # Few non-finite ones: where an operation adds the samples up in one kernel, they are refused.
        self.kind = draw.choice(
            ["plain", "plain", *3 * sorted(FACTORS.keys() - {"non-finite"}), "non-finite"]
        )
        if coupled:
            self.kind = draw.choice(["plain", "scaled"])
        self.kind = self.kind if kind is None else kind
        self.dtype = draw.choice([torch.float64, torch.float64, torch.float32])
        self.dtype = torch.float64 if coupled else self.dtype
        names, in_order = (self._steps(coupled), False) if steps is None else (steps, True)
        self.network = RandomNetwork(seed, samples, positions, channels, names, self.dtype, in_order)
        self.needs_gradient = draw.random() < 0.15
        others = [samples] * 3 + [max(2 if coupled else 1, samples - 1), samples + 1, samples + 2]
        sizes = [samples, *(draw.choice(others) for _ in range(batches - 1))]
        torch.manual_seed(seed)
        self.batches = [self._batch(size, 10 * i, draw) for i, size in enumerate(sizes)]
        self.losses(self.batches[0])  # makes the layers
        self.coupling = set(self.network.drawn) & set(COUPLING)
        self.right = [one_hot_of(self.losses(batch), self.parameters()) for batch in self.batches]
        if self.kind == "non-finite" and not self.coupling:
            for batch in self.batches:
                self._spoil(batch, draw)

    def _steps(self, coupled: bool) -> list[str]:
        if coupled:
            return sorted(set(STEPS) - RANDOM - STOPPING) + 8 * sorted(COUPLING)
        return sorted(set(STEPS) - LEAKY) if self.kind == "non-finite" else sorted(STEPS)

    def _batch(self, samples: int, first: int, draw: random.Random) -> Batch:
        network = self.network
        input = torch.randn(samples, network.positions, network.channels, dtype=self.dtype)
        factors = [draw.choice(FACTORS[self.kind]) for _ in range(samples)]
        return Batch(
            input.requires_grad_(self.needs_gradient),
            torch.arange(first, first + samples),
            torch.tensor(factors, dtype=self.dtype),
            list(range(samples)),
        )

    def _spoil(self, batch: Batch, draw: random.Random) -> None:
        if len(batch.input) > 1:
            bad = draw.choice(batch.finite)
            batch.finite.remove(bad)
            position = draw.randrange(self.network.positions)
            batch.input.data[bad, position] = draw.choice([float("nan"), float("inf")])

    def __repr__(self) -> str:
        network = self.network
        sizes = f"N={[len(b.input) for b in self.batches]} T={network.positions} C={network.channels}"
        needs = " input needs gradient," if self.needs_gradient else ""
        return f"{network.seed}: {sizes}, {self.dtype}, {self.kind},{needs} steps {' '.join(network.drawn)}"

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return trainable(self.network)

    def losses(self, batch: Batch) -> Tensor:
        return self.network(batch.input, batch.which).square().sum(1) * batch.factors

    def one_at_a_time(self, batch: Batch) -> Gradients:
        """What each sample's gradients are in a batch of its own."""
        single = [batch.alone(sample) for sample in range(len(batch.input))]
        rows = [one_hot_of(self.losses(one), self.parameters()) for one in single]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def readers(self) -> Counter[str]:
        """How many uses of parameters were read in which way."""
        gradbatch.extend(self.network)
        captured = capture_losses(self.losses(self.batches[0]), select(self.network, None).names, Planner())
        return Counter(evaluation.reader for evaluation in captured.evaluations)

    def rounding(self, batch: Batch, gradients: Gradients) -> Gradients:
        """How far float32 gradients are from the same ones in float64."""
        self.network.double().dtype = torch.float64
        precise = Batch(batch.input.detach().double(), batch.which, batch.factors.double(), batch.finite)
        exact = one_hot_of(self.losses(precise), self.parameters())
        self.network.float().dtype = self.dtype
        return {name: gradient - exact[name] for name, gradient in gradients.items()}

    # ---- what a run comes to

    def outcome(self, way: str) -> str:
        """``right``, ``refused: …``, ``wrong: …`` or ``raised: …``."""
        gradbatch.extend(self.network)  # forgets what another way has found out
        for number, batch in enumerate(self.batches):
            try:
                results = self.run(way, batch)
            except CoupledSamples as refusal:
                return f"refused: coupled, step {number}: {refusal}"
            except GradBatchError as refusal:
                return f"refused: {type(refusal).__name__}, step {number}: {refusal}"
            except Exception as error:  # an error that is none of ours
                return f"raised: {type(error).__name__}, step {number}: {error}"
            expected = self.right[number]
            # In a batch, zero times a gradient that is not finite (a distance of zero) gets into all others.
            if self.coupling or not all(bool(g[batch.finite].isfinite().all()) for g in expected.values()):
                expected = self.one_at_a_time(batch)
            error = self.mistake(results, expected, batch)
            if error is not None:
                return f"wrong: step {number}: {error}"
        return "right"

    def run(self, way: str, batch: Batch) -> gradbatch.Results:
        quantities = BatchGrad(), BatchL2Grad(), BatchDotGrad(), SumGradSquared()
        if way == "backward":
            return gradbatch.backward(self.network, self.losses(batch), *quantities)
        with gradbatch.compute(self.network, *quantities, loss_reduction="mean") as results:
            self.losses(batch).mean().backward()
        return results

    def mistake(self, results: gradbatch.Results, expected: Gradients, batch: Batch) -> str | None:
        """What is wrong with the results, if anything is."""
        found = {name: results[BatchGrad][name] for name in expected}
        off = difference(found, expected, batch.finite, self.dtype)
        if off is not None and self.dtype == torch.float32:
            # Where terms cancel, what torch itself finds for a sample is as far from the truth.
            off = difference(found, expected, batch.finite, self.dtype, self.rounding(batch, expected))
        if (
            off is not None
            or self.kind not in ("plain", "scaled", "some dead")
            or self.dtype != torch.float64
        ):
            return off
        for name, gradient in found.items():
            flat, norms = _flat(gradient), results[BatchL2Grad][name]
            sizes, gram = flat.norm(dim=1), results[BatchDotGrad][name]
            squares = results[SumGradSquared][name].flatten()
            pairs = sizes * sizes.unsqueeze(1)
            if not bool(((norms - sizes.square()).abs() <= 1e-9 * sizes.square() + 1e-200).all()):
                return f"norm of {name}"
            if not bool(((gram - flat @ flat.T).abs() <= 1e-9 * pairs + 1e-200).all()):
                return f"gram of {name}"
            if not torch.allclose(squares, flat.square().sum(0), 1e-8, 1e-12 * float(sizes.amax()) ** 2):
                return f"sum of squares of {name}"
        return None


def difference(
    found: Gradients,
    expected: Gradients,
    finite: list[int],
    dtype: torch.dtype,
    rounding: Gradients | None = None,
) -> str | None:
    """Where gradients differ by more than rounding, relative to each sample's own size, if they do.

    Args:
        found: to be judged.
        expected: what they should be.
        finite: the samples to look at.
        dtype: that they were computed in.
        rounding: what is known of the errors of ``expected``.
    """
    tolerance = TOLERANCE[dtype]
    # Some samples' own gradients are not finite, although the samples are: some of what is found may not be, either.
    right_ones, found_ones = (_are_finite(gradients) for gradients in (expected, found))
    if bool((~right_ones & found_ones)[finite].any()):
        return f"finite are {found_ones.tolist()} and not {right_ones.tolist()}"
    finite = [sample for sample in finite if right_ones[sample]]
    # What comes near the smallest number on its way is rounded there, and may grow afterwards.
    smallest = torch.finfo(dtype).smallest_normal * 2.0**16
    sizes = [_flat(gradient)[finite].norm(dim=1) for gradient in expected.values()]
    # Rounding is relative to what was added up, and a parameter's share of a sample's gradient may be tiny.
    whole = torch.stack(sizes).amax(0)
    for (name, right), size in zip(expected.items(), sizes, strict=True):
        if found[name].shape != right.shape:
            return f"{name} has shape {tuple(found[name].shape)} and not {tuple(right.shape)}"
        error = (_flat(found[name]) - _flat(right))[finite].norm(dim=1)
        allowed = tolerance * size + tolerance * 1e-2 * whole + smallest
        if rounding is not None:
            allowed = allowed + 4 * _flat(rounding[name])[finite].norm(dim=1)
        if not bool((error <= allowed).all()):
            return f"{name} is off by {error.tolist()} of {size.tolist()}"
    return None


def _are_finite(gradients: Gradients) -> Tensor:
    """Which samples' gradients are finite in all parameters, ``[N]``."""
    return torch.stack([_flat(gradient).isfinite().all(1) for gradient in gradients.values()]).all(0)


def _flat(gradient: Tensor) -> Tensor:
    """``[N, elements]``, in the precision that errors are measured in."""
    return gradient.double().reshape(len(gradient), -1)
