"""A measuring planner runs each candidate once, keeps the fastest, and knows what the choice depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradbatch.plans import convolutions, measured
from gradbatch.plans.contractions import Planner
from gradbatch.plans.convolutions import CORRELATE_METHODS, STRIPS
from gradbatch.plans.windows import Patches, Window

SECONDS = {"unfold": 3.0, "grouped": 2.0, "vmap": 5.0, "loop": 9.0, "strips": 4.0, "strips_last": 4.0}


def operands(samples: int = 4, size: int = 6, groups: int = 2) -> tuple[Tensor, Patches]:
    window = Window((3, 3), (1, 1), (1, 1), (1, 1))
    source = torch.randn(samples, 4, size, size, dtype=torch.float64)
    return torch.randn(samples, groups, 3, size * size, dtype=torch.float64), Patches(source, window, groups)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels in the order in which they ran, each as long as the table says."""
    names: list[str] = []
    clock = [0.0]

    def timed(name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: object) -> Tensor:
            names.append(name)
            clock[0] += SECONDS[name]
            return kernel(*args)

        return run

    for name, kernel in list(convolutions._CORRELATE.items()):
        monkeypatch.setitem(convolutions._CORRELATE, name, timed(name, kernel))
    monkeypatch.setattr(Patches, "unfold", timed("unfold", Patches.unfold))
    strips = {last: timed(name, Patches.strips) for name, last in STRIPS.items()}
    monkeypatch.setattr(Patches, "strips", lambda patches, last: strips[last](patches, last))
    monkeypatch.setattr(measured, "_now", lambda _: clock[0])
    return names


def test_the_fastest_is_kept(ran: list[str]) -> None:
    planner, (left, right) = Planner(measure=True), operands()
    reference = torch.einsum("ngpt,ngdt->ngpd", left, right.unfold())
    ran.clear()
    torch.testing.assert_close(planner.dense(left, right), reference)
    # Three times each, but for those that are hopeless at first sight.
    assert sorted(set(ran)) == sorted(CORRELATE_METHODS) and ran.count("vmap") == ran.count("loop") == 1
    ran.clear()
    torch.testing.assert_close(planner.dense(left, right), reference)
    assert ran == ["grouped"] and planner.plan("dense", left, right).kernel == "grouped"


def test_other_shapes_are_measured_anew(ran: list[str]) -> None:
    planner = Planner(measure=True)
    planner.dense(*operands())
    for other in (operands(samples=5), operands(size=7)):
        ran.clear()
        planner.dense(*other)
        assert len(set(ran)) > 1


def test_what_is_forced_is_not_measured(ran: list[str]) -> None:
    Planner(force={"dense": "loop"}, measure=True).dense(*operands())
    assert ran == ["loop"]


@pytest.mark.parametrize("operation", ["squared_norm", "gram", "sum_of_squares", "sum", "dense"])
def test_measuring_changes_no_value(operation: str) -> None:
    left, right = operands()
    plain, twice = getattr(Planner(), operation), getattr(Planner(measure=True), operation)
    for _ in range(2):
        torch.testing.assert_close(twice(left, right), plain(left, right))


def test_it_says_so() -> None:
    assert repr(Planner(5, measure=True)) == "Planner(budget=5, force={}, measure=True)"
