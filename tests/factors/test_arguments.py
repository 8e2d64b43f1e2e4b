"""What the structures refuse, and what they say: the shapes, and what was expected."""

import re
from collections.abc import Callable

import pytest
import torch

from gradbatch.errors import RuleError, UsageError
from gradbatch.factors import Blocks, Concat, Dense, OuterProduct, PerSampleGrad, RowScatter, Sum
from gradbatch.plans.contractions import Plan

LEFT, RIGHT = torch.randn(3, 2, 3, 5), torch.randn(3, 2, 4, 5)
IDS, VALUES = torch.zeros(3, 5, dtype=torch.int64), torch.randn(3, 5, 4)


@pytest.mark.parametrize(
    ("construct", "words"),
    [
        (lambda: Dense(torch.tensor(1.0)), "sample axis"),
        (lambda: Dense(torch.ones(3, 2, dtype=torch.int64)), "int64"),
        (lambda: Dense(torch.ones(3, 2, dtype=torch.complex64)), "complex64"),
        (lambda: OuterProduct(LEFT[0], RIGHT, (6, 4)), "[2, 3, 5]"),
        (lambda: OuterProduct(LEFT, RIGHT[:2], (6, 4)), "[2, 2, 4, 5]"),
        (lambda: OuterProduct(LEFT, RIGHT[:, :1], (6, 4)), "[3, 1, 4, 5]"),
        (lambda: OuterProduct(LEFT, RIGHT[..., :4], (6, 4)), "[3, 2, 4, 4]"),
        (lambda: OuterProduct(LEFT, RIGHT, (6, 5)), "[6, 5]"),
        (lambda: OuterProduct(LEFT.int(), RIGHT, (6, 4)), "int32"),
        (lambda: RowScatter(IDS[0], VALUES, (6, 4)), "[5]"),
        (lambda: RowScatter(IDS, VALUES[:, :4], (6, 4)), "[3, 4, 4]"),
        (lambda: RowScatter(IDS, VALUES, (6, 5)), "[6, 5]"),
        (lambda: RowScatter(IDS, VALUES, (6,)), "[6]"),
        (lambda: RowScatter(IDS.int(), VALUES, (6, 4)), "int32"),
        (lambda: RowScatter(IDS, VALUES.long(), (6, 4)), "int64"),
        (lambda: RowScatter(IDS + 6, VALUES, (6, 4)), "6 rows"),
        (lambda: RowScatter(IDS - 2, VALUES, (6, 4)), "from -2"),
        (lambda: Sum([]), "[]"),
        (lambda: Sum([Dense(VALUES), Dense(VALUES[:2])]), "2 x [5, 4]"),
        (lambda: Sum([Dense(VALUES), Dense(VALUES[:, :2])]), "3 x [2, 4]"),
        (lambda: Blocks({}, (6, 4)), "[]"),
        (lambda: Blocks({0: Dense(VALUES), 20: Dense(VALUES[:2])}, (10, 4)), "2 x [5, 4]"),
        (lambda: Blocks({0: Dense(VALUES), 19: Dense(VALUES)}, (10, 4)), "overlap"),
        (lambda: Blocks({0: Blocks({8: Dense(VALUES)}, (7, 4)), 8: Dense(VALUES)}, (9, 4)), "overlap"),
        (lambda: Blocks({-4: Dense(VALUES)}, (6, 4)), "outside"),
        (lambda: Blocks({5: Dense(VALUES)}, (6, 4)), "outside"),
        (lambda: Concat([]), "[]"),
        (lambda: Concat([Dense(VALUES), Dense(VALUES[:, :2])]), "3 x [2, 4]"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name_of_their_sizes(
    construct: Callable[[], object], words: str
) -> None:
    with pytest.raises(RuleError, match=re.escape(words)):
        construct()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda g: g.weighted_sum(torch.ones(4)), "N = 3"),
        (lambda g: g.weighted_sum(torch.ones(2, 2, 3)), "[2, 2, 3]"),
        (lambda g: g.dot(torch.ones(4, 6)), "[6, 4]"),
        (lambda g: g.project(torch.ones(2, 4, 6)), "[6, 4]"),
        (lambda g: g.sum_of_squares(torch.ones(6)), "center"),
        (lambda g: g.inner(Dense(torch.ones(2, 6, 4))), "2 x [6, 4]"),
        (lambda g: g.gram(Dense(torch.ones(3, 4, 6))), "3 x [4, 6]"),
        (lambda g: g + Dense(torch.ones(2, 6, 4)), "same samples"),
        (lambda g: g.select(torch.ones(2, dtype=torch.bool)), "mask [N]"),
        (lambda g: g.select(torch.tensor(1)), "[M]"),
        (lambda g: g.regroup(2), "regrouped by 2"),
        (lambda g: g.regroup(0), "regrouped by 0"),
        (lambda g: g.plan("norm"), "squared_norm"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_was_expected(
    use: Callable[[PerSampleGrad], object], words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        use(OuterProduct(LEFT, RIGHT, (6, 4)))


def test_only_gradients_are_added_to_gradients() -> None:
    with pytest.raises(TypeError):
        OuterProduct(LEFT, RIGHT, (6, 4)) + LEFT  # type: ignore[operator]


def test_a_structure_shows_its_sizes_and_its_plan() -> None:
    outer = OuterProduct(LEFT, RIGHT, (6, 4))
    assert repr(outer) == "OuterProduct(3 x [6, 4], G=2 P=3 D=4 T=5)"
    assert repr(RowScatter(IDS, VALUES, (6, 4))) == "RowScatter(3 x [6, 4])"
    assert "RowScatter(3 x [6, 4])" in repr(Sum([outer, RowScatter(IDS, VALUES, (6, 4))]))
    assert isinstance(outer.plan("squared_norm"), Plan)
    assert Dense(VALUES).plan("squared_norm") is None


def test_integer_and_boolean_weights_are_weights() -> None:
    outer = OuterProduct(LEFT, RIGHT, (6, 4))
    blocks = Blocks({4: Dense(VALUES)}, (6, 4))
    for grad in (outer, Dense(outer.dense()), Sum([outer, RowScatter(IDS, VALUES, (6, 4))]), blocks):
        chosen = torch.tensor([True, False, True])
        torch.testing.assert_close(grad.weighted_sum(chosen), grad.select(chosen).sum())
        torch.testing.assert_close(grad.weighted_sum(chosen.long()), grad.select(chosen).sum())


def test_a_parameter_may_be_a_scalar() -> None:
    grad = Dense(torch.tensor([3.0, 4.0]))
    assert grad.sum() == 7 and grad.dot(torch.tensor(2.0)).tolist() == [6, 8]
    assert grad.squared_norm().tolist() == [9, 16]
    assert grad.gram().tolist() == [[9, 12], [12, 16]]
