"""What the ranks of a process group do in the tests of distributed training; each function gets its rank first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import gradbatch
from gradbatch import privacy
from gradbatch.errors import DistributedError, UsageError
from gradbatch.privacy.distributed import fingerprint, noise_of_rank, noised_sums, whole_parameters
from gradbatch.privacy.ranks import Ranks

MAX_NORM, STEPS = 0.3, 6


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Failing(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("no gradient today")


class Body(nn.Module):
    """With rows that no number of ranks divides, a parameter of one row, and one of none."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.block = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embed(tokens).mean(1)) * self.scale
        return self.head(Failing.apply(hidden) if self.fails else hidden)


def model_and_data() -> tuple[Body, TensorDataset]:
    torch.manual_seed(0)
    model = Body().double()
    return model, TensorDataset(torch.randint(11, (24, 4)), torch.randint(3, (24,)))


def wrapped(model: Body, how: str) -> tuple[nn.Module, nn.Module]:
    """What is called, and what has the parameters."""
    if how == "ddp":
        return DistributedDataParallel(model), model
    if how.startswith("fsdp"):
        reshard = {"fsdp": True, "fsdp kept": False}[how]
        fully_shard(model.block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    return model, model


def train(rank: int, how: str, std: float, rate: float = 0.15) -> tuple[dict[str, torch.Tensor], int]:
    """Private training by the functions of the package alone: the whole parameters, and how many batches were empty."""
    model, data = model_and_data()
    called, model = wrapped(model, how)
    gradbatch.extend(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = privacy.poisson_loader(data, sample_rate=rate, steps=STEPS, generator=seeded(3))
    ranks = Ranks()
    noise = noise_of_rank(ranks, privacy.GaussianNoise(seeded(5)))
    with ranks.together("starting", parameters=fingerprint(model.parameters()), rate=rate):
        pass
    empty = 0
    for tokens, labels in loader:
        with ranks.together("a step"):
            losses = F.cross_entropy(called(tokens), labels, reduction="none")
            empty += not len(labels)
            with whole_parameters(model):
                sums = clipped_sums(model, losses)
        totals = noised_sums(ranks, {p: sums[n] for n, p in model.named_parameters()}, noise, std)
        for parameter, total in totals.items():
            parameter.grad = total / loader.expected_batch_size
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}, empty


def clipped_sums(model: nn.Module, losses: torch.Tensor) -> dict[str, torch.Tensor]:
    if not len(losses):
        return {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return dict(gradbatch.backward(model, losses, gradbatch.ClippedSum(MAX_NORM))[gradbatch.ClippedSum])


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


# ---- sums and noise


def sums_and_noise(rank: int, rows: int, replicas: int, std: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A sharded parameter's total, whole and as the rank's own shard; every rank's sum is ``rank + 1``."""
    size = dist.get_world_size()
    shape, names = (
        ((size,), ("shard",)) if replicas == 1 else ((replicas, size // replicas), ("replica", "shard"))
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    parameter = nn.Parameter(distribute_tensor(torch.zeros(rows, 3), mesh, placements))
    ranks = Ranks()
    noise = noise_of_rank(ranks, privacy.GaussianNoise(seeded(1)))
    own = torch.full((rows, 3), rank + 1.0, dtype=torch.float64)
    total = noised_sums(ranks, {parameter: own}, noise, std)[parameter]
    assert isinstance(total, DTensor) and total.placements == parameter.placements
    assert total.shape == parameter.shape and total.dtype == torch.float64
    return total.full_tensor(), total.to_local()


def shared_sums(rank: int, secure: bool) -> list[torch.Tensor]:
    """Tensors that all ranks hold, of several dtypes, layouts and standard deviations."""
    tensors = {
        "first": torch.full((4, 5), rank + 1.0),
        "second": torch.full((3,), rank + 1.0, dtype=torch.float64),
        "transposed": torch.arange(6.0).view(2, 3).t() * (rank + 1),
        "exact": torch.full((2,), rank + 1.0),
        "none": torch.zeros(0, 3),
    }
    noise = privacy.GaussianNoise(secure=True) if secure else privacy.GaussianNoise(seeded(rank))
    return list(noised_sums(Ranks(), tensors, noise, [1.0, 2.0, 3.0, 0.0, 1.0]).values())


# ---- agreement


def failing_together(rank: int, fails: int) -> tuple[str, str]:
    ranks = Ranks()
    try:
        with ranks.together("clipping"):
            if rank == fails:
                raise ZeroDivisionError("a loss of nothing")
    except (ZeroDivisionError, DistributedError) as error:
        with ranks.together("going on"):  # and everybody can
            return type(error).__name__, str(error)
    return "", ""


def other_facts(rank: int, facts: dict[str, Any], others: dict[str, Any]) -> str:
    try:
        with Ranks().together("a step", **(others if rank else facts)):
            return ""
    except DistributedError as error:
        return str(error)


def other_calls(rank: int) -> str:
    try:
        with Ranks().together(f"call {rank}"):
            return ""
    except DistributedError as error:
        return str(error)


def largest(rank: int) -> int:
    return Ranks().largest(10 - rank)


def late(rank: int) -> str:
    ranks = Ranks(timeout=timedelta(seconds=1))
    try:
        if rank:
            time.sleep(3)
        with ranks.together("a step"):
            pass
    except DistributedError as error:
        return str(error)
    return ""


def dying(rank: int, where: str) -> str:
    """The last rank ends in the middle of a step; what the others say."""
    ranks = Ranks()
    if rank == dist.get_world_size() - 1:
        os._exit(1)
    try:
        if where == "together":
            with ranks.together("a step"):
                pass
        else:
            noised_sums(ranks, {"weight": torch.ones(1000)}, privacy.GaussianNoise(), 1.0)
    except DistributedError as error:
        return str(error)
    return "nobody noticed"


def fingerprints(rank: int) -> tuple[list[int], list[int]]:
    model, _ = model_and_data()
    before = fingerprint(model.parameters())
    with torch.no_grad():
        model.head.weight.view(-1)[0] += 1e-12 * rank
    return before, fingerprint(model.parameters())


# ---- whole parameters


def whole_for_a_while(rank: int) -> list[str]:
    """What parameters are before, in and after the context; results of samples whose number differs by rank."""
    model, _ = model_and_data()
    wrapped(model, "fsdp")
    gradbatch.extend(model)
    count = (2, 90, 7)[rank]  # so that ranks need different numbers of backward passes
    kinds = []
    for _ in range(3):
        tokens = torch.randint(11, (count, 4))
        losses = F.cross_entropy(model(tokens), torch.randint(3, (count,)), reduction="none")
        kinds.append(type(model.head.weight.data).__name__)
        with whole_parameters(model):
            kinds.append(type(model.head.weight.data).__name__)
            result = gradbatch.backward(model, losses, gradbatch.ClippedSum(MAX_NORM))[gradbatch.ClippedSum]
        assert result["block.0.weight"].shape == (7, 5) and result.quantity.norms.shape == (count,)
        kinds.append(type(model.head.weight.data).__name__)
    return kinds


def after_an_error(rank: int) -> tuple[str, float]:
    """A backward pass that fails on rank 0 alone, and the next step, on all."""
    model, data = model_and_data()
    wrapped(model, "fsdp")
    gradbatch.extend(model)
    tokens, labels = data[: 5 + rank]
    message = ""
    model.fails = rank == 0
    try:
        losses = F.cross_entropy(model(tokens), labels, reduction="none")
        with whole_parameters(model):
            clipped_sums(model, losses)
    except gradbatch.GradBatchError as error:
        message = str(error)
    model.fails = False
    losses = F.cross_entropy(model(tokens), labels, reduction="none")
    with whole_parameters(model):
        sums = clipped_sums(model, losses)
    return message, error_of(sums, tokens, labels)


def error_of(sums: dict[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Largest difference from a loop over samples on a model of one process."""
    model, _ = model_and_data()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for token, label in zip(tokens, labels, strict=True):
        loss = F.cross_entropy(model(token[None]), label[None])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for total, grad in zip(expected.values(), grads, strict=True):
            total += grad * min(1.0, MAX_NORM / float(norm))
    return max(float((sums[name] - total).abs().max()) for name, total in expected.items())


def ordinary_training_goes_on(rank: int) -> float:
    """After a private backward, ``loss.backward()`` reduces and shards gradients as ever."""
    model, data = model_and_data()
    wrapped(model, "fsdp")
    gradbatch.extend(model)
    tokens, labels = data[: 5 + rank]
    losses = F.cross_entropy(model(tokens), labels, reduction="none")
    with whole_parameters(model):
        clipped_sums(model, losses)
    F.cross_entropy(model(tokens), labels).backward()
    plain, _ = model_and_data()
    losses = [
        F.cross_entropy(plain(data[: 5 + r][0]), data[: 5 + r][1]) for r in range(dist.get_world_size())
    ]
    torch.stack(losses).mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((whole(p.grad) - q.grad).abs().max()) for p, q in pairs)


def refusals(rank: int) -> list[str]:
    """Models whose parameters cannot be made whole, and calls with sharded ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = nn.Linear(4, 2)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), mesh, [Shard(0)]))
    older = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 2)), device_id=torch.device("cpu"))
    sharded, data = model_and_data()
    wrapped(sharded, "fsdp")
    gradbatch.extend(sharded)
    losses = F.cross_entropy(sharded(data[:3][0]), data[:3][1], reduction="none")

    def enter(model: nn.Module) -> None:
        with whole_parameters(model):
            raise AssertionError("it was entered")

    def watch() -> None:
        with gradbatch.compute(sharded, gradbatch.BatchGrad(), loss_reduction="mean"):
            pass

    def message_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except UsageError as error:
            return str(error)
        return ""

    calls = [lambda: enter(parallel), lambda: enter(older), lambda: clipped_sums(sharded, losses), watch]
    return list(map(message_of, calls))


# ---- sampling


def batches(rank: int) -> tuple[list[list[int]], bool]:
    loader = privacy.poisson_loader(TensorDataset(torch.arange(30)), sample_rate=0.3, steps=8)
    drawn = [batch[0].tolist() for batch in loader]
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict()["generator"])
    return drawn, all(torch.equal(state, states[0]) for state in states)
