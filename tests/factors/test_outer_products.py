"""Outer products that are added, and such as have an operand in common."""

import pytest
import torch
from torch import Tensor

from gradbatch.factors import OuterProduct, PerSampleGrad
from gradbatch.factors.outer_product import with_common_left
from gradbatch.plans.contractions import Planner
from gradbatch.plans.positions import Positions

GHOST, DENSE = (Planner(force={"squared_norm": name}) for name in ("ghost", "dense"))


def draw(*shape: int, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(shape, dtype=torch.double).to(dtype)


def channels_last(operand: Tensor) -> Tensor:
    """The same numbers, with the channels of a position next to each other."""
    return operand.mT.contiguous().mT


def added(grads: list[OuterProduct]) -> PerSampleGrad:
    first, *others = grads
    total: PerSampleGrad = first
    for other in others:
        total = total + other
    return total


@pytest.mark.parametrize("positions", [(1, 1, 1, 1), (2, 0, 3), (1, 4)])
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_a_sum_of_many_is_one_with_the_positions_of_all(positions: tuple[int, ...], layout: object) -> None:
    assert callable(layout)
    grads = [
        OuterProduct(layout(draw(3, 2, 4, t)), layout(draw(3, 2, 5, t)), (8, 5)).with_planner(GHOST)
        for t in positions
    ]
    total = added(grads)
    assert isinstance(total, OuterProduct) and total.planner is GHOST
    assert repr(total) == f"OuterProduct(3 x [8, 5], G=2 P=4 D=5 T={sum(positions)})"
    right = torch.stack([grad.dense() for grad in grads]).sum(0)
    torch.testing.assert_close(total.dense(), right)
    torch.testing.assert_close(total.squared_norm(), right.flatten(1).square().sum(1))
    # The terms are what they were.
    assert [grad.left.shape[3] for grad in grads] == list(positions)


def test_positions_that_lay_next_to_each_other_still_do() -> None:
    for layout, axis in ((torch.clone, 3), (channels_last, 2)):
        total = added(
            [OuterProduct(layout(draw(3, 1, 4, 2)), layout(draw(3, 1, 5, 2)), (4, 5)) for _ in "ab"]
        )
        assert isinstance(total, OuterProduct) and isinstance(total.right, Tensor)
        assert total.left.stride(axis) == total.right.stride(axis) == 1


def test_a_sum_of_two_precisions_has_the_higher_one() -> None:
    low, high = (
        OuterProduct(draw(3, 1, 4, 2, dtype=dtype), draw(3, 1, 5, 2, dtype=dtype), (4, 5))
        for dtype in (torch.float32, torch.float64)
    )
    for total in (low + high, high + low):
        assert total.dtype == total.dense().dtype == torch.float64
        torch.testing.assert_close(total.dense(), low.dense().double() + high.dense())


def test_nothing_is_copied_before_a_sum_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [OuterProduct(draw(3, 1, 4, 1), draw(3, 1, 5, 1), (4, 5)) for _ in range(10)]
    copied = []
    concatenate = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *a: copied.append(None) or concatenate(*a))
    total = added(grads)
    assert not copied
    for _ in range(2):
        total.squared_norm()
    assert len(copied) == 2, "one for each operand"


@pytest.mark.parametrize("planner", [GHOST, DENSE, Planner(), Planner(budget=1, force=GHOST.force)])
def test_norms_that_share_an_operand_are_those_of_each(planner: Planner) -> None:
    left, rights = draw(5, 1, 6, 7), (draw(5, 1, 3, 7), draw(5, 1, 4, 7))
    grads = [grad.with_planner(planner) for grad in with_common_left(left, rights)]
    for grad in (*grads, *reversed(grads), grads[0]):
        torch.testing.assert_close(grad.squared_norm(), grad.dense().flatten(1).square().sum(1))
        index = torch.tensor([3, 0])
        torch.testing.assert_close(grad.select(index).squared_norm(), grad.squared_norm()[index])
        torch.testing.assert_close((grad + grad).squared_norm(), 4 * grad.squared_norm())


def test_the_products_of_a_shared_operand_are_computed_once_and_let_go_of() -> None:
    left = draw(5, 1, 6, 7)
    shared = Positions(left)
    first = shared.products()
    torch.testing.assert_close(first, left.mT @ left)
    assert shared.products() is first
    assert shared.products() is not first, "kept from the first call to the second only"


def test_a_shared_operand_makes_ghost_norms_cheaper() -> None:
    left, right = draw(4, 1, 512, 64), draw(4, 1, 64, 64)
    for several, name in ((1, "dense"), (2, "ghost")):
        for grad in with_common_left(left, [right] * several):
            plan = grad.plan("squared_norm")
            assert plan is not None and plan.name == name
