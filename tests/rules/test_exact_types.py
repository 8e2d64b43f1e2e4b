"""A rule is for the very forward that it was written for: what computes something else is read from the graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch.rules import rule_for, taught_types, why_no_rule
from tests.oracle import TOLERANCE, assert_right, loop, one_hot, projection
from tests.rules.case import Case
from tests.rules.cases import CASES

ONE_OF_EACH: list[Case] = list({type(case.build()): case for case in reversed(CASES)}.values())
one_of_each = pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: type(case.build()).__name__)
# Torch's, of the oracles; and ours, where the graph of a layer is read node by node.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
    pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning"),
]
each_way_in = pytest.mark.parametrize("way_in", ["backward", "compute"])


def assert_doubled(
    case: Case, change: Callable[[nn.Module], nn.Module], way_in: str, device: torch.device
) -> None:
    """The changed layer computes twice what the layer did, and so are its per-sample gradients."""
    inputs, target = case.batch(4, device)
    right = {name: 2 * gradient for name, gradient in case.reference(inputs, target).items()}
    model = case.model(device)
    model.layer = change(model.layer)
    gradbatch.extend(model)
    if way_in == "backward":
        found = gradbatch.per_sample_grads(model, projection(model(*inputs), target))
    else:
        with gradbatch.compute(model, gradbatch.BatchGrad(), loss_reduction="sum") as results:
            projection(model(*inputs), target).sum().backward()
        found = results[gradbatch.BatchGrad]
    assert set(found) == set(right)
    for name, gradient in right.items():
        assert_right(found[name], gradient, TOLERANCE[torch.double], name, per_sample=True)


def twice(output: Any) -> Any:
    """Twice a tensor, or all tensors of nested tuples, as recurrent layers return them."""
    return tuple(map(twice, output)) if isinstance(output, tuple) else 2 * output


def doubled(module: nn.Module, *args: Tensor, **options: Tensor) -> Any:
    """Another forward, whose gradients the layer's rule would get wrong by a factor."""
    return twice(getattr(type(module), "base", type(module)).forward(module, *args, **options))


@each_way_in
@one_of_each
def test_a_subclass_with_its_own_forward_is_right_and_never_taken_for_its_base(
    case: Case, way_in: str, device: torch.device
) -> None:
    def change(layer: nn.Module) -> nn.Module:
        base = type(layer)
        layer.__class__ = type(f"Doubled{base.__name__}", (base,), {"forward": doubled, "base": base})
        return layer

    assert_doubled(case, change, way_in, device)


@each_way_in
@one_of_each
def test_an_instance_with_its_own_forward_is_right_and_never_taken_for_its_type(
    case: Case, way_in: str, device: torch.device
) -> None:
    def change(layer: nn.Module) -> nn.Module:
        layer.forward = partial(doubled, layer)
        return layer

    assert_doubled(case, change, way_in, device)


@each_way_in
@one_of_each
def test_a_type_whose_forward_was_replaced_is_right_and_not_taken_for_what_it_was(
    case: Case, way_in: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(case.build())
    original = kind.forward

    def change(layer: nn.Module) -> nn.Module:
        monkeypatch.setattr(
            kind, "forward", lambda self, *args, **options: twice(original(self, *args, **options))
        )
        return layer

    assert_doubled(case, change, way_in, device)


def test_a_subclass_without_a_forward_of_its_own_has_no_rule_until_it_is_taught_and_is_right(
    device: torch.device,
) -> None:
    class Named(nn.Linear):
        pass

    assert rule_for(Named(2, 3)) is None
    assert why_no_rule(Named(2, 3)) == "Named is a subclass of Linear, whose rule may not describe it"
    model = nn.Sequential(Named(2, 3)).to(device, torch.double)
    input, target = (torch.randn(4, size, dtype=torch.double, device=device) for size in (2, 3))
    right = one_hot(model, projection, [input], target)
    found = gradbatch.per_sample_grads(gradbatch.extend(model), projection(model(input), target))
    for name, gradients in right.items():
        assert_right(found[name], gradients, TOLERANCE[torch.double], name, per_sample=True)


def lazies() -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    sizes = {1: (6,), 2: (5, 4), 3: (3, 4, 3)}
    result: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
        ("LazyLinear", partial(nn.LazyLinear, 3), (5,))
    ]
    for d, size in sizes.items():
        for name, arguments in (
            (f"LazyConv{d}d", {"out_channels": 6, "kernel_size": 2, "groups": 2}),
            (f"LazyConvTranspose{d}d", {"out_channels": 6, "kernel_size": 2, "groups": 2}),
            (f"LazyBatchNorm{d}d", {}),
            (f"LazyInstanceNorm{d}d", {"affine": True, "track_running_stats": False}),
        ):
            result.append((name, partial(getattr(nn, name), **arguments), (4, *size)))
    return result


@pytest.mark.parametrize(
    ("name", "build", "shape"), lazies(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_lazy_layer_extended_before_its_first_forward_is_right_from_then_on(
    name: str, build: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device
) -> None:
    model = gradbatch.extend(nn.Sequential(build())).to(device, torch.double).eval()
    input = torch.randn(3, *shape, dtype=torch.double, device=device)
    for _ in range(2):
        output = model(input)
        assert type(model[0]) in taught_types(), "materialised"
        target = torch.randn_like(output)
        found = gradbatch.per_sample_grads(model, projection(output, target))
        for parameter, gradients in loop(model, projection, [input], target).items():
            what = f"{parameter} of {name}"
            assert_right(found[parameter], gradients, TOLERANCE[torch.double], what, per_sample=True)
