"""Whatever two structures do together is what their materialised gradients do together."""

import itertools

import pytest
import torch

from gradbatch.factors import Sum
from gradbatch.plans.contractions import Planner
from tests.factors.cases import SHAPE, STRUCTURES, Maker, assert_right, flat

# Every pair once, every other one the other way round.
PAIRS = [
    pair[:: 1 - 2 * (i % 2)] for i, pair in enumerate(itertools.combinations_with_replacement(STRUCTURES, 2))
]
pairs = pytest.mark.parametrize(("first", "second"), PAIRS, ids=map("-".join, PAIRS))
GHOST, DENSE = ({"inner": name, "gram": name} for name in ("ghost", "dense"))
PLANNERS = [
    (0, Planner()),
    (1, Planner(1)),
    (4, Planner(1024, GHOST)),
    (3, Planner(1024, DENSE)),
    (3, Planner()),
]


@pairs
def test_inner_products_and_gram_matrices_of_all_pairs(first: str, second: str, device: torch.device) -> None:
    for n, planner in PLANNERS:
        make = Maker(torch.float64, device)
        left, expected = STRUCTURES[first](n, make)
        same, expected_same = STRUCTURES[second](n, make)
        other, expected_other = STRUCTURES[second](3, make)
        left = left.with_planner(planner)
        assert_right(left.inner(same), (flat(expected) * flat(expected_same)).sum(1), torch.float64)
        gram = flat(expected) @ flat(expected_other).mT
        assert_right(left.gram(other), gram, torch.float64)
        if planner.force == GHOST:
            assert_right(other.with_planner(planner).gram(left), gram.mT, torch.float64)
            assert_right(same.with_planner(planner).inner(left), left.inner(same), torch.float64)


@pairs
def test_sums_of_all_pairs_have_their_cross_terms(first: str, second: str, device: torch.device) -> None:
    for n, budget in ((0, 2**28), (3, 256)):
        make = Maker(torch.float64, device)
        left, expected = STRUCTURES[first](n, make)
        right, expected_right = STRUCTURES[second](n, make)
        total, x = left.with_planner(Planner(budget)) + right, expected + expected_right
        assert_right(total.dense(), x, torch.float64)
        assert_right(total.squared_norm(), flat(x).square().sum(1), torch.float64)
        assert_right(total.gram(), flat(x) @ flat(x).mT, torch.float64)


TRIPLES = list(itertools.combinations(STRUCTURES, 3))[::17]


@pytest.mark.parametrize("names", TRIPLES, ids=map("-".join, TRIPLES))
def test_sums_of_three_structures(names: tuple[str, str, str], device: torch.device) -> None:
    cases = [STRUCTURES[name](3, Maker(torch.float32, device)) for name in names]
    total, x = Sum([case.grad for case in cases]), flat(sum(case.expected for case in cases))
    assert_right(total.squared_norm(), x.square().sum(1), torch.float32)
    assert_right(total.gram(), x @ x.mT, torch.float32)
    assert_right(total.inner(cases[0].grad), (x * flat(cases[0].expected)).sum(1), torch.float32)


@pytest.mark.parametrize(("first", "second"), PAIRS[::3], ids=map("-".join, PAIRS[::3]))
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
