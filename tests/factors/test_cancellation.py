"""Norms whose terms are far larger than themselves are right wherever the materialised gradients are."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gradbatch.factors import Concat, OuterProduct, PerSampleGrad, RowScatter, Sum
from gradbatch.plans.contractions import Planner

# No power of two: the products of two such terms are rounded.
SIZE = 123456789.0
GHOST = Planner(force={"squared_norm": "ghost", "gram": "ghost", "inner": "ghost"})
SMALL = Planner(1024, GHOST.force)
planners = pytest.mark.parametrize("planner", [GHOST, SMALL], ids=str)


def integers(*shape: int, limit: int = 9) -> Tensor:
    return torch.randint(-limit, limit + 1, shape).double()


def exact(dense: Tensor) -> list[list[Fraction]]:
    return [[Fraction(value) for value in row] for row in dense.flatten(1).tolist()]


def exact_gram(dense: Tensor, other: Tensor) -> Tensor:
    pairs = [
        [float(sum(a * b for a, b in zip(x, y, strict=True))) for y in exact(other)] for x in exact(dense)
    ]
    return torch.tensor(pairs, dtype=torch.float64)


def cancelling(n: int, size: float = SIZE, outputs: int = 3, inputs: int = 4) -> OuterProduct:
    """Integers, so that materialising is exact: two positions of ``size`` cancel but for a small difference.

    The first sample is an ordinary one, and no integers.
    """
    left, right = integers(n, 1, outputs, 1) * size, integers(n, 1, inputs, 1)
    lefts = torch.cat([left, integers(n, 1, outputs, 1) - left, integers(n, 1, outputs, 1)], 3)
    rights = torch.cat([right, right, integers(n, 1, inputs, 1)], 3)
    lefts[:1], rights[:1] = torch.randn_like(lefts[:1]), torch.randn_like(rights[:1])
    return OuterProduct(lefts, rights, (outputs, inputs))


def assert_exact(grad: PerSampleGrad, other: PerSampleGrad) -> None:
    dense, dense_other = grad.dense(), other.dense()
    gram, cross = exact_gram(dense, dense), exact_gram(dense, dense_other)
    norms, norms_other = gram.diagonal(), exact_gram(dense_other, dense_other).diagonal()
    close = {"rtol": 1e-10, "atol": 0.0}
    torch.testing.assert_close(grad.squared_norm(), norms, **close)
    torch.testing.assert_close(grad.gram().diagonal(), norms, **close)
    # An inner product is right to rounding of the product of the norms: it may vanish itself.
    sizes, sizes_cross = (norms[:, None] * norms).sqrt(), (norms[:, None] * norms_other).sqrt()
    assert ((grad.gram() - gram).abs() <= 1e-10 * sizes).all()
    assert ((grad.gram(other) - cross).abs() <= 1e-10 * sizes_cross).all()
    assert ((other.gram(grad) - cross.mT).abs() <= 1e-10 * sizes_cross.mT).all()
    assert ((grad.inner(other) - cross.diagonal()).abs() <= 1e-10 * sizes_cross.diagonal()).all()


@planners
def test_positions_that_cancel_within_an_outer_product(planner: Planner) -> None:
    first, second = (cancelling(5).with_planner(planner) for _ in range(2))
    naive = (first.left.mT @ first.left * (first.right.mT @ first.right)).sum((1, 2, 3))
    exactly = exact_gram(first.dense(), first.dense()).diagonal()
    assert (naive - exactly)[1:].abs().min() > 1e-3 * exactly[1:].max(), "the case would prove nothing"
    assert_exact(first, second)


@planners
def test_many_positions_that_repeat_and_cancel(planner: Planner) -> None:
    grad = cancelling(4, size=1234567.0)
    left = torch.cat([grad.left[..., :2].repeat(1, 1, 1, 50), grad.left[..., 2:]], 3)
    right = torch.cat([grad.right[..., :2].repeat(1, 1, 1, 50), grad.right[..., 2:]], 3)
    repeated = OuterProduct(left, right, grad.shape).with_planner(planner)
    assert_exact(repeated, cancelling(4).with_planner(planner))


@planners
def test_calls_that_cancel_each_other_in_a_sum(planner: Planner) -> None:
    """A tied embedding whose gradient is the opposite of the head's, but for a small difference."""
    ids = torch.tensor([[0, 2], [1, 1], [2, -1], [2, 0]])
    values = integers(4, 2, 4) * SIZE
    values[0] = 1
    head_left, head_right = integers(4, 1, 3, 3), integers(4, 1, 4, 3)
    head_left[..., :2] = 0
    for n in range(4):
        for t in range(2):
            head_right[n, 0, :, t] = -values[n, t]
            if ids[n, t] >= 0:
                head_left[n, 0, ids[n, t], t] = 1
    scatter, head = RowScatter(ids, values, (3, 4)), OuterProduct(head_left, head_right, (3, 4))
    tied = Sum([scatter, head]).with_planner(planner)
    assert float(tied.squared_norm()[1]) < 1e-12 * float(scatter.squared_norm()[1])
    assert_exact(tied, cancelling(4).with_planner(planner))
    assert_exact(scatter.with_planner(planner), cancelling(4).with_planner(planner))
    assert_exact(Concat([tied, cancelling(2).with_planner(planner)]), Concat([cancelling(3), cancelling(3)]))


def test_the_errors_of_positions_that_repeat_each_other_add_up() -> None:
    left, right = torch.randn(8, 1, 3, 1), torch.randn(8, 1, 4, 1)
    lefts = torch.cat([left, -left], 3).repeat(1, 1, 1, 1000)
    rights = torch.cat([right, right * 1.003], 3).repeat(1, 1, 1, 1000)
    exactly = OuterProduct(lefts.double(), rights.double(), (3, 4)).dense().flatten(1).square().sum(1)
    norms = OuterProduct(lefts, rights, (3, 4)).with_planner(GHOST).squared_norm()
    torch.testing.assert_close(norms.double(), exactly, rtol=1e-3, atol=0)


def test_a_gradient_that_vanishes_has_norm_zero_and_never_less() -> None:
    for size in (1.0, 2.0**30, 1e-30):
        left, right = torch.randn(6, 2, 3, 1) * size, torch.randn(6, 2, 4, 1)
        grad = OuterProduct(torch.cat([left, -left], 3), torch.cat([right, right], 3), (6, 4)).with_planner(
            GHOST
        )
        assert torch.equal(grad.squared_norm(), torch.zeros(6))
        assert torch.equal(grad.gram(), torch.zeros(6, 6))
        assert ((grad + grad).squared_norm() >= 0).all()


def test_float32_norms_keep_four_digits_under_moderate_cancellation() -> None:
    for ratio in (3.0, 10.0, 30.0, 100.0, 1000.0):
        left, right = torch.randn(20, 1, 30, 1), torch.randn(20, 1, 40, 1)
        rest = torch.randn(20, 1, 30, 1) / ratio
        grad = OuterProduct(torch.cat([left, rest - left], 3), torch.cat([right, right], 3), (30, 40))
        wide = (
            OuterProduct(grad.left.double(), grad.right.double(), grad.shape)
            .dense()
            .flatten(1)
            .square()
            .sum(1)
        )
        torch.testing.assert_close(grad.with_planner(GHOST).squared_norm().double(), wide, rtol=1e-4, atol=0)


def test_products_that_overflow_where_the_gradient_does_not_are_materialised() -> None:
    for small, large, positions in itertools.product((1e-25, 1e-15), (1e25, 1e20), (1, 2)):
        left, right = torch.full((2, 1, 3, positions), small), torch.full((2, 1, 4, positions), large)
        norms = OuterProduct(left, right, (3, 4)).with_planner(GHOST).squared_norm()
        torch.testing.assert_close(norms, torch.full((2,), 12 * (positions * small * large) ** 2))


@pytest.mark.parametrize("positions", [1, 3])
def test_norms_whose_sum_alone_overflows_are_right(positions: int) -> None:
    left, right = torch.zeros(4, 1, 2, positions), torch.zeros(4, 1, 3, positions)
    left[..., 0], right[..., 0] = 1e9, 6e9  # squared norms of 2.16e38
    norms = OuterProduct(left, right, (2, 3)).with_planner(GHOST).squared_norm()
    torch.testing.assert_close(norms, torch.full((4,), 2.16e38))


def test_ordinary_samples_are_not_materialised() -> None:
    grad = OuterProduct(torch.randn(8, 1, 64, 300), torch.randn(8, 1, 64, 300), (64, 64)).with_planner(GHOST)
    assert GHOST.plan("squared_norm", grad.left, grad.right).name == "ghost"
    called = []

    class Watching(Planner):
        def forcing(self, **force: str) -> Planner:
            called.append(force)
            return super().forcing(**force)

    grad.with_planner(Watching(force=GHOST.force)).squared_norm()
    assert not called
