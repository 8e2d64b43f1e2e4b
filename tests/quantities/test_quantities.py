"""Quantities are what their definitions say, of gradients of any structure, and stable where definitions are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import gradbatch
from gradbatch import (
    BatchGrad,
    BatchL2Grad,
    Concat,
    Dense,
    OuterProduct,
    PerSampleGrad,
    Quantity,
    RowScatter,
    Sum,
    SumGradSquared,
    Variance,
    WeightedSum,
)
from tests import oracle


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def structures(samples: int, dtype: torch.dtype = torch.float64) -> dict[str, PerSampleGrad]:
    ids = torch.randint(0, 4, (samples, 5))
    outer = OuterProduct(draw(samples, 1, 4, 3, dtype=dtype), draw(samples, 1, 2, 3, dtype=dtype), (4, 2))
    rows = RowScatter(ids, draw(samples, 5, 2, dtype=dtype), (4, 2))
    dense = Dense(draw(samples, 4, 2, dtype=dtype))
    halves = samples // 2, samples - samples // 2
    return {
        "dense": dense,
        "outer product": outer,
        "one position": OuterProduct(outer.left[..., :1], outer.right[..., :1], (4, 2)),
        "grouped": OuterProduct(
            draw(samples, 2, 2, 3, dtype=dtype), draw(samples, 2, 2, 3, dtype=dtype), (4, 2)
        ),
        "rows": rows,
        "sum": Sum([outer, rows, dense]),
        "micro-batches": Concat([Dense(draw(n, 4, 2, dtype=dtype)) for n in halves]),
    }


STRUCTURES = list(structures(2))


@pytest.mark.parametrize("samples", [0, 1, 2, 7])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_quantity_of_every_structure_is_its_definition(structure: str, samples: int) -> None:
    grad = structures(samples)[structure]
    values = grad.dense()
    for asked in oracle.quantities(samples, torch.float64, torch.device("cpu")):
        if isinstance(asked, Variance) and samples - asked.unbiased <= 0:
            assert asked.reduce(grad).isnan().all() and asked.reduce(grad).shape == (4, 2)
            continue
        right, terms = oracle.quantity(asked, values), oracle.terms_of(asked)
        oracle.assert_right(asked.reduce(grad), right, 1e-10, asked.name, terms=terms)


def test_every_quantity_has_a_definition_here() -> None:
    built_in = {
        kind for kind in vars(gradbatch).values() if isinstance(kind, type) and issubclass(kind, Quantity)
    }
    assert built_in - {Quantity} == oracle.QUANTITIES.keys() | oracle.JOINT_QUANTITIES.keys()
    assert len({kind.name for kind in built_in - {Quantity}}) == len(built_in) - 1


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_have_at_least_single_precision(structure: str, dtype: torch.dtype) -> None:
    grad = structures(3, dtype)[structure]
    for asked in oracle.quantities(3, torch.float32, torch.device("cpu")):
        assert asked.reduce(grad).dtype == torch.promote_types(dtype, torch.float32)


class TestVariance:
    @pytest.mark.parametrize("unbiased", [False, True])
    @pytest.mark.parametrize("structure", STRUCTURES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_is_never_negative(self, structure: str, unbiased: bool, dtype: torch.dtype) -> None:
        for seed in range(5):
            torch.manual_seed(seed)
            grad = structures(6, dtype)[structure]
            assert (Variance(unbiased).reduce(grad) >= 0).all()

    @pytest.mark.parametrize("unbiased", [False, True])
    @pytest.mark.parametrize(
        "structure", ["dense", "micro-batches", "outer product", "one position", "rows", "sum"]
    )
    def test_of_a_tiny_spread_around_a_huge_mean_is_right(self, structure: str, unbiased: bool) -> None:
        # Exactly representable: a mean of 1e8, and deviations of a few units. E[g²] - E[g]² has no digit left in
        # float64 at 1e16 ± 1.
        deviations = torch.randint(-8, 9, (20, 4, 2)).double()
        values = 1e8 + deviations
        one = torch.ones(20, 1, 2, 1, dtype=torch.float64)
        grad = {
            "dense": lambda: Dense(values),
            "micro-batches": lambda: Concat([Dense(values[:7]), Dense(values[7:])]),
            "one position": lambda: OuterProduct(values[:, :, :1].unsqueeze(1), one, (4, 2)),
            "outer product": lambda: OuterProduct(
                torch.stack([torch.full_like(values[..., 0], 1e8), deviations[..., 0]], -1).unsqueeze(1),
                one.expand(20, 1, 2, 2),
                (4, 2),
            ),
            "rows": lambda: RowScatter(torch.arange(4).expand(20, 4), values, (4, 2)),
            "sum": lambda: Sum([Dense(torch.full_like(values, 1e8)), Dense(deviations)]),
        }[structure]()
        columns = slice(0, 1) if "position" in structure or "outer" in structure else slice(None)
        right = deviations[..., columns].var(0, correction=int(unbiased)).expand(4, 2)
        torch.testing.assert_close(Variance(unbiased).reduce(grad), right, rtol=1e-6, atol=0)

    def test_of_equal_gradients_is_zero(self) -> None:
        grad = Dense(torch.full((8, 4, 2), 1e8 / 3, dtype=torch.float32))
        spread = Variance().reduce(grad)
        assert (spread >= 0).all() and (spread <= (1e8 * 1e-6) ** 2).all()
        exact = Dense(torch.full((8, 4, 2), 2.0**27, dtype=torch.float32))
        assert not Variance().reduce(exact).any()

    def test_of_one_sample_is_zero_or_undefined(self) -> None:
        grad = Dense(draw(1, 4, 2))
        assert not Variance().reduce(grad).any()
        assert Variance(unbiased=True).reduce(grad).isnan().all()

    def test_of_no_sample_is_undefined(self) -> None:
        grad = Dense(draw(0, 4, 2))
        for unbiased in (False, True):
            result = Variance(unbiased).reduce(grad)
            assert result.shape == (4, 2) and result.isnan().all()

    def test_unbiased_and_population_differ_by_their_degrees_of_freedom(self) -> None:
        grad = structures(7)["sum"]
        torch.testing.assert_close(Variance(unbiased=True).reduce(grad) * 6, Variance().reduce(grad) * 7)

    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_and_the_squared_mean_make_up_the_second_moment(self, structure: str) -> None:
        grad = structures(7)[structure]
        mean = WeightedSum(torch.full((7,), 1 / 7, dtype=torch.float64)).reduce(grad)
        torch.testing.assert_close(
            SumGradSquared().reduce(grad) / 7, Variance().reduce(grad) + mean.square(), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_squared_norms_are_the_diagonal_of_the_gram_matrix_which_is_symmetric(structure: str) -> None:
    grad = structures(7)[structure]
    norms, gram = BatchL2Grad().reduce(grad), gradbatch.BatchDotGrad().reduce(grad)
    assert torch.equal(gram, gram.T)
    torch.testing.assert_close(gram.diagonal(), norms)
    assert (norms >= 0).all()


def test_weighted_sums_take_integer_and_single_precision_weights() -> None:
    grad = structures(4)["outer product"]
    right = torch.einsum("n,npd->pd", torch.arange(4).double(), grad.dense())
    for weights in (torch.arange(4), torch.arange(4.0), torch.arange(4.0).double()):
        torch.testing.assert_close(WeightedSum(weights).reduce(grad), right)


def test_quantities_are_equal_where_their_options_are_except_those_that_hold_tensors() -> None:
    assert Variance() == Variance(unbiased=False) != Variance(unbiased=True)
    assert BatchGrad() == BatchGrad() and hash(BatchGrad()) == hash(BatchGrad())
    weights = torch.ones(3)
    one, other = WeightedSum(weights), WeightedSum(weights)
    assert one != other and len({one, other}) == 2


@dataclass(frozen=True)
class Cosine(Quantity):
    """Cosine of each gradient with a direction."""

    direction: float
    name: ClassVar[str] = "cosine"

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        direction = torch.full(grad.shape, self.direction, dtype=grad.dtype)
        return grad.dot(direction) / (grad.squared_norm().sqrt() * direction.norm())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_users_quantity_works_on_every_structure(structure: str) -> None:
    grad = structures(5)[structure]
    flat = grad.dense().flatten(1)
    right = torch.nn.functional.cosine_similarity(flat, torch.full_like(flat, 2.0))
    torch.testing.assert_close(Cosine(2.0).reduce(grad), right)


def test_a_quantity_without_reduce_cannot_be_made() -> None:
    class Unfinished(Quantity):
        name = "unfinished"

    with pytest.raises(TypeError, match="reduce"):
        Unfinished()
