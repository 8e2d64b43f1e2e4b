"""The planner evaluates what it says, chooses sensibly, tiles to its budget, and never changes a value."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.plans import kernels
from gradbatch.plans.contractions import PLANS, Planner
from gradbatch.plans.convolutions import CORRELATE_METHODS, Patches, Window

Operands = tuple[Tensor, "Tensor | Patches"]


def tensors(n: int = 4, g: int = 2, p: int = 3, d: int = 5, t: int = 6) -> Operands:
    return torch.randn(n, g, p, t, dtype=torch.float64), torch.randn(n, g, d, t, dtype=torch.float64)


def patches(n: int = 4, g: int = 2, p: int = 3) -> Operands:
    source = torch.randn(2 * n, 2 * g, 5, 4, dtype=torch.float64)
    right = Patches(source, Window((2, 3), (2, 1), (1, 0), (1, 1)), g, rows=2)
    return torch.randn(n, g, p, right.shape[3], dtype=torch.float64), right


def materialised(left: Tensor, right: Tensor | Patches) -> Tensor:
    columns = right.unfold() if isinstance(right, Patches) else right
    return torch.einsum("ngpt,ngdt->ngpd", left, columns)


def evaluations(first: Operands, second: Operands) -> dict[str, tuple[Callable[[Planner], Tensor], Tensor]]:
    """Each operation by a planner, and by an einsum over the materialised gradients."""
    x, y = materialised(*first), materialised(*second)
    n, _, k = len(x), len(y), 3
    weights, directions = torch.randn(k, n, dtype=x.dtype), torch.randn(k, *x.shape[1:], dtype=x.dtype)
    mean = x.sum(0) / max(1, len(x))
    same = len(x) == len(y)
    return {
        "dense": (lambda plan: plan.dense(*first), x),
        "sum": (lambda plan: plan.sum(*first), x.sum(0)),
        "weighted_sum": (
            lambda plan: plan.weighted_sum(*first, weights),
            torch.einsum("kn,ngpd->kgpd", weights, x),
        ),
        "squared_norm": (lambda plan: plan.squared_norm(*first), torch.einsum("ngpd,ngpd->n", x, x)),
        "inner": (
            lambda plan: plan.inner(*first, *(second if same else first)),
            torch.einsum("ngpd,ngpd->n", x, y if same else x),
        ),
        "gram": (lambda plan: plan.gram(*first, *second), torch.einsum("ngpd,mgpd->nm", x, y)),
        "sum_of_squares": (
            lambda plan: torch.stack(
                [plan.sum_of_squares(*first), plan.sum_of_squares(*first, directions[0])]
            ),
            torch.stack([x.square().sum(0), (x - directions[0]).square().sum(0)]),
        ),
        "moments": (
            lambda plan: torch.stack(plan.moments(*first)),
            torch.stack([mean, (x - mean).square().sum(0)]),
        ),
        "dot": (lambda plan: plan.dot(*first, directions[0]), torch.einsum("ngpd,gpd->n", x, directions[0])),
        "project": (
            lambda plan: plan.project(*first, directions),
            torch.einsum("ngpd,kgpd->nk", x, directions),
        ),
    }


FORCED = [(operation, name) for operation, names in PLANS.items() for name in names]
OPERANDS: dict[str, Callable[[int], Operands]] = {
    "tensors": tensors,
    "one position": lambda n: tensors(n, t=1),
    "no position": lambda n: tensors(n, t=0),
    "one group": lambda n: tensors(n, g=1, t=20),
    "depthwise": lambda n: tensors(n, g=6, p=1),
    "patches": patches,
    "depthwise patches": lambda n: patches(n, g=4, p=1),
}


@pytest.mark.parametrize(("operation", "name"), FORCED)
@pytest.mark.parametrize("operands", OPERANDS)
def test_every_plan_gives_the_value_of_the_einsum(operation: str, name: str, operands: str) -> None:
    for n, m, budget in ((0, 2, 2**28), (1, 1, 1), (5, 5, 2**28), (5, 2, 1024), (4, 5, 1)):
        evaluate, expected = evaluations(OPERANDS[operands](n), OPERANDS[operands](m))[operation]
        actual = evaluate(Planner(budget, {operation: name}))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", CORRELATE_METHODS)
def test_plans_that_materialise_use_the_forced_kernel(method: str) -> None:
    first, second = patches(5), patches(5)
    for operation in set(PLANS) - {"dense", "sum"}:
        for budget in (600, 2**28):
            planner = Planner(budget, {operation: "dense", "dense": method})
            plan = planner.plan(operation, *first)
            assert plan.name == "dense" and plan.kernel == method
            evaluate, expected = evaluations(first, second)[operation]
            torch.testing.assert_close(evaluate(planner), expected, rtol=1e-10, atol=1e-10)


def test_a_tensor_and_patches_go_together() -> None:
    first, right = patches(4), torch.randn(4, 2, 12, 7, dtype=torch.float64)
    second = torch.randn(4, 2, 3, 7, dtype=torch.float64), right
    for name, budget in itertools.product(("ghost", "dense"), (1, 2**28)):
        planner = Planner(budget, {"inner": name, "gram": name})
        for a, b in ((first, second), (second, first)):
            x, y = materialised(*a), materialised(*b)
            torch.testing.assert_close(planner.inner(*a, *b), (x * y).sum((1, 2, 3)))
            torch.testing.assert_close(planner.gram(*a, *b), x.flatten(1) @ y.flatten(1).mT)


def test_samples_that_share_one_operand_are_not_taken_for_equal() -> None:
    left, right = tensors()
    other = torch.randn_like(left)
    for name in ("ghost", "dense"):
        x, y = materialised(left, right).flatten(1), materialised(other, right).flatten(1)
        gram = Planner(force={"gram": name}).gram(left, right, other, right)
        torch.testing.assert_close(gram, x @ y.mT)


def chosen(operation: str, n: int = 8, g: int = 1, p: int = 64, d: int = 64, t: int = 16) -> str:
    left, right = (torch.empty(1).expand(n, g, size, t) for size in (p, d))
    return Planner().plan(operation, left, right).name


def test_norms_of_single_outer_products_never_materialise_them() -> None:
    for p, d in ((10, 10), (1000, 10), (4096, 4096)):
        assert chosen("squared_norm", p=p, d=d, t=1) == "ghost"


def test_many_positions_are_contracted_first_and_many_channels_first_otherwise() -> None:
    assert chosen("squared_norm", p=64, d=64, t=4096) == "dense"
    assert chosen("gram", p=64, d=64, t=1024) == "dense"
    assert chosen("squared_norm", p=4096, d=4096, t=16) == "ghost"
    assert chosen("squared_norm", p=2048, d=2048, t=64) == "ghost"
    assert chosen("gram", n=4, p=4096, d=4096, t=2) == "ghost"
    # One group of many decides like the layer it is.
    assert chosen("squared_norm", g=64, p=1, d=9, t=256) == "dense"


def test_few_directions_are_contracted_and_few_outputs_materialised() -> None:
    assert chosen("dot", p=1024, d=1024, t=4) == "contract"
    assert chosen("project", p=2, d=2, t=512) == "dense"
    assert chosen("weighted_sum") == "scaled"
    assert chosen("sum_of_squares", t=1) == "squares"
    assert chosen("sum_of_squares", t=2) == "dense"


def test_a_convolution_with_few_outputs_a_group_does_not_unfold() -> None:
    window = Window((3, 3), (1, 1), (1, 1), (1, 1))
    depthwise = Patches(torch.zeros(1).expand(2, 64, 16, 16), window, 64)
    left = torch.zeros(1).expand(2, 64, 1, 256)
    assert Planner().plan("dense", left, depthwise).kernel != "unfold"
    late = Patches(torch.zeros(1).expand(2, 512, 4, 4), window, 1)
    assert Planner().plan("dense", torch.zeros(1).expand(2, 1, 512, 16), late).kernel == "unfold"


def test_operation_counts_are_those_of_the_formulas() -> None:
    n, p, d, t = 8, 64, 96, 16
    left, right = torch.zeros(1).expand(n, 1, p, t), torch.zeros(1).expand(n, 1, d, t)

    def flops(operation: str, name: str) -> int:
        return Planner(force={operation: name}).plan(operation, left, right).flops

    ghost, dense = 2 * n * t**2 * (p + d), 2 * n * t * p * d
    assert ghost <= flops("squared_norm", "ghost") <= 1.1 * ghost
    assert dense <= flops("squared_norm", "dense") <= 1.1 * dense
    assert 2 * n**2 * t**2 * (p + d) <= flops("gram", "ghost") <= 1.1 * 2 * n**2 * t**2 * (p + d)
    assert flops("gram", "dense") == dense + 2 * n**2 * p * d
    assert flops("sum", "einsum") == dense


def test_a_plan_can_be_read() -> None:
    left, right = tensors()
    text = repr(Planner().plan("squared_norm", left, right))
    assert (
        text.startswith("Plan(squared_norm: ") and "MFLOP" in text and "MiB" in text and "4 samples" in text
    )
    lazy = Planner(force={"gram": "dense", "dense": "vmap"}).plan("gram", *patches())
    assert repr(lazy).startswith("Plan(gram: dense by vmap, ")
    assert repr(Planner(5, {"dot": "dense"})) == "Planner(budget=5, force={'dot': 'dense'})"


def test_tiles_shrink_with_the_budget_samples_first() -> None:
    left, right = tensors(n=64, p=32, d=32, t=200)
    force = {"squared_norm": "dense"}
    plans = [Planner(budget, force).plan("squared_norm", left, right) for budget in (2**28, 2**18, 2**12, 1)]
    samples, rows = [plan.tile.samples for plan in plans], [plan.tile.rows for plan in plans]
    assert samples[0] == 64 > samples[1] > samples[2] == samples[3] == 1
    assert rows[0] == rows[1] == 32 > rows[2] > rows[3] == 1
    assert all(plan.bytes <= budget for plan, budget in zip(plans[:3], (2**28, 2**18, 2**12), strict=True))


@pytest.mark.parametrize(
    ("force", "valid"),
    [
        ({"norm": "ghost"}, "squared_norm"),
        ({"squared_norm": "fast"}, "ghost, dense"),
        ({"dense": "native"}, "vmap"),
    ],
)
def test_unknown_operations_and_plans_are_refused_with_the_known_ones(
    force: dict[str, str], valid: str
) -> None:
    with pytest.raises(UsageError, match=valid):
        Planner(force=force)


def test_an_impossible_budget_and_an_unknown_operation_are_refused() -> None:
    with pytest.raises(UsageError, match="budget is 0"):
        Planner(budget=0)
    with pytest.raises(UsageError, match="squared_norm"):
        Planner().plan("norm", *tensors())


def test_a_forced_plan_that_cannot_evaluate_the_operands_is_ignored() -> None:
    force = {"dense": "grouped", "sum": "native", "sum_of_squares": "squares"}
    planner = Planner(force=force)
    assert planner.plan("dense", *tensors()).name == "einsum"
    assert planner.plan("sum", *tensors()).name == "einsum"
    assert planner.plan("sum_of_squares", *tensors()).name == "dense"


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 1), (2, 1024), (2, 1025), (4, 3, 700), (0, 2000)])
def test_squared_norms_of_rows_of_any_length(shape: tuple[int, ...]) -> None:
    block = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(kernels.squared_norms(block), block.flatten(1).square().sum(1))


def test_a_long_row_loses_no_digits() -> None:
    block = torch.randn(1, 4_000_000)
    right = block.double().square().sum(1)
    assert float((kernels.squared_norms(block).double() / right - 1).abs()) < 1e-6


@pytest.mark.parametrize("far", [0.0, 1.0, 1e6, float("nan")])
def test_squares_around_a_center_keep_their_digits(far: float) -> None:
    left, right = torch.randn(6, 1, 4, 1, dtype=torch.float64), torch.randn(6, 1, 3, 1, dtype=torch.float64)
    # Rows whose gradients are alike, so that their deviations from the mean cancel in a difference of sums.
    left[:, :, 1], right[:, :, 2] = 1e6, 1e6
    center = (left @ right.mT).mean(0)
    center[:, 3] += far
    found = Planner(force={"sum_of_squares": "squares"}).sum_of_squares(left, right, center)
    expected = (left @ right.mT - center).square().sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)
    assert (found.nan_to_num() >= 0).all()


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("budget", [1, 2**20])
def test_moments_keep_their_digits(positions: int, budget: int) -> None:
    torch.manual_seed(0)
    left = torch.randn(40, 2, 3, positions, dtype=torch.float64)
    right = torch.randn(40, 2, 4, positions, dtype=torch.float64)
    left[:, :, 1], right[:, :, 2] = 1e6, 1e6  # gradients that are alike and large
    left[0, :, 2] *= 1e7  # the first sample is far from the others
    gradients = left @ right.mT
    mean, squares = Planner(budget).moments(left, right)
    torch.testing.assert_close(mean, gradients.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(squares, (gradients - gradients.mean(0)).square().sum(0), rtol=1e-11, atol=0)


def test_moments_of_long_gradients_are_joined_sample_by_sample() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(6, 1, 90, 2, dtype=torch.float64), torch.randn(6, 1, 50, 2, dtype=torch.float64)
    left[0] *= 1e6
    gradients = left @ right.mT
    for budget in (1, 2**28):
        mean, squares = Planner(budget).moments(left, right)
        torch.testing.assert_close(mean, gradients.mean(0), rtol=1e-11, atol=1e-8)
        expected = (gradients - gradients.mean(0)).square().sum(0)
        torch.testing.assert_close(squares, expected, rtol=1e-12, atol=0)


def test_moments_where_squares_of_factors_leave_the_range() -> None:
    left, right = torch.full((3, 1, 2, 1), 1e30), torch.full((3, 1, 2, 1), 1e-30)
    right[0] = 2e-30
    mean, squares = Planner(force={"moments": "squares"}).moments(left, right)
    torch.testing.assert_close(mean, torch.full((1, 2, 2), 4 / 3))
    torch.testing.assert_close(squares, torch.full((1, 2, 2), 2 / 3))


def test_moments_never_write_to_their_operands() -> None:
    left, right = tensors()
    before = left.clone(), right.clone()
    for name in ("squares", "dense"):
        Planner(force={"moments": name}).moments(left, right)
    assert torch.equal(left, before[0]) and torch.equal(right, before[1])
