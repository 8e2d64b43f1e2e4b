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
from gradbatch import BatchGrad, BatchL2Grad, SumGradSquared
from gradbatch.analysis import (
    FeatureStore,
    FisherDiagonal,
    GradientMonitor,
    NoiseScale,
    RandomProjection,
    SampleScores,
    SumL2Grad,
    cabs_batch_size,
    coherence,
    coherence_interval,
    confusion,
    cosines,
    diversity,
    inner_product_test,
    norm_test,
    orthogonality_test,
    stiffness,
    stopping_evidence,
)

STEPS, SHARE, RATE = 5, 6, 0.1
UNEQUAL = (slice(0, 5), slice(3, 12))  # two samples are in both, as where a sampler fills up the last batch


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


def pooled(rank: int, directory: str) -> dict[str, Any]:
    """What says something of all ranks' samples together, where one rank has more of them."""
    model, own, projection = gradbatch.extend(network()), UNEQUAL[rank], RandomProjection(16)
    wrapped = DistributedDataParallel(model)
    x, y = (tensor[own] for tensor in batch(0))
    asked = (BatchGrad(), BatchL2Grad(), SumL2Grad(), SumGradSquared(), projection)
    with gradbatch.compute(model, *asked, loss_reduction="mean") as results:
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
    rows = results[BatchGrad]
    noise = NoiseScale()
    noise.update(len(x), results[BatchL2Grad].total().sum(), results[SumL2Grad].total())

    # What adds up over ranks: sums of gradients before they are squared, sums of squares, losses times samples.
    means = {name: grad.sum(0) for name, grad in rows.items()}
    squares = results[SumGradSquared]
    count, losses = torch.tensor(len(x)), loss.detach() * len(x)
    for tensor in (*means.values(), *squares.values(), count, losses):
        dist.all_reduce(tensor)
    n = int(count)
    variances = {name: (squares[name] - means[name] ** 2 / n) / (n - 1) for name in means}
    total = torch.cat([mean.flatten() for mean in means.values()])

    # What is of each sample or pair is put one after another.
    mine = torch.cat([grad.flatten(1) for grad in rows.values()], 1)
    ids, scores = torch.arange(12)[own], SampleScores(12)
    scores.update(ids, results[BatchL2Grad].total().sqrt())
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (mine, y, mine @ total, ids, results[projection].total(), scores))
    all_rows, labels, dots, all_ids, features = (torch.cat([each[k] for each in everyone]) for k in range(5))
    everyone[0][5].merge(everyone[1][5])
    gram = all_rows @ all_rows.mT
    sums = float(gram.trace()), float(total.square().sum())
    found = {
        "coherence": (
            coherence(gram.trace(), total.square().sum()),
            *coherence_interval(gram.diagonal(), dots),
        ),
        "diversity": diversity(gram.trace(), total.square().sum()),
        "confusion": confusion(gram),
        "cosines": cosines(gram),
        "stiffness": stiffness(gram, labels)[1],
        "norm": norm_test(n, *sums),
        "inner product": inner_product_test(n, sums[1], float(dots.square().sum())),
        "orthogonality": orthogonality_test(n, *sums, float(dots.square().sum())),
        "cabs": cabs_batch_size(float(summed(noise).variance()), float(losses / n), RATE),
        "evidence": stopping_evidence(n, {name: mean / n for name, mean in means.items()}, variances),
        "scores": everyone[0][5].mean(),
    }
    if rank == 0:  # a store takes one writer
        FeatureStore(Path(directory) / "features", 12, projection).write(all_ids, features)
    dist.barrier()
    return found | {"influence": FeatureStore(Path(directory) / "features").influence(features[:2])}
