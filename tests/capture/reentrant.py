"""Models under reentrant checkpoints, and what is right for them: no pass but torch's plain backward goes through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.reference import WAYS, Losses, assert_results

Gradients = dict[str, Tensor]
Forward = Callable[[nn.Module, Tensor], Tensor]

reentrant = partial(checkpoint, use_reentrant=True)


def batch_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def one_by_one(model: nn.Module, losses: Losses) -> Gradients:
    """By a forward and a plain ``backward`` of torch's for each loss: no other pass goes through such a checkpoint."""
    found: dict[str, list[Tensor]] = {name: [] for name, p in model.named_parameters() if p.requires_grad}
    for n in range(len(seeded(losses)())):
        model.zero_grad()
        seeded(losses)()[n].backward()
        for name, rows in found.items():
            parameter = model.get_parameter(name)
            rows.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
    model.zero_grad()
    return {name: torch.stack(rows) for name, rows in found.items()}


def seeded(losses: Losses) -> Losses:
    def run() -> Tensor:
        torch.manual_seed(1)
        return losses()

    return run


def assert_right(model: nn.Module, losses: Losses, ways: tuple[str, ...] = tuple(WAYS)) -> None:
    """Per-sample gradients are right, and the user's own backward leaves what it does without gradbatch."""
    right = one_by_one(model, losses)
    assert any(gradient.any() for gradient in right.values()), "nothing to find"
    seeded(losses)().mean().backward()
    plain = batch_gradients(model)
    for way in ways:
        for _ in range(3):  # the third step relies on the first two
            model.zero_grad()
            assert_results(WAYS[way](model, seeded(losses)), right)
            if way == "compute":
                for name, gradient in batch_gradients(model).items():
                    assert gradient is plain[name] is None or torch.equal(gradient, plain[name]), name
    model.zero_grad()


def layers(**further: nn.Module) -> dict[str, nn.Module]:
    return {name: nn.Linear(4, 4) for name in ("first", "a", "b", "last")} | further


def around(self: nn.Module, x: Tensor) -> Tensor:
    hidden = self.first(x)
    for layer in (self.a, self.b):
        hidden = hidden + reentrant(lambda h, layer=layer: torch.tanh(layer(h)), hidden)
    return self.last(hidden)
