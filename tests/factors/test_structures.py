"""Every operation of every structure is the same operation on the materialised gradients, whatever the plan."""

import itertools

import pytest
import torch

from gradbatch import Variance
from gradbatch.factors import Blocks, Concat, Dense, OuterProduct, PerSampleGrad, RowScatter, Sum
from gradbatch.plans.contractions import PLANS, Planner
from gradbatch.plans.convolutions import Patches, Window
from tests.factors.cases import (
    OPERATIONS,
    PER_SAMPLE,
    SHAPE,
    STRUCTURES,
    Arguments,
    Maker,
    assert_right,
    flat,
    patches,
)

FORCED = [{operation: name} for operation, names in PLANS.items() for name in names]
PLANNED = [
    "outer",
    "outer_of_one_position",
    "outer_grouped_strided",
    "outer_depthwise",
    "patches",
    "patches_of_rows",
]

WITHOUT_VALUES = {"dense_expanded", "outer_of_no_position", "scatter_of_nothing"}

structures = pytest.mark.parametrize("structure", STRUCTURES)
operations = pytest.mark.parametrize("operation", OPERATIONS)


def check(structure: str, operation: str, n: int, make: Maker, planner: Planner) -> None:
    grad, expected = STRUCTURES[structure](n, make)
    arguments = Arguments.draw(n, make.dtype, make.device)
    evaluate, reference = OPERATIONS[operation]
    exact = Arguments(*(argument.double() for argument in arguments))
    assert_right(
        evaluate(grad.with_planner(planner), arguments), reference(flat(expected), exact), make.dtype
    )


@operations
@structures
def test_every_operation_is_that_of_the_dense_gradients_whatever_the_budget(
    structure: str, operation: str, device: torch.device
) -> None:
    for n, budget in itertools.product((0, 1, 5), (1, 1024, 2**28)):
        check(structure, operation, n, Maker(torch.float64, device), Planner(budget))


@pytest.mark.parametrize("structure", [*PLANNED, "sum_of_outer_products"])
@pytest.mark.parametrize("force", FORCED, ids=str)
def test_a_forced_plan_changes_no_value(structure: str, force: dict[str, str], device: torch.device) -> None:
    # A kernel that materialises or sums is used by all operations that do so on their way.
    used_by = {
        "dense": OPERATIONS,
        "sum": ("sum", "weighted_sum", "weighted_sums", "sum_of_squares", "moments", "squared_deviations"),
    }
    relatives = {
        "weighted_sum": ("weighted_sum", "weighted_sums"),
        "sum_of_squares": ("sum_of_squares", "sum_of_centered_squares"),
        "inner": (),
    }
    (planned,) = force
    from_dense = {
        operation: "dense" for operation in PLANS if planned == "dense" and operation not in ("dense", "sum")
    }
    for operation in used_by.get(planned) or relatives.get(planned, (planned,)):
        for n, budget in ((5, 2**28), (5, 256), (0, 2**28)):
            planner = Planner(budget, {**force, **from_dense})
            check(structure, operation, n, Maker(torch.float64, device), planner)


@structures
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_operands_of_any_precision_accumulate_in_at_least_float32(
    structure: str, dtype: torch.dtype, device: torch.device
) -> None:
    for operation in OPERATIONS:
        check(structure, operation, 5, Maker(dtype, device), Planner(1024))


@structures
def test_autocast_does_not_reach_into_an_operation(structure: str, device: torch.device) -> None:
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for operation in OPERATIONS:
            check(structure, operation, 3, Maker(torch.float32, device), Planner())


@pytest.mark.parametrize("structure", sorted(set(STRUCTURES) - WITHOUT_VALUES))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("plan", ["ghost", "dense"])
def test_a_sample_that_is_not_finite_stays_alone(
    structure: str, poison: float, plan: str, device: torch.device
) -> None:
    linear = {"ghost": "contract", "dense": "dense"}[plan]
    planner = Planner(
        2**20, {"squared_norm": plan, "gram": plan, "inner": plan, "dot": linear, "project": linear}
    )
    state = torch.random.get_rng_state()
    clean, _ = STRUCTURES[structure](4, Maker(torch.float64, device))
    torch.random.set_rng_state(state)
    grad, _ = STRUCTURES[structure](4, Maker(torch.float64, device, poison))
    clean, grad = clean.with_planner(planner), grad.with_planner(planner)
    others = torch.tensor([0, 2, 3], device=device)
    arguments = Arguments.draw(4, torch.float64, device)
    for operation in PER_SAMPLE:
        evaluate, _ = OPERATIONS[operation]
        actual, unharmed = evaluate(grad, arguments), evaluate(clean, arguments)
        torch.testing.assert_close(actual[others], unharmed[others], msg=operation)
        assert not actual[1].isfinite().all(), operation
    torch.testing.assert_close(grad.gram()[others][:, others], clean.gram()[others][:, others])
    assert not grad.gram()[1].isfinite().any() and not grad.gram(clean)[1].isfinite().any()
    torch.testing.assert_close(grad.inner(clean)[others], clean.squared_norm()[others])


@structures
def test_selecting_takes_samples_in_any_order_repeated_or_by_mask(
    structure: str, device: torch.device
) -> None:
    grad, expected = STRUCTURES[structure](5, Maker(torch.float64, device))
    mask = torch.tensor([True, False, False, True, True])
    for index in (torch.tensor([4, 0, 0, 3]), torch.tensor([-1, 2]), mask, torch.arange(0), torch.arange(5)):
        chosen = grad.select(index.to(device))
        assert chosen.num_samples == len(expected[index])
        assert_right(chosen.dense(), expected[index.to(device)], torch.float64)
        assert_right(chosen.squared_norm(), flat(expected[index.to(device)]).square().sum(1), torch.float64)


@structures
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_regrouping_adds_consecutive_samples(structure: str, k: int, device: torch.device) -> None:
    grad, expected = STRUCTURES[structure](6, Maker(torch.float64, device))
    joined = expected.reshape(6 // k, k, *SHAPE).sum(1)
    regrouped = grad.regroup(k)
    assert regrouped.num_samples == 6 // k
    assert_right(regrouped.dense(), joined, torch.float64)
    assert_right(regrouped.squared_norm(), flat(joined).square().sum(1), torch.float64)
    assert_right(regrouped.gram(), flat(joined) @ flat(joined).mT, torch.float64)
    empty, _ = STRUCTURES[structure](0, Maker(torch.float64, device))
    assert empty.regroup(k).dense().shape == (0, *SHAPE)


@structures
def test_operations_may_be_asked_again(structure: str) -> None:
    grad, _ = STRUCTURES[structure](4, Maker())
    assert torch.equal(grad.squared_norm(), grad.squared_norm())
    assert torch.equal(grad.gram(), grad.gram())
    assert torch.equal(grad.sum(), grad.sum())


@structures
def test_a_planner_is_kept_by_whatever_is_derived(structure: str) -> None:
    planner = Planner(budget=12345)
    grad, _ = STRUCTURES[structure](4, Maker())
    planned = grad.with_planner(planner)
    assert type(planned) is type(grad) and grad.planner is not planner
    derived = [planned, planned.select(torch.tensor([2, 0])), planned.regroup(2), planned + grad]

    def planners(each: PerSampleGrad) -> list[Planner]:
        children = each.terms if isinstance(each, Sum) else each.parts if isinstance(each, Concat) else ()
        children = tuple(each.blocks.values()) if isinstance(each, Blocks) else children
        return [each.planner, *(found for child in children for found in planners(child))]

    assert all(found is planner for each in derived for found in planners(each))


@structures
def test_a_gram_matrix_is_symmetric_with_the_squared_norms_on_its_diagonal(structure: str) -> None:
    grad, _ = STRUCTURES[structure](5, Maker(torch.float32))
    gram = grad.gram()
    assert torch.equal(gram, gram.mT)
    torch.testing.assert_close(gram.diagonal(), grad.squared_norm())


def test_a_variance_survives_a_mean_a_billion_times_larger() -> None:
    shifted = torch.randn(50, 1, 3, 1, dtype=torch.float64) + 1e9
    grad = OuterProduct(shifted, torch.ones(50, 1, 1, 1, dtype=torch.float64), (3,))
    spread = shifted - 1e9  # exact
    expected = (spread.flatten(1) - spread.flatten(1).mean(0)).square().sum(0)
    torch.testing.assert_close(grad.sum_of_squares(grad.sum() / 50), expected, rtol=1e-10, atol=0)
    ids = torch.arange(50)[:, None] % 2
    table = RowScatter(ids, spread.reshape(50, 1, 3) + 1e9, (2, 3))
    center = torch.full((2, 3), 1e9, dtype=torch.float64)
    expected = (table.dense() - center).square().sum(0)
    torch.testing.assert_close(table.sum_of_squares(center), expected, rtol=1e-12, atol=0)


def test_convolutions_of_one_window_add_without_unfolding() -> None:
    first, second = patches(3, Maker()), patches(3, Maker())
    total = first.grad + second.grad
    assert isinstance(total, OuterProduct) and isinstance(total.right, Patches)
    assert_right(total.dense(), first.expected + second.expected, torch.float64)
    source = torch.randn(3, 4, 5, dtype=torch.float64)
    other = Patches(source, Window((2,), (1,), (0,), (1,)), groups=2)
    left = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    apart = first.grad + OuterProduct(left, other, SHAPE)
    assert isinstance(apart, Sum) and all(isinstance(term, OuterProduct) for term in apart.terms)


def test_adding_keeps_the_structure_where_there_is_one() -> None:
    cases = {name: STRUCTURES[name](3, Maker()).grad for name in ("dense", "outer", "scatter")}
    for name, grad in cases.items():
        assert type(grad + STRUCTURES[name](3, Maker()).grad) is type(grad)
    assert isinstance(cases["outer"] + cases["scatter"], Sum)
    both = cases["outer"] + cases["scatter"] + cases["outer"] + cases["scatter"] + cases["dense"]
    assert isinstance(both, Sum) and [type(term) for term in both.terms] == [OuterProduct, RowScatter, Dense]


def test_parts_of_a_parameter_add_without_leaving_their_places() -> None:
    left, right = (OuterProduct(torch.randn(3, 1, 2, 5), torch.randn(3, 1, 4, 5), (2, 4)) for _ in range(2))
    first, second = Blocks({8: left}, SHAPE), Blocks({8: right, 16: left}, SHAPE)
    total = Blocks({0: right}, SHAPE) + first + second
    assert isinstance(total, Blocks) and list(total.blocks) == [0, 8, 16]
    assert all(isinstance(block, OuterProduct) for block in total.blocks.values())
    rows = torch.cat([right.dense(), left.dense() + right.dense(), left.dense()], 1)
    torch.testing.assert_close(total.dense(), rows)
    for empty in (8, 10, 16):
        with_nothing = first + Blocks({empty: Dense(torch.zeros(3, 0))}, SHAPE)
        torch.testing.assert_close(with_nothing.dense(), first.dense())
    overlapping = first + Blocks({4: left}, SHAPE)
    assert isinstance(overlapping, Sum)
    torch.testing.assert_close(
        overlapping.squared_norm(), overlapping.dense().square().sum((1, 2)), rtol=1e-4, atol=1e-4
    )


@structures
def test_a_quantity_leaves_gradients_as_they_were(structure: str, device: torch.device) -> None:
    grad, expected = STRUCTURES[structure](4, Maker(torch.float64, device))
    for _ in range(2):  # results are divided in place, and must be nobody else's
        expect = flat(expected).var(0, unbiased=False).reshape(SHAPE)
        assert_right(Variance().reduce(grad), expect, torch.float64)
    assert_right(grad.dense(), expected, torch.float64)
