"""What one rank of data-parallel training does: measure its own share, and add up what all ranks have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradbatch
from gradbatch import BatchL2Grad, SumGradSquared
from gradbatch.analysis import FisherDiagonal, GradientMonitor, NoiseScale, RandomProjection, SampleScores

STEPS, SHARE, RATE = 5, 6, 0.1


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of all ranks together, the share of the first one first."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2 * SHARE, 5, generator=generator, dtype=torch.double)
    return x, torch.randint(3, (2 * SHARE,), generator=generator)


def share(rank: int) -> slice:
    return slice(rank * SHARE, (rank + 1) * SHARE)


def summed(noise: NoiseScale) -> NoiseScale:
    """Of all ranks, by sums over ranks of its state."""
    state = noise.state_dict()
    for tensor in state.values():
        dist.all_reduce(tensor)
    noise.load_state_dict(state)
    return noise


def monitored(rank: int, directory: str) -> dict[str, Any]:
    """Train with DistributedDataParallel, with a monitor and a log on each rank."""
    model = network()
    monitor = GradientMonitor(
        model, Path(directory) / f"{rank}.jsonl", every=1, preset="full", groups={"biases": "*.bias"}
    )
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    for k in range(STEPS):
        x, y = (tensor[share(rank)] for tensor in batch(k))
        optimizer.zero_grad()
        with monitor.step(k, ids=range(12 * k + rank * SHARE, 12 * k + (rank + 1) * SHARE)):
            F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    monitor.close()
    noises = {name: summed(getattr(monitor, name)) for name in ("noise", "layers", "groups")}
    return {name: (noise.value(), *noise.interval()) for name, noise in noises.items()}


def collected(rank: int) -> dict[str, Any]:
    """Scores, Fisher diagonal and random features of each rank's share, gathered from all ranks."""
    model = gradbatch.extend(network())
    scores, fisher, features = SampleScores(2 * SHARE), FisherDiagonal(), RandomProjection(16)
    x, y = (tensor[share(rank)] for tensor in batch(0))
    losses = F.cross_entropy(model(x), y, reduction="none")
    results = gradbatch.backward(model, losses, BatchL2Grad(), SumGradSquared(), features)
    scores.update(range(rank * SHARE, (rank + 1) * SHARE), results[BatchL2Grad].total().sqrt())
    fisher.update(results[SumGradSquared], SHARE)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (scores, fisher, results[features].total()))
    (scores, fisher, rows), (others, theirs, more) = everyone
    scores.merge(others)
    fisher.merge(theirs)
    return {"scores": scores.mean(), "fisher": fisher.value(), "features": torch.cat([rows, more])}
