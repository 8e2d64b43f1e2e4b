"""Short private runs on data of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from gradbatch import privacy
from tests.privacy.models import mlp

RECORDS = 40


def dataset(records: int = RECORDS) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(records, 6, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def seeded(seed: int = 2) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisson(steps: int = 8, rate: float = 0.25, seed: int = 3, **options: Any) -> DataLoader[Any]:
    return privacy.poisson_loader(dataset(), sample_rate=rate, steps=steps, generator=seeded(seed), **options)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


class Run:
    """A model, its optimizer and what makes them private, from the same seeds each time."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = mlp,
        optimizer: Callable[[nn.Module], Optimizer] = sgd,
        loader: Callable[[], Any] = poisson,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = make().double()
        self.optimizer = optimizer(self.model)
        given = {"noise_multiplier": 1.0, "max_norm": 0.5, "noise": privacy.GaussianNoise(generator=seeded())}
        self.private = privacy.make_private(self.model, self.optimizer, loader(), **{**given, **options})

    def train(self, batches: Any = None, size: int | None = None) -> Run:
        for batch in self.private.loader if batches is None else batches:
            self.step(batch, size)
        return self

    def step(self, batch: Any, size: int | None = None) -> None:
        for part in [batch] if size is None else self.private.parts(batch, size):
            self.private.backward(losses_of(self.model, part))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
