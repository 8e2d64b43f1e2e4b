"""What is never materialised: measured by the largest tensor that any operation makes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradbatch.factors import OuterProduct, PerSampleGrad, RowScatter, Sum
from gradbatch.plans.contractions import Planner
from gradbatch.plans.convolutions import Patches, Window

N = 4


class Largest(TorchDispatchMode):
    """Remembers the largest number of elements of a result that is not a view."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def largest(evaluate: Callable[[], object]) -> int:
    with Largest() as mode:
        evaluate()
    return mode.numel


def head(vocabulary: int, width: int, positions: int) -> OuterProduct:
    left, right = torch.randn(N, 1, vocabulary, positions), torch.randn(N, 1, width, positions)
    return OuterProduct(left, right, (vocabulary, width))


def embedding(vocabulary: int, width: int, positions: int) -> RowScatter:
    ids, values = torch.randint(vocabulary, (N, positions)), torch.randn(N, positions, width)
    return RowScatter(ids, values, (vocabulary, width))


def test_the_measure_sees_a_materialised_gradient() -> None:
    grad = head(300, 200, 5)
    assert largest(grad.dense) == N * 300 * 200


@pytest.mark.parametrize("operation", ["squared_norm", "gram", "sum", "dot"])
def test_ghost_operations_never_hold_a_gradient(operation: str) -> None:
    grad = head(600, 500, 3)
    arguments = (torch.randn(600, 500),) if operation == "dot" else ()
    limit = 600 * 500 if operation == "sum" else N * (600 + 500) * 3
    assert largest(lambda: getattr(grad, operation)(*arguments)) <= limit


def test_a_tied_embedding_never_holds_a_table_a_sample() -> None:
    vocabulary, width, positions = 5000, 64, 6
    scatter, outer = embedding(vocabulary, width, positions), head(vocabulary, width, positions)
    limit = vocabulary * width // 2
    tied = Sum([scatter, outer])
    for evaluate in (
        scatter.squared_norm,
        scatter.gram,
        lambda: scatter.compact().sum(),
        lambda: scatter.compact().moments(),
        lambda: scatter.gram(scatter.select(torch.arange(2))),
        lambda: scatter.inner(scatter),
        lambda: scatter.inner(outer),
        lambda: scatter.gram(outer),
        lambda: outer.gram(scatter),
        tied.squared_norm,
        tied.gram,
        lambda: tied.inner(scatter),
    ):
        assert largest(evaluate) < limit


def grouped(kind: str) -> tuple[OuterProduct, int, int]:
    """A grouped or depthwise convolution, and how large its gradients and a product of all groups with all are."""
    channels, groups = (48, 12) if kind == "grouped" else (48, 48)
    source = torch.randn(N, channels, 6, 6)
    right = Patches(source, Window((3, 3), (1, 1), (1, 1), (1, 1)), groups)
    left = torch.randn(N, groups, channels // groups, 36)
    per_sample = channels * (channels // groups) * 9
    return OuterProduct(left, right, (channels, channels // groups, 3, 3)), per_sample, per_sample * groups


@pytest.mark.parametrize("kind", ["grouped", "depthwise"])
@pytest.mark.parametrize("plan", ["ghost", "dense"])
def test_no_group_is_ever_multiplied_with_another(kind: str, plan: str) -> None:
    grad, per_sample, crossed = grouped(kind)
    unfolded, positions = grad.right.shape.numel() // N, 36
    groups = grad.factor_sizes[0]
    direction = torch.randn(grad.shape)
    linear = {"ghost": "contract", "dense": "dense"}[plan]
    force = {"squared_norm": plan, "gram": plan, "inner": plan, "dot": linear, "project": linear}
    grad = grad.with_planner(Planner(force=force))
    ghost = groups * positions**2 * (N if plan == "ghost" else 0)
    allowed = N * max(per_sample, unfolded, ghost)
    operations: tuple[Callable[[PerSampleGrad], Tensor], ...] = (
        PerSampleGrad.dense,
        PerSampleGrad.sum,
        PerSampleGrad.squared_norm,
        PerSampleGrad.gram,
        PerSampleGrad.sum_of_squares,
        lambda g: g.weighted_sum(torch.ones(N)),
        lambda g: g.dot(direction),
        lambda g: g.project(direction[None]),
        lambda g: g.inner(g),
    )
    for operation in operations:
        assert largest(lambda operation=operation: operation(grad)) <= allowed
    assert largest(grad.with_planner(Planner(force={"squared_norm": "dense"})).squared_norm) < N * crossed


@pytest.mark.parametrize("plan", ["ghost", "dense"])
@pytest.mark.parametrize("budget", [2**14, 2**17])
@pytest.mark.parametrize("operation", ["squared_norm", "gram", "inner", "dot", "sum_of_squares"])
def test_temporaries_stay_within_the_budget(plan: str, budget: int, operation: str) -> None:
    linear = {"ghost": "contract", "dense": "dense"}[plan]
    force = {"squared_norm": plan, "gram": plan, "inner": plan, "dot": linear}
    left, right = torch.randn(16, 2, 40, 50), torch.randn(16, 2, 20, 50)
    grad = OuterProduct(left, right, (80, 20)).with_planner(Planner(budget, force))
    evaluate = {
        "squared_norm": grad.squared_norm,
        "gram": grad.gram,
        "inner": lambda: grad.inner(grad),
        "dot": lambda: grad.dot(torch.ones(80, 20)),
        "sum_of_squares": grad.sum_of_squares,
    }[operation]
    # A copy of an operand or of the result is no temporary of a plan; everything else is one.
    assert 4 * largest(evaluate) <= max(budget, 4 * left.numel())
    planned = grad.planner.plan(operation, left, right)
    assert planned.bytes <= max(budget, 4 * 2 * 50 * 40)


def test_patches_are_unfolded_a_budget_at_a_time() -> None:
    source = torch.randn(16, 4, 20, 20)
    right = Patches(source, Window((5, 5), (1, 1), (2, 2), (1, 1)), 1)
    each, budget = right.shape.numel() // 16, 2**20
    grad = OuterProduct(torch.randn(16, 1, 3, 400), right, (3, 4, 5, 5))
    assert 4 * 16 * each > 2 * budget > 8 * 2 * each, "some, but not all of the samples fit"
    for operation in ("dense", "sum", "squared_norm", "gram", "sum_of_squares"):
        for name in ("ghost", "dense"):
            force = {"dense": "unfold", "sum": "einsum", "squared_norm": name, "gram": "dense"}
            planner = Planner(budget, force)
            # The patches of one sample are copied while they are unfolded; two positions' Gram matrices are ghosts.
            assert 4 * largest(getattr(grad.with_planner(planner), operation)) <= max(
                budget, 4 * each, 4 * 400**2
            )
