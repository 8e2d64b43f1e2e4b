"""A rule is for the very forward that it was written for: what computes something else is refused by name."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch.rules import rule_for, taught_types, why_no_rule
from tests.oracle import TOLERANCE, assert_right, loop, projection
from tests.rules.case import Case
from tests.rules.cases import CASES

ONE_OF_EACH: list[Case] = list({type(case.build()): case for case in reversed(CASES)}.values())
one_of_each = pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: type(case.build()).__name__)
each_way_in = pytest.mark.parametrize("way_in", ["backward", "compute"])


def refusal(case: Case, change: Callable[[nn.Module], nn.Module], way_in: str, device: torch.device) -> str:
    """The message with which per-sample gradients of the changed layer are refused."""
    inputs, target = case.batch(4, device)
    model = case.model(device)
    model.layer = change(model.layer)
    gradbatch.extend(model)
    with pytest.raises(gradbatch.UnsupportedLayer) as error:  # noqa: PT012 - where it raises depends on the way in
        if way_in == "backward":
            gradbatch.per_sample_grads(model, projection(model(*inputs), target))
        else:
            with gradbatch.compute(model, gradbatch.BatchGrad(), loss_reduction="sum"):
                projection(model(*inputs), target).sum().backward()
    return str(error.value)


def doubled(module: nn.Module, *args: Tensor, **options: Tensor) -> Tensor:
    """Another forward, whose gradients the layer's rule would get wrong by a factor."""
    return 2 * getattr(type(module), "base", type(module)).forward(module, *args, **options)


@each_way_in
@one_of_each
def test_a_subclass_with_its_own_forward_is_never_taken_for_its_base(
    case: Case, way_in: str, device: torch.device
) -> None:
    def change(layer: nn.Module) -> nn.Module:
        base = type(layer)
        layer.__class__ = type(f"Doubled{base.__name__}", (base,), {"forward": doubled, "base": base})
        return layer

    message = refusal(case, change, way_in, device)
    kind = type(case.build()).__name__
    assert f"layer (Doubled{kind}): Doubled{kind} is a subclass of {kind}" in message


@each_way_in
@one_of_each
def test_an_instance_with_its_own_forward_is_never_taken_for_its_type(
    case: Case, way_in: str, device: torch.device
) -> None:
    def change(layer: nn.Module) -> nn.Module:
        layer.forward = partial(doubled, layer)
        return layer

    message = refusal(case, change, way_in, device)
    kind = type(case.build()).__name__
    assert f"layer ({kind}): the forward of {kind} was replaced" in message


@each_way_in
@one_of_each
def test_a_type_whose_forward_was_replaced_is_not_taken_for_what_it_was(
    case: Case, way_in: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(case.build())
    original = kind.forward

    def change(layer: nn.Module) -> nn.Module:
        monkeypatch.setattr(
            kind, "forward", lambda self, *args, **options: 2 * original(self, *args, **options)
        )
        return layer

    message = refusal(case, change, way_in, device)
    assert f"layer ({kind.__name__}): the forward of {kind.__name__} was replaced" in message


def test_a_subclass_without_a_forward_of_its_own_is_refused_until_it_is_taught(device: torch.device) -> None:
    class Named(nn.Linear):
        pass

    assert rule_for(Named(2, 3)) is None
    assert why_no_rule(Named(2, 3)) == "Named is a subclass of Linear, whose rule may not describe it"
    model = gradbatch.extend(nn.Sequential(Named(2, 3))).to(device)
    with pytest.raises(gradbatch.UnsupportedLayer, match=r"0 \(Named\)"):
        gradbatch.per_sample_grads(model, model(torch.randn(4, 2, device=device)).sum(1))


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
