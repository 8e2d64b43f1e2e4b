"""A step of Opacus on gradbatch's gradients is its own step, also of models that it takes for others or not at all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradbatch
from gradbatch.compat import opacus as compat
from gradbatch.errors import CoupledSamples, UsageError
from tests.privacy.models import clipped_sum, gradients, one_by_one

pytest.importorskip("opacus")

CLIP = 0.3


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # Of Opacus' own: that secure mode is off, and hooks that torch would have otherwise.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def engine() -> Any:
    from opacus import PrivacyEngine

    return PrivacyEngine(accountant="rdp")


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


class Attending(nn.Module):
    """Refused by Opacus' validator."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, input: Tensor) -> Tensor:
        input = input.flatten(1).view(-1, 8, 8)
        return self.head(self.attend(input, input, input)[0].mean(1))


class Circular(nn.Module):
    """Taken by Opacus, which forgets how its convolution is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular")

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input).square().mean((2, 3))


class Tied(nn.Module):
    """Taken by Opacus, which does not see the second use of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 3)

    def forward(self, input: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(input.flatten(1)))
        return self.head(F.linear(hidden, self.layer.weight))


def data() -> TensorDataset:
    return TensorDataset(torch.randn(24, 1, 8, 8), torch.randint(0, 3, (24,)))


def plain(dataset: TensorDataset) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=6)


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def by_opacus(model: nn.Module, dataset: TensorDataset) -> tuple[dict[str, Tensor], Any]:
    """The gradient that its optimizer steps on, without noise, from its own per-sample gradients."""
    module, optimizer, _ = engine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=plain(dataset),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
    )
    x, y = dataset.tensors
    losses_of(module, x, y).mean().backward()
    optimizer.step()
    return gradients(model), optimizer


def by_samples(model: nn.Module, dataset: TensorDataset) -> tuple[dict[str, Tensor], Any]:
    gradbatch.extend(model)
    _, optimizer, _ = engine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=plain(dataset),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        grad_sample_mode="no_op",
        wrap_model=False,
    )
    x, y = dataset.tensors
    with compat.grad_samples(model, loss_reduction="mean"):
        losses_of(model, x, y).mean().backward()
    optimizer.step()
    return gradients(model), optimizer


def by_losses(model: nn.Module, dataset: TensorDataset) -> tuple[dict[str, Tensor], Any]:
    gradbatch.extend(model)
    _, optimizer, _ = engine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=plain(dataset),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        grad_sample_mode="no_op",
        wrap_model=False,
    )
    compat.backward(optimizer, model, losses_of(model, *dataset.tensors))
    optimizer.step()
    return gradients(model), optimizer


def by_clipped_sums(model: nn.Module, dataset: TensorDataset) -> tuple[dict[str, Tensor], Any]:
    optimizer, _ = compat.make_private(
        engine(),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plain(dataset),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
    )
    compat.backward(optimizer, model, losses_of(model, *dataset.tensors))
    optimizer.step()
    return gradients(model), optimizer


Way = Callable[[nn.Module, TensorDataset], tuple[dict[str, Tensor], Any]]
WAYS: list[Way] = [by_samples, by_losses, by_clipped_sums]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_noise_is_that_of_opacus(way: Way) -> None:
    dataset, model = data(), cnn()
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    right, _ = by_opacus(theirs, dataset)
    found, optimizer = way(ours, dataset)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(
        dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=1e-5, atol=1e-7
    )
    optimizer.zero_grad()
    losses = losses_of(ours, *dataset.tensors)
    compat.backward(optimizer, ours, losses)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [Circular, Tied])
def test_models_that_opacus_gets_wrong_are_right(make: Callable[[], nn.Module], way: Way) -> None:
    dataset, model = data(), make()
    grads = one_by_one(model, losses_of(model, *dataset.tensors))
    right = {name: total / 6 for name, total in clipped_sum(grads, CLIP).items()}
    found, _ = way(copy.deepcopy(model), dataset)
    # Opacus divides by the norm plus 1e-6.
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-7)
    theirs, _ = by_opacus(model, dataset)
    errors = [float((theirs[name] - right[name]).norm() / right[name].norm()) for name in right]
    assert max(errors) > 0.05


def test_a_model_that_opacus_refuses_is_trained() -> None:
    from opacus.validators.errors import UnsupportedModuleError

    dataset, model = data(), Attending()
    with pytest.raises(UnsupportedModuleError):
        by_opacus(copy.deepcopy(model), dataset)
    grads = one_by_one(model, losses_of(model, *dataset.tensors))
    right = {name: total / 6 for name, total in clipped_sum(grads, CLIP).items()}
    found, _ = by_clipped_sums(model, dataset)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-7)


def test_its_engine_accounts_and_its_optimizer_adds_noise() -> None:
    dataset, model, accounts = data(), cnn(), engine()
    optimizer, loader = compat.make_private(
        accounts,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plain(dataset),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        noise_generator=torch.Generator().manual_seed(0),
    )
    sizes = []
    for _ in range(4):
        for x, y in loader:
            compat.backward(optimizer, model, losses_of(model, x, y))
            before = gradients(model)
            optimizer.step()
            assert all(not before[name].equal(grad) for name, grad in gradients(model).items())
            optimizer.zero_grad()
            sizes.append(len(x))
    assert len(set(sizes)) > 1
    from opacus.accountants import RDPAccountant

    expected = RDPAccountant()
    expected.history = [(1.0, 0.25, len(sizes))]
    assert accounts.get_epsilon(1e-3) == expected.get_epsilon(1e-3)


@pytest.mark.parametrize("way", [by_losses, by_clipped_sums])
def test_its_manager_splits_batches(way: Way) -> None:
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    dataset, model = data(), cnn()
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    way(whole, dataset)
    optimizer = prepared(way, parts, dataset)
    loader = DataLoader(dataset, batch_size=24)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as split:
        for x, y in split:
            optimizer.zero_grad()
            compat.backward(optimizer, parts, losses_of(parts, x, y))
            optimizer.step()
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-7)


def prepared(way: Way, model: nn.Module, dataset: TensorDataset) -> Any:
    """The optimizer of a way, that has not stepped yet."""
    state = copy.deepcopy(model.state_dict())
    _, optimizer = way(model, dataset)
    optimizer.zero_grad()
    model.load_state_dict(state)
    return optimizer


@pytest.mark.parametrize("way", [by_losses, by_clipped_sums])
def test_empty_batches_are_steps_of_noise(way: Way) -> None:
    dataset, model = data(), cnn()
    optimizer = prepared(way, model, dataset)
    compat.backward(optimizer, model, torch.zeros(0))
    optimizer.step()
    assert all(not grad.any() for grad in gradients(model).values())


@pytest.mark.parametrize("way", [by_losses, by_clipped_sums])
def test_batches_are_not_added_up_without_a_step(way: Way) -> None:
    dataset, model = data(), cnn()
    optimizer = prepared(way, model, dataset)
    compat.backward(optimizer, model, losses_of(model, *dataset.tensors))
    with pytest.raises(UsageError, match="zero_grad"):
        compat.backward(optimizer, model, losses_of(model, *dataset.tensors))


def test_per_layer_clipping_of_opacus() -> None:
    dataset, model = data(), cnn()
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    found = []
    for module, mode in ((theirs, "hooks"), (gradbatch.extend(ours), "no_op")):
        wrapped, optimizer, _ = engine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=plain(dataset),
            noise_multiplier=0.0,
            max_grad_norm=[0.1] * len(list(module.parameters())),
            clipping="per_layer",
            grad_sample_mode=mode,
            wrap_model=mode == "hooks",
        )
        if mode == "hooks":
            losses_of(wrapped, *dataset.tensors).mean().backward()
        else:
            compat.backward(optimizer, module, losses_of(module, *dataset.tensors))
        optimizer.step()
        found.append(gradients(module))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)


def test_frozen_parameters_and_users_of_several_records() -> None:
    dataset, model = data(), cnn()
    model[0].requires_grad_(False)
    x, y = dataset.tensors
    users = torch.arange(24) // 4
    grads = {
        name: g.view(6, 4, *g.shape[1:]).sum(1)
        for name, g in one_by_one(model, losses_of(model, x, y)).items()
    }
    right = {name: total / 6 for name, total in clipped_sum(grads, CLIP).items()}
    for way in (by_losses, by_clipped_sums):
        twin = copy.deepcopy(model)
        optimizer = prepared(way, twin, dataset)
        compat.backward(optimizer, twin, losses_of(twin, x, y), sample_ids=users)
        optimizer.step()
        torch.testing.assert_close(gradients(twin), right, rtol=1e-4, atol=1e-7)


def test_what_breaks_privacy_is_refused() -> None:
    dataset = data()
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(UsageError, match="BatchNorm2d"):
        by_clipped_sums(model, dataset)
    optimizer = prepared(by_losses, model := cnn(), dataset)
    outputs = model(dataset.tensors[0])
    with pytest.raises(CoupledSamples):
        compat.backward(optimizer, model, (outputs - outputs.mean(0)).square().sum(1))
    assert all(p.grad_sample is None for p in model.parameters())
