"""Small models that share what private training has to get right, and their per-sample gradients one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tied(nn.Module):
    """A tied head, a raw parameter, a layer used twice; token ids in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.places = nn.Parameter(torch.randn(5, 6) / 3)
        self.mix = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids) + self.places
        hidden = hidden + self.mix(torch.tanh(self.mix(hidden)))
        return F.linear(hidden.mean(1), self.table.weight)


class Adapted(nn.Module):
    """A frozen layer with a low-rank update beside it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(input) + self.up(self.down(input))))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 6, dtype=torch.float64)),
    "convolutions": (convolutional, lambda n: torch.randn(n, 2, 5, 5, dtype=torch.float64)),
    "tied": (Tied, lambda n: torch.randint(0, 7, (n, 5))),
    "low rank": (Adapted, lambda n: torch.randn(n, 6, dtype=torch.float64)),
}


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    """One loss a sample, of very different sizes."""
    outputs = model(x)
    return outputs.square().sum(1) * torch.logspace(-2, 2, len(x), dtype=outputs.dtype)


def one_by_one(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    """Per-sample gradients ``[N, *shape]``, a plain backward pass for each sample."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for loss in losses
    ]
    return {
        name: torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in rows])
        if rows
        else p.new_zeros(0, *p.shape)
        for i, (name, p) in enumerate(named.items())
    }


def norms_of(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([grad.flatten(1) for grad in grads.values()], 1).norm(dim=1)


def clipped_sum(grads: Mapping[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    factors = (max_norm / norms_of(grads)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factors, grad) for name, grad in grads.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Euclidean, over all parameters."""
    return float(torch.cat([(left[name] - right[name]).flatten() for name in left]).norm())
