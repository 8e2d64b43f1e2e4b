"""What breaks privacy in a model is named, with what to do; and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradbatch import privacy
from gradbatch.errors import UsageError
from tests.privacy.models import MODELS, mlp
from tests.privacy.runs import poisson


class Moving(nn.Module):
    """Replaces a buffer, and changes a parameter in place, by what it sees."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.buffer = buffer
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            if self.buffer:
                self.mean = 0.9 * self.mean + 0.1 * input.mean(0)
            else:
                self.weight.mul_(input.max())
        return input * self.weight


BROKEN: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "batch norm": (
        lambda: nn.BatchNorm1d(3),
        "normalises over the batch",
        "GroupNorm or LayerNorm instead, or put",
    ),
    "without statistics": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(),
        "normalises over the batch",
        "Use GroupNorm or LayerNorm instead",
    ),
    "without parameters": (lambda: nn.BatchNorm1d(3, affine=False), "normalises over the batch", "GroupNorm"),
    "frozen": (lambda: nn.BatchNorm3d(3).requires_grad_(False), "normalises over the batch", "GroupNorm"),
    "synchronised": (lambda: nn.SyncBatchNorm(3), "normalises over the batch", "GroupNorm"),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        "keeps running statistics",
        "track_running_stats=False",
    ),
    "renormalised": (lambda: nn.Embedding(3, 4, max_norm=1.0), "renormalises in place", "max_norm=None"),
    "renormalised bags": (
        lambda: nn.EmbeddingBag(3, 4, max_norm=1.0),
        "renormalises in place",
        "max_norm=None",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_layers_that_break_privacy_are_named_and_refused(name: str) -> None:
    make, problem, fix = BROKEN[name]
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(make()))
    [finding] = privacy.check_model(model)
    assert finding.where.startswith("1.0 (") and problem in finding.problem and fix in finding.fix
    assert finding.breaks and str(finding) == f"{finding.where}: {finding.problem}. {finding.fix}"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="cannot be trained privately") as refusal:
        privacy.make_private(model, optimizer, poisson(), noise_multiplier=1.0)
    assert str(finding) in str(refusal.value)


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, (make, _) in MODELS.items()},
    "batch norm in eval mode": lambda: nn.BatchNorm1d(3).eval(),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True),
    "instance norm in eval mode": lambda: nn.InstanceNorm1d(3, track_running_stats=True).eval(),
    "dropout": lambda: nn.Dropout(0.5),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "buffers": lambda: nn.MultiheadAttention(4, 2),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    assert privacy.check_model(HARMLESS[name]()) == []


def test_sparse_gradients_are_pointed_out_and_trained_dense() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten())
    [finding] = privacy.check_model(model)
    assert not finding.breaks and "sparse" in finding.problem
    data = torch.utils.data.TensorDataset(torch.randint(0, 5, (9, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = privacy.poisson_loader(data, sample_rate=0.5, steps=2)
    private = privacy.make_private(model, optimizer, loader, noise_multiplier=1.0)
    for (ids,) in private.loader:
        private.backward(model(ids).square().sum(1))
        optimizer.step()
        assert not model[0].weight.grad.is_sparse and bool((model[0].weight.grad != 0).all())
        optimizer.zero_grad()


@pytest.mark.parametrize("buffer", [True, False])
def test_a_forward_on_a_copy_shows_what_it_changes(buffer: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Moving(buffer), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    input, state = torch.randn(4, 3), torch.random.get_rng_state()
    [finding] = privacy.check_model(model, input)
    assert finding.where == ("1.mean" if buffer else "1.weight") and finding.breaks
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.random.get_rng_state().equal(state)
    assert privacy.check_model(model, input, public_state=["1.*"]) == []
    assert privacy.check_model(model) == []  # not to be seen without a forward


def test_what_is_known_of_a_layer_is_not_said_twice_and_what_breaks_privacy_comes_first() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.BatchNorm1d(2))
    findings = privacy.check_model(model, torch.randint(0, 5, (3, 2)))
    assert [finding.where for finding in findings] == ["1 (BatchNorm1d)", "0 (Embedding)"]
    [finding] = privacy.check_model(nn.BatchNorm1d(2), torch.randn(3, 2))
    assert finding.where == "the model itself (BatchNorm1d)"


@pytest.mark.parametrize("spectral", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_what_a_forward_computes_from_parameters_alone_is_public(
    spectral: Callable[[nn.Module], nn.Module],
) -> None:
    assert privacy.check_model(nn.Sequential(spectral(nn.Linear(3, 3))), torch.randn(2, 3)) == []


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "lbfgs": (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS: computes gradients several times"),
    "sparse": (lambda model: torch.optim.SparseAdam(list(model.parameters())), "takes sparse gradients only"),
    "other parameters": (
        lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2, 3))], lr=0.1),
        r"SGD.param_groups\[0\]\['params'\]\[4\], of shape \[2, 3\]: is no parameter of the model",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_cannot_be_private_are_refused(name: str) -> None:
    make, says = OPTIMIZERS[name]
    model = mlp()
    optimizer = make(model)
    with pytest.raises(UsageError, match=says):
        privacy.make_private(model, optimizer, poisson(), noise_multiplier=1.0)
    assert len(privacy.check_model(model, optimizer=optimizer)) == 1


def test_frozen_parameters_of_elsewhere_are_harmless() -> None:
    model = mlp()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert privacy.check_model(model, optimizer=torch.optim.SGD([*model.parameters(), frozen], lr=0.1)) == []


def test_an_optimizer_without_trainable_parameters_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2].weight.requires_grad_(False)
    optimizer.param_groups[0]["params"] = [model[2].weight]
    with pytest.raises(UsageError, match="no parameter of the optimizer is trainable"):
        privacy.make_private(model, optimizer, poisson(), noise_multiplier=1.0)
