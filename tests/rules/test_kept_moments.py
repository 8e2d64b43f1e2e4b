"""The rules of GroupNorm and LayerNorm read the moments that the forward kept, and compute them where none are."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch.rules import normalisation


class Network(nn.Module):
    """Images of a sample in one batch axis: next to each other, apart, or one."""

    def __init__(self, images: int, sample_first: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, 6, dtype=torch.float64)
        self.images, self.sample_first = images, sample_first

    def forward(self, x: Tensor) -> Tensor:
        """``[N, images, 6, 4]`` to ``[N]``."""
        rows = x if self.sample_first else x.transpose(0, 1)
        normed = self.norm(rows.flatten(0, 1)).sin().unflatten(0, rows.shape[:2])
        return (normed if self.sample_first else normed.transpose(0, 1)).flatten(1).square().sum(1)


def looked_for(monkeypatch: pytest.MonkeyPatch, kept: bool) -> list[bool]:
    """Whether the moments were there, each time that a rule looked; told otherwise unless ``kept``."""
    found: list[bool] = []
    read = normalisation._kept_moments

    def spied(*args: object) -> tuple[Tensor, Tensor] | None:
        moments = read(*args)  # type: ignore[arg-type]
        found.append(moments is not None)
        return moments if kept else None

    monkeypatch.setattr(normalisation, "_kept_moments", spied)
    return found


def assert_alone(model: nn.Module, x: Tensor, result: Mapping[str, Tensor], tolerance: float) -> None:
    """Each sample's gradients are those of a batch of its own."""
    for i in range(len(x)):
        alone = torch.autograd.grad(model(x[i : i + 1]).sum(), list(model.parameters()))
        for (name, _), right in zip(model.named_parameters(), alone, strict=True):
            torch.testing.assert_close(result[name][i], right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("images", "sample_first"), [(1, True), (3, True), (3, False)])
def test_with_and_without_what_the_forward_kept(
    monkeypatch: pytest.MonkeyPatch, kept: bool, images: int, sample_first: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    found = looked_for(monkeypatch, kept)
    model = gradbatch.extend(Network(images, sample_first).to(device))
    nn.init.uniform_(model.norm.weight, 0.5, 2.0)
    x = 3 + torch.randn(5, images, 6, 4, dtype=torch.float64, device=device)
    result = gradbatch.backward(model, model(x), gradbatch.BatchGrad())[gradbatch.BatchGrad]
    assert found and all(found)
    assert_alone(model, x, result, 1e-10)


def test_half_precision_moments_are_not_used(device: torch.device) -> None:
    torch.manual_seed(0)
    model = gradbatch.extend(nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten()).bfloat16().to(device))
    x = torch.randn(3, 4, 5, device=device).bfloat16()
    result = gradbatch.backward(model, model(x).float().square().sum(1), gradbatch.BatchGrad())
    exact = gradbatch.extend(nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten()).double().to(device))
    right = gradbatch.backward(exact, exact(x.double()).square().sum(1), gradbatch.BatchGrad())
    for name, values in result[gradbatch.BatchGrad].items():
        torch.testing.assert_close(values.double(), right[gradbatch.BatchGrad][name], rtol=0.05, atol=0.05)


class Rows(nn.Module):
    """A LayerNorm over the last axis or two of ``[N, T, 3, 4]``; the samples in front, behind, or in flattened rows."""

    def __init__(self, shape: tuple[int, ...], order: str, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape, dtype=torch.float64, bias=bias)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, 3, 4]`` to ``[N]``."""
        if self.order == "behind":
            return self.norm(x.transpose(0, 1)).sin().square().sum((0, 2, 3))
        if self.order == "flattened":
            return self.norm(x.flatten(0, 1)).sin().square().unflatten(0, x.shape[:2]).sum((1, 2, 3))
        return self.norm(x).sin().square().sum((1, 2, 3))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ["in front", "behind", "flattened"])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_layer_norm_with_and_without_what_the_forward_kept(
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
    bias: bool,
    order: str,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    found = looked_for(monkeypatch, kept)
    model = gradbatch.extend(Rows(shape, order, bias).to(device))
    # Means that are large against the deviation, which must not cost digits.
    x = 1e4 + torch.randn(5, 2, 3, 4, dtype=torch.float64, device=device)
    result = gradbatch.backward(model, model(x), gradbatch.BatchGrad())[gradbatch.BatchGrad]
    assert found and all(found)
    assert_alone(model, x, result, 1e-9)


@pytest.mark.parametrize("chosen", ["norm.weight", "norm.bias"])
def test_one_parameter_of_a_layer_norm_alone(chosen: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model = gradbatch.extend(Rows((4,), "in front", bias=True).to(device))
    x = torch.randn(3, 2, 3, 4, dtype=torch.float64, device=device)
    both = gradbatch.per_sample_grads(model, model(x))
    one = gradbatch.per_sample_grads(model, model(x), parameters=chosen)
    torch.testing.assert_close(one[chosen], both[chosen], rtol=1e-12, atol=1e-12)


CHAINS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "of itself": lambda norm, x: norm(norm(x)),
    "in a loop": lambda norm, x: norm(norm(norm(x).exp()).tanh() + x),
    "in two branches": lambda norm, x: norm(x).sin() * norm(x.exp()),
    "past itself": lambda norm, x: norm(2 * norm(x) + x) + norm(x),
}


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.LayerNorm])
@pytest.mark.parametrize("chain", CHAINS)
def test_each_call_has_its_own_moments(chain: str, kind: type[nn.Module], device: torch.device) -> None:
    torch.manual_seed(0)
    sizes = (2, 4) if kind is nn.GroupNorm else (5,)
    norm = kind(*sizes, dtype=torch.float64, device=device)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    model = gradbatch.extend(nn.ModuleList([norm]))
    for samples in (4, 3, 4, 2):  # from the third step on, what is known is remembered
        x = 1 + torch.randn(samples, 4, 5, dtype=torch.float64, device=device)
        losses = CHAINS[chain](norm, x).sin().flatten(1).sum(1)
        result = gradbatch.backward(model, losses, gradbatch.BatchGrad())[gradbatch.BatchGrad]
        for i in range(samples):
            alone = torch.autograd.grad(
                CHAINS[chain](norm, x[i : i + 1]).sin().sum(), list(norm.parameters())
            )
            for values, right in zip(result.values(), alone, strict=True):
                torch.testing.assert_close(values[i], right, rtol=1e-9, atol=1e-9)
