"""What the ranks of a process group do in the tests of private training; each function gets its rank first."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gradbatch import privacy
from gradbatch.errors import GradBatchError
from tests.privacy.distributed_cases import Body, model_and_data, seeded, whole, wrapped

STEPS = 6


class Run:
    """The same training on however many ranks; ``how`` the model is wrapped, if at all."""

    def __init__(self, how: str, rate: float = 0.3, noise: float = 1.0, **options: Any) -> None:
        model, data = model_and_data()
        self.called, self.model = wrapped(model, how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        loader = privacy.poisson_loader(data, sample_rate=rate, steps=STEPS, generator=seeded(3))
        given = {"noise_multiplier": noise, "max_norm": 0.3, "noise": privacy.GaussianNoise(seeded(5))}
        given |= {"delta": 1e-3, "accountant": "rdp"}
        self.private = privacy.make_private(self.model, self.optimizer, loader, **{**given, **options})

    def losses(self, batch: Any) -> torch.Tensor:
        tokens, labels = batch
        return F.cross_entropy(self.called(tokens), labels, reduction="none")

    def step(self, batch: Any, size: int | None = None) -> None:
        for part in [batch] if size is None else self.private.parts(batch, size):
            self.private.backward(self.losses(part))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: whole(parameter) for name, parameter in self.model.named_parameters()}


def train(
    rank: int, how: str, size: int | None, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], float, Any]:
    """Parameters, epsilon and bounds in the end."""
    run = Run(how, **options)
    for batch in run.private.loader:
        run.step(batch, size)
    return run.parameters(), run.private.epsilon(), run.private.max_norm


def stopped_and_resumed(rank: int, how: str) -> dict[str, torch.Tensor]:
    """The same, killed after three steps; each rank has a state of its own."""
    run = Run(how)
    for batch in run.private.loader:
        run.step(batch)
        if run.private.steps == 3:
            break
    states = run.private.state_dict(), run.optimizer.state_dict(), run.model.state_dict()
    run.private.close()
    run = Run(how)
    private, optimizer, model = states
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.private.load_state_dict(private)
    for batch in run.private.loader:
        run.step(batch)
    assert run.private.steps == STEPS
    return run.parameters()


def gone_wrong(rank: int, how: str, where: str) -> tuple[str, str, bool]:
    """An error on rank 1 alone: what each rank hears of it, and whether all can go on after it."""
    run = Run(how, rate=0.5)
    batches = iter(run.private.loader)
    before, name, message = run.parameters(), "", ""
    batch = next(batches)
    try:
        if where == "backward":
            Body.fails = rank == 1
            run.private.backward(run.losses(batch))
        elif where == "parts":
            for number, part in enumerate(run.private.parts(batch, 2)):
                if not (rank == 1 and number == 0):
                    run.private.backward(run.losses(part))
            run.optimizer.step()
        else:
            run.private.backward(run.losses(batch))
            if rank == 1:
                run.model.head.weight.grad = torch.ones_like(run.model.head.weight)
            run.optimizer.step()
    except GradBatchError as error:
        name, message = type(error).__name__, str(error)
    finally:
        Body.fails = False
    unchanged = all(before[name].equal(now) for name, now in run.parameters().items())
    run.private.discard()
    run.optimizer.zero_grad()
    if where != "parts":  # where ranks are no longer at the same place
        for batch in batches:
            run.step(batch)
        assert run.private.steps == STEPS - 1
    return name, message, unchanged


def other_arguments(rank: int, what: str) -> tuple[str, str]:
    others: dict[str, Any] = {"noise": {"noise": 2.0}, "rate": {"rate": 0.2}, "max_norm": {"max_norm": 0.4}}
    try:
        if what == "parameters":
            torch.manual_seed(rank)
            model, (_, data) = nn.Linear(2, 2), model_and_data()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = privacy.poisson_loader(data, sample_rate=0.3, steps=2)
            privacy.make_private(model, optimizer, loader, noise_multiplier=1.0)
        elif what == "model":
            Run("plain", public_state=["*"] if rank else 7)  # an error on rank 0 alone
        else:
            Run("plain", **(others[what] if rank else {}))
    except (GradBatchError, TypeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def a_loader_of_one(rank: int) -> str:
    """Every rank would draw whole batches."""
    model, data = model_and_data()
    loader = privacy.poisson_loader(data, sample_rate=0.3, steps=2, rank=0, world_size=1)
    try:
        privacy.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, noise_multiplier=1.0)
    except GradBatchError as error:
        return str(error)
    return ""


def dying(rank: int, how: str) -> str:
    """The last rank ends before its second step; what the others say."""
    run = Run(how)
    try:
        for batch in run.private.loader:
            if run.private.steps == 1 and rank == dist.get_world_size() - 1:
                os._exit(1)
            run.step(batch)
    except (GradBatchError, RuntimeError) as error:
        return type(error).__name__
    return "nobody noticed"
