"""Mixed precision as training loops have it: autocast, and a GradScaler whose scale has to be taken out again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, BatchL2Grad
from tests.capture.reference import WAYS

SAMPLES, STEPS = 4, 4
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}

Gradients = dict[str, Tensor]


def network() -> nn.Module:
    """Layers that autocast lowers, and a norm that it does not."""
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    return gradbatch.extend(nn.Sequential(*layers))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def losses_of(model: nn.Module, x: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype):
        output = model(x)
    return F.cross_entropy(output.float(), target, reduction="none")


def one_by_one(
    model: nn.Module, x: Tensor, target: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> Gradients:
    """A forward and a backward of its own for each sample, under autocast too."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for n in range(SAMPLES):
        loss = losses_of(model, x[n : n + 1], target[n : n + 1], dtype).sum() * scale
        for rows, gradient in zip(
            found.values(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            rows.append(gradient / scale)
    return {name: torch.stack(rows) for name, rows in found.items()}


def assert_close(found: Gradients, right: Gradients, tolerance: float) -> None:
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        off = (found[name] - gradient).flatten(1).norm(dim=1)
        size = gradient.flatten(1).norm(dim=1)
        assert bool((off <= tolerance * size.amax()).all()), f"{name}: {off} of {size}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_training_loop_under_autocast_is_right_in_every_step(dtype: torch.dtype, way: str) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, target = batch(step)
        right = one_by_one(model, x, target, dtype)
        optimizer.zero_grad()
        if way == "backward":
            results = gradbatch.backward(
                model, losses_of(model, x, target, dtype), BatchGrad(), reduction="mean"
            )
        else:
            with gradbatch.compute(model, BatchGrad(), loss_reduction="mean") as results:
                losses_of(model, x, target, dtype).mean().backward()
        assert_close(dict(results[BatchGrad]), right, TOLERANCE[dtype])
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_the_scale_of_a_grad_scaler_is_taken_out_by_one_division(way: str) -> None:
    """As documented: in ``compute`` the scale is in the results; ``backward`` is given the losses themselves."""
    torch.manual_seed(0)
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(STEPS):
        x, target = batch(step)
        scale = scaler.get_scale()
        scales.append(scale)
        right = one_by_one(model, x, target, torch.float16, scale)
        optimizer.zero_grad()
        if way == "backward":
            losses = losses_of(model, x, target, torch.float16)
            results = gradbatch.backward(model, losses, BatchGrad(), BatchL2Grad())
            scaler.scale(losses.mean()).backward()
            scale = 1.0
        else:
            with gradbatch.compute(model, BatchGrad(), BatchL2Grad(), loss_reduction="mean") as results:
                scaler.scale(losses_of(model, x, target, torch.float16).mean()).backward()
        found = {name: gradient / scale for name, gradient in results[BatchGrad].items()}
        assert_close(found, right, TOLERANCE[torch.float16])
        norms = results[BatchL2Grad].total() / scale**2
        squares = torch.stack([g.flatten(1).square().sum(1) for g in right.values()]).sum(0)
        torch.testing.assert_close(norms, squares, rtol=2 * TOLERANCE[torch.float16], atol=0.0)
        scaler.unscale_(optimizer)
        means = {name: p.grad.unsqueeze(0) for name, p in model.named_parameters()}
        sums = {name: g.mean(0, keepdim=True) for name, g in found.items()}
        assert_close(sums, means, TOLERANCE[torch.float16])
        scaler.step(optimizer)
        scaler.update()
    assert len(set(scales)) > 1, "the scale never changed"


def test_a_step_that_overflows_is_not_finite_and_the_next_one_is_right() -> None:
    torch.manual_seed(0)
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = []
    for step in range(STEPS):
        x, target = batch(step)
        scale, before = scaler.get_scale(), [p.detach().clone() for p in model.parameters()]
        right = one_by_one(model, x, target, torch.float16)
        optimizer.zero_grad()
        with gradbatch.compute(model, BatchGrad(), loss_reduction="mean") as results:
            scaler.scale(losses_of(model, x, target, torch.float16).mean()).backward()
        found = {name: gradient / scale for name, gradient in results[BatchGrad].items()}
        scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, model.parameters()))
        finite = all(bool(gradient.isfinite().all()) for gradient in found.values())
        skipped.append(same)
        assert finite != same
        if finite:
            assert_close(found, right, TOLERANCE[torch.float16])
        else:
            own = {name: one for name, one in found.items() if bool(one.isfinite().all())}
            assert_close(own, {name: right[name] for name in own}, TOLERANCE[torch.float16])
    assert skipped == [True, False, False, False]


class Encoder(nn.Module):
    """Attention over tokens, whose mean is classified."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x)).mean(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(4))
def test_elements_that_are_zero_by_chance_and_small_ones_in_half_precision(
    dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = gradbatch.extend(Encoder(64, 2)), torch.randn(16, 8, 16)
    y = torch.randint(5, (16,))

    def losses(rows: slice) -> Tensor:
        with torch.autocast("cpu", dtype):
            outputs = model(x[rows])
        return F.cross_entropy(outputs.float(), y[rows], reduction="none")

    each = [torch.autograd.grad(losses(slice(n, n + 1)).sum(), list(model.parameters())) for n in range(16)]
    right = torch.stack([sum(g.square().sum() for g in grads).sqrt() for grads in each])
    found = gradbatch.backward(model, losses(slice(None)), gradbatch.BatchL2Grad())
    with gradbatch.compute(model, gradbatch.BatchL2Grad(), loss_reduction="mean") as results:
        losses(slice(None)).mean().backward()
    for norms in (found[gradbatch.BatchL2Grad], results[gradbatch.BatchL2Grad]):
        torch.testing.assert_close(norms.total().sqrt(), right, rtol=5e-2, atol=0)
