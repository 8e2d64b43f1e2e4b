"""Clipped sums in p.grad: what plain gradients, one by one, clip and add up to, and never more of one sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import privacy
from gradbatch.errors import CoupledSamples, StaleCapture, UsageError
from tests.privacy.models import (
    MODELS,
    clipped_sum,
    distance,
    gradients,
    losses_of,
    mlp,
    norms_of,
    one_by_one,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def clipped_by(model: nn.Module, x: Tensor, **options: object) -> dict[str, Tensor]:
    model.zero_grad()
    privacy.clipped_gradients(model, losses_of(model, x), **options)
    return gradients(model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_the_clipped_sum_is_that_of_materialised_gradients(name: str, max_norm: float) -> None:
    make, draw = MODELS[name]
    model, x = gradbatch.extend(make().double()), draw(7)
    grads = one_by_one(model, losses_of(model, x))
    for _ in range(3):  # measured, measured again, remembered
        model.zero_grad()
        clipped = privacy.clipped_gradients(model, losses_of(model, x), max_norm)
        torch.testing.assert_close(gradients(model), clipped_sum(grads, max_norm), **EXACT)
        torch.testing.assert_close(clipped.norms, norms_of(grads), **EXACT)
        torch.testing.assert_close(clipped.factors, (max_norm / norms_of(grads)).clamp(max=1), **EXACT)
    assert clipped.groups == ("",) and clipped.bounds == (max_norm,) and clipped.non_finite == 0


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_add_up_in_the_gradient(name: str) -> None:
    make, draw = MODELS[name]
    model, x = gradbatch.extend(make().double()), draw(7)
    losses = losses_of(model, x)
    right = clipped_sum(one_by_one(model, losses), 1.0)
    for start in range(0, 7, 3):
        privacy.clipped_gradients(model, losses_of(model, x)[start : start + 3], 1.0)
    torch.testing.assert_close(gradients(model), right, **EXACT)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_context_replaces_what_the_backward_pass_left_by_the_clipped_sum(reduction: str) -> None:
    make, draw = MODELS["convolutions"]
    model, x = gradbatch.extend(make().double()), draw(7)
    before = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = before[name].clone()
    scale = torch.logspace(-2, 2, 7, dtype=torch.float64)
    grads = one_by_one(model, model(x).square().sum(1) * scale)
    right = clipped_sum(grads, 1.0)
    with privacy.clipping(model, 1.0, loss_reduction=reduction) as clipped:
        for part in (slice(0, 3), slice(3, 7)):
            losses = model(x[part]).square().sum(1) * scale[part]
            (losses.mean() if reduction == "mean" else losses.sum()).backward()
        with pytest.raises(UsageError, match="when the with block ends"):
            _ = clipped.norms
        assert repr(clipped) == "Clipped(not computed yet)"
    torch.testing.assert_close(gradients(model), {n: before[n] + right[n] for n in right}, **EXACT)
    torch.testing.assert_close(clipped.norms, norms_of(grads), **EXACT)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e200])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "low rank"])
def test_a_sample_that_is_not_finite_adds_nothing_and_is_counted(name: str, bad: float) -> None:
    make, draw = MODELS[name]
    model, x = gradbatch.extend(make().double()), draw(6)
    scale = torch.logspace(-2, 2, 6, dtype=torch.float64)
    scale[2] = bad
    clipped = privacy.clipped_gradients(model, model(x).square().sum(1) * scale)
    assert clipped.non_finite == 1 and not clipped.norms[2].isfinite() and clipped.factors[2] == 0
    found, rest = gradients(model), torch.tensor([0, 1, 3, 4, 5])
    model.zero_grad()
    privacy.clipped_gradients(model, model(x[rest]).square().sum(1) * scale[rest])
    torch.testing.assert_close(found, gradients(model), **EXACT)


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 0.7},
        {"max_norm": 0.7, "per_layer": True},
        {"max_norm": {"0.*": 0.3, "*": 0.4}},
        {"max_norm": 0.7, "style": "normalise"},
    ],
    ids=["flat", "layers", "groups", "normalised"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4, 1e10, 1e30, torch.inf, torch.nan])
def test_no_sample_moves_the_sum_by_more_than_the_bound(
    options: dict[str, object], dtype: torch.dtype, size: float
) -> None:
    model, x = gradbatch.extend(mlp().to(dtype)), torch.randn(6, 6, dtype=dtype)
    scale = torch.ones(6, dtype=dtype)
    scale[3] = size
    sensitivity = gradbatch.ClippedSum(options["max_norm"]).sensitivity
    with_all = clipped_by_scaled(model, x, scale, options)
    rest = torch.tensor([0, 1, 2, 4, 5])
    without = clipped_by_scaled(model, x[rest], scale[rest], options)
    assert all(grad.isfinite().all() for grad in with_all.values())
    # Rounding: of the norm, the factor, and a sum of six that is a few times the bound.
    assert distance(with_all, without) <= sensitivity * (1 + 100 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("max_norm", [1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("output_gradient", [1e-18, 1e-21, 1e-22, 1e-23, 1e-24, 1e-30])
def test_a_norm_whose_square_underflows_is_not_taken_for_small(
    max_norm: float, output_gradient: float
) -> None:
    model = gradbatch.extend(nn.Linear(100, 10, bias=False))
    x = torch.full((1, 100), 1e18)  # their product is of an ordinary size
    privacy.clipped_gradients(model, (model(x) * output_gradient).sum(1), max_norm)
    assert float(model.weight.grad.double().norm()) <= max_norm * (1 + 1e-5)


def clipped_by_scaled(
    model: nn.Module, x: Tensor, scale: Tensor, options: dict[str, object]
) -> dict[str, Tensor]:
    model.zero_grad()
    privacy.clipped_gradients(model, model(x).square().sum(1) * scale, **options)
    return gradients(model)


def test_users_are_clipped_where_losses_name_their_user() -> None:
    model, x = gradbatch.extend(mlp().double()), torch.randn(6, 6, dtype=torch.float64)
    users = torch.tensor([0, 1, 0, 2, 2, 0])
    grads = one_by_one(model, losses_of(model, x))
    of_users = {
        name: torch.zeros(3, *g.shape[1:]).double().index_add(0, users, g) for name, g in grads.items()
    }
    clipped = privacy.clipped_gradients(model, losses_of(model, x), 1.0, sample_ids=users)
    torch.testing.assert_close(gradients(model), clipped_sum(of_users, 1.0), **EXACT)
    assert clipped.norms.shape == (3,)


def test_chosen_parameters_alone_are_clipped_and_written_to() -> None:
    model, x = gradbatch.extend(mlp().double()), torch.randn(5, 6, dtype=torch.float64)
    grads = one_by_one(model, losses_of(model, x))
    head = {name: grad for name, grad in grads.items() if name.startswith("2.")}
    privacy.clipped_gradients(model, losses_of(model, x), 0.5, parameters="2.*")
    torch.testing.assert_close(gradients(model), clipped_sum(head, 0.5), **EXACT)


@pytest.mark.parametrize("options", [{}, {"per_layer": True}, {"max_norm": {"*": 1.0}}], ids=str)
def test_no_samples_make_a_sum_of_zero_and_need_no_graph(options: dict[str, object]) -> None:
    model = gradbatch.extend(mlp())
    clipped = privacy.clipped_gradients(model, torch.zeros(0), **options)
    assert len(clipped.norms) == 0 and clipped.non_finite == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("style", ["hard", "normalise"])
def test_a_scale_of_the_losses_saves_half_precision_from_underflow_and_changes_nothing_else(
    style: str,
) -> None:
    make, draw = MODELS["convolutions"]
    model, x = gradbatch.extend(make().double()), draw(5)
    privacy.clipped_gradients(model, losses_of(model, x), 0.5, style=style)
    plain = gradients(model)
    model.zero_grad()
    scaled = privacy.clipped_gradients(model, losses_of(model, x), 0.5, style=style, loss_scale=2.0**12)
    torch.testing.assert_close(gradients(model), plain, **EXACT)
    torch.testing.assert_close(scaled.norms, norms_of(one_by_one(model, losses_of(model, x))), **EXACT)
    assert scaled.bounds == (0.5,)


def test_works_where_gradients_are_switched_off_and_under_autocast() -> None:
    model, x = gradbatch.extend(mlp()), torch.randn(5, 6)
    losses = losses_of(model, x)
    right = clipped_sum(one_by_one(model, losses), 1.0)
    with torch.no_grad():
        privacy.clipped_gradients(model, losses)
    torch.testing.assert_close(gradients(model), right)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        losses = losses_of(model, x)
        privacy.clipped_gradients(model, losses, retain_graph=True)
    torch.testing.assert_close(
        gradients(model), clipped_sum(one_by_one(model, losses), 1.0), rtol=0.05, atol=0.02
    )


def test_the_graph_is_freed_unless_it_is_to_be_kept() -> None:
    model, x = gradbatch.extend(mlp()), torch.randn(5, 6)
    losses = losses_of(model, x)
    for _ in range(2):
        privacy.clipped_gradients(model, losses, retain_graph=True)
    privacy.clipped_gradients(model, losses)
    with pytest.raises(StaleCapture):
        privacy.clipped_gradients(model, losses)


def test_parameters_in_half_precision_get_gradients_of_their_dtype() -> None:
    model = gradbatch.extend(mlp().bfloat16())
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    for _ in range(2):
        privacy.clipped_gradients(model, model(x).square().sum(1))
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_a_parameter_that_no_loss_uses_has_a_gradient_of_zero() -> None:
    model = gradbatch.extend(nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}))
    for _ in range(2):
        privacy.clipped_gradients(model, model["used"](torch.randn(4, 3)).sum(1))
    assert not model["unused"].weight.grad.any() and model["used"].weight.grad.any()


def backward_and_fail(loss: Tensor) -> None:
    loss.backward()
    raise KeyError("of the user's own")


def test_after_an_error_the_gradients_are_as_before() -> None:
    model, x = gradbatch.extend(mlp()), torch.randn(5, 6)
    privacy.clipped_gradients(model, losses_of(model, x))
    before = gradients(model)
    outputs = model(x)
    coupled = (outputs - outputs.mean(0)).square().sum(1)
    with pytest.raises(CoupledSamples):
        privacy.clipped_gradients(model, coupled)
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
    with pytest.raises(KeyError), privacy.clipping(model, loss_reduction="sum"):
        backward_and_fail(losses_of(model, x).sum())
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
    with pytest.raises(UsageError, match="no backward"), privacy.clipping(model, loss_reduction="sum"):
        model(x)
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)


def test_a_model_without_extension_and_bad_scales_are_refused() -> None:
    model, x = mlp(), torch.randn(5, 6)
    losses = F.cross_entropy(model(x), torch.zeros(5, dtype=torch.long), reduction="none")
    with pytest.raises(UsageError, match="not extended"):
        privacy.clipped_gradients(model, losses)
    with pytest.raises(UsageError, match="not extended"):
        privacy.clipped_gradients(model, losses[:0])
    gradbatch.extend(model)
    for scale in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(UsageError, match="loss_scale is"):
            privacy.clipped_gradients(model, losses, loss_scale=scale)
    with pytest.raises(UsageError, match="max_norm is"):
        privacy.clipped_gradients(model, losses, max_norm=0.0)
    with pytest.raises(UsageError, match="loss is a scalar"):
        privacy.clipped_gradients(model, losses.mean())


def test_says_what_was_clipped() -> None:
    model = gradbatch.extend(nn.Linear(2, 1, bias=False))
    x = torch.tensor([[3.0, 4.0], [0.0, 0.5], [torch.nan, 0.0]])
    clipped = privacy.clipped_gradients(model, model(x).squeeze(1))
    assert repr(clipped) == "Clipped(3 samples, 2 of them cut, 1 not finite)"
    with pytest.raises(AttributeError):
        _ = clipped.nothing
