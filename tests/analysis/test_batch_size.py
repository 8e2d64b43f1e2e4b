"""Tests of the batch size against their definitions on materialised gradients."""

import math

import pytest
import torch

from gradbatch import UsageError
from gradbatch.analysis import cabs_batch_size, inner_product_test, norm_test, orthogonality_test


def sums(grads: torch.Tensor) -> tuple[int, float, float, float]:
    total = grads.sum(0)
    return (
        len(grads),
        float(grads.square().sum()),
        float(total.square().sum()),
        float((grads @ total).square().sum()),
    )


@pytest.mark.parametrize("shift", [0.0, 0.3, 5.0])
def test_each_test_is_its_definition(shift: float) -> None:
    grads = torch.randn(12, 7, dtype=torch.double) + shift
    mean = grads.mean(0)
    count, squares, square, dots = sums(grads)
    along = grads @ mean
    aside = grads - along[:, None] / mean.square().sum() * mean
    for found, variance, scale, bound in (
        (norm_test(count, squares, square), grads.var(0).sum(), mean.norm() ** 2, 0.9),
        (inner_product_test(count, square, dots), along.var(), mean.norm() ** 4, 0.9),
        (
            orthogonality_test(count, squares, square, dots),
            aside.square().sum() / 11,
            mean.norm() ** 2,
            math.tan(math.radians(80)),
        ),
    ):
        assert found.ratio == pytest.approx(float(variance / 12 / (bound**2 * scale)), rel=1e-9)
        assert found.batch_size == pytest.approx(12 * found.ratio)
        assert found.passed == (found.ratio <= 1)


def test_a_batch_of_the_size_that_is_asked_for_passes() -> None:
    draw = torch.Generator().manual_seed(0)

    def grads(count: int) -> torch.Tensor:
        return torch.randn(count, 5, dtype=torch.double, generator=draw) + 0.4

    asked = norm_test(*sums(grads(100_000))[:3]).batch_size
    assert asked == pytest.approx(5 / (0.81 * 5 * 0.16), rel=0.05)
    passed = [norm_test(*sums(grads(round(10 * asked)))[:3]).passed for _ in range(50)]
    assert all(passed)


def test_where_nothing_can_be_said_no_batch_passes() -> None:
    for found in (
        norm_test(1, 1.0, 1.0),
        norm_test(0, 0.0, 0.0),
        norm_test(4, 0.0, 0.0),
        norm_test(4, math.nan, 1.0),
        inner_product_test(1, 1.0, 1.0),
        inner_product_test(3, 0.0, 0.0),
        orthogonality_test(3, 2.0, 0.0, 0.0),
        orthogonality_test(3, math.inf, 1.0, 1.0),
        inner_product_test(3, 1e200, 1e300),
    ):
        assert math.isnan(found.ratio) and math.isnan(found.batch_size) and not found.passed
    # Equal gradients: nothing scatters.
    assert norm_test(3, 3.0, 9.0).ratio == 0 and orthogonality_test(3, 3.0, 9.0, 27.0).ratio == 0


def test_what_the_rules_are_not_for_is_refused() -> None:
    with pytest.raises(UsageError, match="theta is 0"):
        norm_test(2, 1.0, 1.0, theta=0)
    with pytest.raises(UsageError, match="nu is -1"):
        orthogonality_test(1, 1.0, 1.0, 1.0, nu=-1)
    for arguments in ((1.0, 0.0, 0.1), (1.0, 1.0, -0.1), (-1.0, 1.0, 0.1), (math.nan, 1.0, 0.1)):
        with pytest.raises(UsageError, match="the rule is for"):
            cabs_batch_size(*arguments)
