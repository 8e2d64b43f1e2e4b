"""Whatever two structures do together is what their materialised gradients do together."""

import itertools

import pytest
import torch

from gradbatch.factors import Sum
from gradbatch.plans.contractions import Planner
from tests.factors.cases import SHAPE, STRUCTURES, Maker, assert_right, flat

PAIRS = list(itertools.product(STRUCTURES, STRUCTURES))
pairs = pytest.mark.parametrize(("first", "second"), PAIRS, ids="-".join)
FORCED = [{}, {"inner": "ghost", "gram": "ghost"}, {"inner": "dense", "gram": "dense"}]


@pairs
def test_inner_products_and_gram_matrices_of_all_pairs(first: str, second: str, device: torch.device) -> None:
    for n, m, budget, force in itertools.product((0, 1, 4), (3,), (1, 1024, 2**28), FORCED):
        if budget == 1 and n != 4:
            continue
        make, planner = Maker(torch.float64, device), Planner(budget, force)
        left, expected = STRUCTURES[first](n, make)
        same, expected_same = STRUCTURES[second](n, make)
        other, expected_other = STRUCTURES[second](m, make)
        left = left.with_planner(planner)
        assert_right(left.inner(same), (flat(expected) * flat(expected_same)).sum(1), torch.float64)
        assert_right(left.gram(other), flat(expected) @ flat(expected_other).mT, torch.float64)


@pairs
def test_sums_of_all_pairs_have_their_cross_terms(first: str, second: str, device: torch.device) -> None:
    for n, budget in ((0, 2**28), (4, 2**28), (4, 1024)):
        make = Maker(torch.float64, device)
        left, expected = STRUCTURES[first](n, make)
        right, expected_right = STRUCTURES[second](n, make)
        total, x = left.with_planner(Planner(budget)) + right, expected + expected_right
        assert_right(total.dense(), x, torch.float64)
        assert_right(total.squared_norm(), flat(x).square().sum(1), torch.float64)
        assert_right(total.gram(), flat(x) @ flat(x).mT, torch.float64)


@pytest.mark.parametrize("names", list(itertools.combinations(STRUCTURES, 3))[::7], ids="-".join)
def test_sums_of_three_structures(names: tuple[str, str, str], device: torch.device) -> None:
    cases = [STRUCTURES[name](3, Maker(torch.float32, device)) for name in names]
    total, x = Sum([case.grad for case in cases]), flat(sum(case.expected for case in cases))
    assert_right(total.squared_norm(), x.square().sum(1), torch.float32)
    assert_right(total.gram(), x @ x.mT, torch.float32)
    assert_right(total.inner(cases[0].grad), (x * flat(cases[0].expected)).sum(1), torch.float32)


@pairs
def test_dtypes_mix(first: str, second: str, device: torch.device) -> None:
    left, expected = STRUCTURES[first](3, Maker(torch.bfloat16, device))
    right, expected_right = STRUCTURES[second](3, Maker(torch.float64, device))
    x, y = flat(expected), flat(expected_right)
    results = {
        "inner": (left.inner(right), (x * y).sum(1)),
        "gram": (left.gram(right), x @ y.mT),
        "sum": ((left + right).sum(), (x + y).sum(0).reshape(SHAPE)),
        "norm": ((left + right).squared_norm(), (x + y).square().sum(1)),
    }
    for name, (actual, exact) in results.items():
        assert actual.dtype == torch.float64, name
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().amax()))
