"""Clipped sums: exact factors, one norm over all parameters, and nothing of a sample that is not finite."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, BatchL2Grad, ClippedSum, Planner
from gradbatch.errors import UsageError


def network() -> nn.Sequential:
    """Structures of every kind: convolutions, grouped and not, a normalisation, a layer used twice."""
    twice = nn.Linear(6, 6)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        twice,
        nn.Tanh(),
        twice,
    ).double()


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def drawn(samples: int) -> Tensor:
    # Of sizes around the bound, so that some are clipped.
    return torch.randn(samples, 2, 5, 5, dtype=torch.float64) * torch.logspace(-2, 1, samples).view(
        -1, 1, 1, 1
    )


def clipped(grads: gradbatch.QuantityResult, max_norm: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms, and clipped sums, by materialised gradients one sample at a time."""
    count = len(next(iter(grads.values())))
    norms = torch.stack(
        [sum((g[n].square().sum() for g in grads.values()), torch.zeros(())) for n in range(count)]
    )
    factors = [min(1.0, max_norm / float(norm.sqrt())) for norm in norms]
    sums = {name: sum((f * g[n] for n, f in enumerate(factors)), 0 * g[0]) for name, g in grads.items()}
    return norms.sqrt(), sums


PLANNERS = {
    "free": Planner(),
    "nothing is kept": Planner(budget=1),
    "measured": Planner(measure=True),
    "measured, without room": Planner(budget=1000, measure=True),
}


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=list(PLANNERS))
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e6])
def test_is_the_sum_of_clipped_gradients(planner: Planner, max_norm: float) -> None:
    model = gradbatch.extend(network())
    losses = losses_of(model, drawn(6))
    norms, right = clipped(gradbatch.backward(model, losses, BatchGrad())[BatchGrad], max_norm)
    for _ in range(2):
        found = gradbatch.backward(model, losses, ClippedSum(max_norm), planner=planner)[ClippedSum]
        torch.testing.assert_close(found.quantity.norms, norms)
        torch.testing.assert_close(found.quantity.factors, (max_norm / norms).clamp(max=1))
        torch.testing.assert_close(dict(found), right, rtol=1e-10, atol=1e-12 * max_norm)


def test_lies_in_memory_as_the_parameter_does() -> None:
    model = gradbatch.extend(network())
    found = gradbatch.backward(model, losses_of(model, drawn(6)), ClippedSum(0.5), planner=Planner(budget=1))
    assert all(tensor.is_contiguous() for tensor in found[ClippedSum].values())


def test_micro_batches_of_a_loop_of_the_user_s_own() -> None:
    model, x = gradbatch.extend(network()), drawn(5)
    _, right = clipped(gradbatch.backward(model, losses_of(model, x), BatchGrad())[BatchGrad], 0.5)
    with gradbatch.compute(model, ClippedSum(0.5), BatchL2Grad(), loss_reduction="sum") as results:
        for part in x.split(2):
            losses_of(model, part).sum().backward()
    torch.testing.assert_close(dict(results[ClippedSum]), right, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[BatchL2Grad].total().sqrt(), results[ClippedSum].quantity.norms)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_adds_nothing(bad: float) -> None:
    model, x = gradbatch.extend(network()), drawn(5)
    x[2, 0, 1, 1] = bad
    rest = torch.tensor([0, 1, 3, 4])
    alone = gradbatch.backward(model, losses_of(model, x[rest]), ClippedSum(0.5))[ClippedSum]
    found = gradbatch.backward(model, losses_of(model, x), ClippedSum(0.5))[ClippedSum]
    torch.testing.assert_close(dict(found), dict(alone), rtol=1e-10, atol=1e-12)
    factors, norms = found.quantity.factors, found.quantity.norms
    assert factors[2] == 0 and not norms[2].isfinite() and (factors[rest] > 0).all()


def test_one_sample_more_moves_the_sum_by_no_more_than_the_bound() -> None:
    model, x = gradbatch.extend(network()), drawn(6)
    x[3] *= 1e8
    whole = gradbatch.backward(model, losses_of(model, x), ClippedSum(0.5))[ClippedSum]
    for left_out in range(6):
        rest = x[[n for n in range(6) if n != left_out]]
        without = gradbatch.backward(model, losses_of(model, rest), ClippedSum(0.5))[ClippedSum]
        moved = sum(float((whole[name] - without[name]).square().sum()) for name in whole) ** 0.5
        assert moved <= 0.5 * (1 + 1e-9)


def test_a_sample_without_gradients_and_no_sample_at_all() -> None:
    model = gradbatch.extend(nn.Linear(3, 2))
    x = torch.zeros(2, 3)
    found = gradbatch.backward(model, 0 * model(x).sum(1), ClippedSum(1.0))[ClippedSum]
    assert found.quantity.factors.tolist() == [1, 1] and not found["weight"].any()
    empty = gradbatch.backward(model, model(x[:0]).sum(1), ClippedSum(1.0))[ClippedSum]
    assert empty["weight"].shape == (2, 3) and not empty["weight"].any() and len(empty.quantity.norms) == 0


def test_the_bound_goes_over_the_chosen_parameters() -> None:
    model, x = gradbatch.extend(network()), drawn(5)
    part = gradbatch.backward(model, losses_of(model, x), BatchGrad(), parameters="5.*")[BatchGrad]
    norms, right = clipped(part, 0.5)
    found = gradbatch.backward(model, losses_of(model, x), ClippedSum(0.5), parameters="5.*")[ClippedSum]
    torch.testing.assert_close(found.quantity.norms, norms)
    torch.testing.assert_close(dict(found), right)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_bound_is_positive(max_norm: float) -> None:
    with pytest.raises(UsageError, match="max_norm is"):
        ClippedSum(max_norm)


def test_two_bounds_are_two_results() -> None:
    model, x = gradbatch.extend(network()), drawn(5)
    tight, loose = ClippedSum(1e-3), ClippedSum(1e6)
    results = gradbatch.backward(model, losses_of(model, x), tight, loose)
    assert not torch.allclose(results[tight]["5.bias"], results[loose]["5.bias"])
    assert results[ClippedSum(1e6)] is results[loose]


def test_what_there_is_no_room_to_keep_is_not_materialised_for_the_sum_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    keep = gradbatch.OuterProduct.keep

    def counted(self: gradbatch.OuterProduct, operations: list[str], room: int) -> gradbatch.PerSampleGrad:
        asked.append(room)
        return keep(self, operations, room)

    monkeypatch.setattr(gradbatch.OuterProduct, "keep", counted)
    model = gradbatch.extend(nn.Linear(3, 2))
    gradbatch.backward(model, losses_of(model, torch.randn(4, 3)), ClippedSum(1.0))
    assert len(asked) == 1


def by_hand(
    grads: gradbatch.QuantityResult, factor: Callable[[str, Tensor], Tensor], group_of: Callable[[str], str]
) -> dict[str, Tensor]:
    """Clipped sums from materialised gradients, with factors from the norms of each parameter's group."""
    groups: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        groups.setdefault(group_of(name), []).append(grad.flatten(1))
    factors = {group: factor(group, torch.cat(parts, 1).norm(dim=1)) for group, parts in groups.items()}
    return {name: torch.einsum("n,n...->...", factors[group_of(name)], grad) for name, grad in grads.items()}


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=list(PLANNERS))
def test_groups_of_parameters_are_clipped_each_to_its_bound(planner: Planner) -> None:
    model, x = gradbatch.extend(network()), drawn(6)
    bounds = {"0.*": 0.1, "*.bias": 0.3, "*": 0.5}

    def group_of(name: str) -> str:
        return "0.*" if name.startswith("0.") else "*.bias" if name.endswith("bias") else "*"

    grads = gradbatch.backward(model, losses_of(model, x), BatchGrad())[BatchGrad]
    right = by_hand(grads, lambda group, norms: (bounds[group] / norms).clamp(max=1), group_of)
    found = gradbatch.backward(model, losses_of(model, x), ClippedSum(bounds), planner=planner)[ClippedSum]
    torch.testing.assert_close(dict(found), right, rtol=1e-10, atol=1e-12)
    clipped = found.quantity
    assert clipped.groups == tuple(bounds) and clipped.bounds == tuple(bounds.values())
    assert clipped.norms.shape == clipped.factors.shape == (6, 3)
    assert clipped.sensitivity == pytest.approx((0.1**2 + 0.3**2 + 0.5**2) ** 0.5)


def test_layers_share_the_bound() -> None:
    model, x = gradbatch.extend(network()), drawn(6)
    grads = gradbatch.backward(model, losses_of(model, x), BatchGrad())[BatchGrad]
    layers = {name: name.rpartition(".")[0] for name in grads}
    assert set(layers.values()) == {"0", "1", "2", "5"}  # the layer used twice is one
    right = by_hand(grads, lambda _, norms: (0.5 / 4**0.5 / norms).clamp(max=1), layers.__getitem__)
    found = gradbatch.backward(model, losses_of(model, x), ClippedSum(0.5, per_layer=True))[ClippedSum]
    torch.testing.assert_close(dict(found), right, rtol=1e-10, atol=1e-12)
    assert found.quantity.groups == ("0", "1", "2", "5") and found.quantity.sensitivity == 0.5
    own = {"0": 0.1, "1": 0.2, "2": 0.3, "5": 0.4}
    right = by_hand(grads, lambda layer, norms: (own[layer] / norms).clamp(max=1), layers.__getitem__)
    found = gradbatch.backward(model, losses_of(model, x), ClippedSum(own, per_layer=True))[ClippedSum]
    torch.testing.assert_close(dict(found), right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stability", [0.01, 10.0])
def test_normalised_gradients_are_all_scaled(stability: float) -> None:
    model, x = gradbatch.extend(network()), drawn(6)
    grads = gradbatch.backward(model, losses_of(model, x), BatchGrad())[BatchGrad]
    right = by_hand(grads, lambda _, norms: 0.5 / (norms + stability), lambda _: "")
    asked = ClippedSum(0.5, style="normalise", stability=stability)
    found = gradbatch.backward(model, losses_of(model, x), asked)[ClippedSum]
    torch.testing.assert_close(dict(found), right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e200])  # the last overflows when squared
def test_a_sample_that_is_not_finite_in_one_group_adds_nothing_to_another(bad: float) -> None:
    values = {name: torch.randn(3, 2, dtype=torch.float64) for name in ("a", "b")}
    values["a"][1, 0] = bad
    grads = {name: gradbatch.Dense(value) for name, value in values.items()}
    clipped = ClippedSum({"a": 1e3, "b": 1e3}).prepare(grads)
    assert clipped.non_finite == 1 and not clipped.factors[1].any()
    for name, value in values.items():
        torch.testing.assert_close(clipped.of(name).reduce(grads[name]), value[0] + value[2])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ClippedSum({}), "empty mapping"),
        (lambda: ClippedSum({"a": 1.0, "b": 0.0}), "max_norm of 'b' is 0.0"),
        (lambda: ClippedSum(1.0, style="soft"), "style is 'soft'"),
        (lambda: ClippedSum(1.0, stability=0.0), "stability is 0.0"),
        (lambda: ClippedSum(float("inf")), "max_norm is inf"),
        (
            lambda: ClippedSum({"a.*": 1.0}).grouped(["a.weight", "b.weight"]),
            "no bound for b.weight; the pattern",
        ),
        (lambda: ClippedSum({"*": 1.0, "b.*": 1.0}).grouped(["b.weight"]), "no parameter is left for 'b.*'"),
        (lambda: ClippedSum({"a": 1.0}, per_layer=True).grouped(["b.weight"]), "every layer needs one"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        make()


def test_bounds_by_group_make_no_difference_to_where_results_are_found() -> None:
    model, x = gradbatch.extend(network()), drawn(5)
    asked = ClippedSum({"*": 1.0})
    results = gradbatch.backward(model, losses_of(model, x), asked, BatchL2Grad())
    assert results[ClippedSum({"*": 1.0})] is results[asked] and dict(results)[asked] is results[asked]


@pytest.mark.parametrize("per_layer", [False, True])
def test_parameters_of_several_dtypes_have_one_norm(per_layer: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double())

    torch.manual_seed(0)
    model, x = gradbatch.extend(Mixed()), torch.randn(5, 3)
    grads = gradbatch.backward(model, losses_of(model, x), BatchGrad())[BatchGrad]
    squares = {name: grad.double().flatten(1).square().sum(1) for name, grad in grads.items()}
    layers = [{name for name in grads if name.startswith(first)} for first in ("first", "second")]
    for group in layers if per_layer else [set(grads)]:
        bound = 0.5 / 2**0.5 if per_layer else 0.5
        factors = (bound / sum(squares[name] for name in group).sqrt()).clamp(max=1)
        found = gradbatch.backward(model, losses_of(model, x), ClippedSum(0.5, per_layer=per_layer))
        for name in group:
            right = torch.einsum("n,n...->...", factors, grads[name].double())
            torch.testing.assert_close(
                found[ClippedSum][name].double(), right, rtol=1e-6, atol=1e-7, msg=name
            )
