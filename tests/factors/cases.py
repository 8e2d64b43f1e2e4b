"""Every structure of per-sample gradients, small, with its gradients worked out by plain loops in float64."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbatch.factors import Blocks, Concat, Dense, OuterProduct, Permuted, PerSampleGrad, RowScatter, Sum
from gradbatch.plans.convolutions import Patches, Window

SHAPE = (6, 4)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4}


class Case(NamedTuple):
    """A structure and its gradients, ``[N, *SHAPE]`` float64."""

    grad: PerSampleGrad
    expected: Tensor


class Maker(NamedTuple):
    """Draws operands of one dtype, with a number of its choice in some sample."""

    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")
    poison: float | None = None

    def draw(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, dtype=torch.float64).to(self.dtype)
        if self.poison is not None:
            values[1] = self.poison
        return values.to(self.device)


def dense(n: int, make: Maker) -> Case:
    values = make.draw(n, *SHAPE)
    return Case(Dense(values), values.double())


def dense_strided(n: int, make: Maker) -> Case:
    values = make.draw(n, *reversed(SHAPE)).mT
    return Case(Dense(values), values.double())


def dense_expanded(n: int, make: Maker) -> Case:
    values = torch.zeros((), dtype=make.dtype, device=make.device).expand(n, *SHAPE)
    return Case(Dense(values), values.double())


def _outer(left: Tensor, right: Tensor) -> Case:
    expected = torch.zeros(len(left), left.shape[1], left.shape[2], right.shape[2], dtype=torch.float64)
    for t in range(left.shape[3]):
        expected += left[..., t].double().cpu()[..., None] * right[..., t].double().cpu()[..., None, :]
    return Case(OuterProduct(left, right, SHAPE), expected.reshape(-1, *SHAPE).to(left.device))


def outer(n: int, make: Maker, positions: int = 5) -> Case:
    return _outer(make.draw(n, 1, 6, positions), make.draw(n, 1, 4, positions))


def outer_of_one_position(n: int, make: Maker) -> Case:
    return outer(n, make, positions=1)


def outer_of_no_position(n: int, make: Maker) -> Case:
    return outer(n, make, positions=0)


def outer_of_many_positions(n: int, make: Maker) -> Case:
    return outer(n, make, positions=40)


def outer_grouped_strided(n: int, make: Maker) -> Case:
    left, right = make.draw(n, 7, 2, 3), make.draw(n, 4, 7, 2)
    return _outer(left.permute(0, 2, 3, 1), right.permute(0, 3, 1, 2))


def outer_of_other_rows(n: int, make: Maker) -> Case:
    """The same number of elements, but a row of the outer product is half a row of the parameter."""
    return _outer(make.draw(n, 1, 12, 3), make.draw(n, 1, 2, 3))


def outer_depthwise(n: int, make: Maker) -> Case:
    return _outer(make.draw(n, 6, 1, 9), make.draw(n, 6, 4, 9))


def patches(n: int, make: Maker, rows: int = 1) -> Case:
    """Two groups, a kernel of 2 with stride 2 and padding; the last window is not used."""
    window = Window(kernel=(2,), stride=(2,), padding=(1,), dilation=(1,))
    source, positions = make.draw(n, rows, 4, 9), 4
    left = make.draw(n, 2, 3, rows * positions)
    padded = F.pad(source.double(), (1, 1))
    right = torch.zeros(n, 2, 4, rows * positions, dtype=torch.float64, device=make.device)
    for row in range(rows):
        for t in range(positions):
            read = padded[:, row, :, 2 * t : 2 * t + 2]
            right[..., row * positions + t] = read.reshape(n, 2, 4)
    lazy = Patches(source.flatten(0, 1), window, groups=2, positions=(positions,), rows=rows)
    return Case(OuterProduct(left, lazy, SHAPE), _outer(left, right).expected)


def patches_of_rows(n: int, make: Maker) -> Case:
    return patches(n, make, rows=2)


def scatter(n: int, make: Maker, length: int = 7) -> Case:
    """Rows repeat, and -1 hides values that are not even finite."""
    ids = torch.randint(-1, SHAPE[0], (n, length))
    values = make.draw(n, length, SHAPE[1])
    if n > 1 and length > 1:
        ids[1, :2] = torch.tensor([3, -1])
    values[ids.to(make.device) < 0] = float("nan")
    expected = torch.zeros(n, *SHAPE, dtype=torch.float64)
    for i in range(n):
        for t in range(length):
            if ids[i, t] >= 0:
                expected[i, ids[i, t]] += values[i, t].double().cpu()
    return Case(RowScatter(ids.to(make.device), values, SHAPE), expected.to(make.device))


def scatter_of_nothing(n: int, make: Maker) -> Case:
    return scatter(n, make, length=0)


def mixed_sum(n: int, make: Maker) -> Case:
    return _sum([dense(n, make), outer(n, make), scatter(n, make)])


def sum_of_outer_products(n: int, make: Maker) -> Case:
    return _sum([outer(n, make), outer_grouped_strided(n, make), patches(n, make)])


def sum_with_micro_batches(n: int, make: Maker) -> Case:
    return _sum([micro_batches(n, make), scatter(n, make), patches_of_rows(n, make)])


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("npt,ndt->npd", left[:, 0].double(), right[:, 0].double())


def blocks(n: int, make: Maker) -> Case:
    """Of different structure, out of order, one empty; the last row belongs to none."""
    left, right, values = make.draw(n, 1, 3, 2), make.draw(n, 1, 4, 2), make.draw(n, 2, 4)
    outer, rows = OuterProduct(left, right, (3, 4)), Dense(values)
    expected = torch.zeros(n, *SHAPE, dtype=torch.float64, device=make.device)
    expected[:, :3] = _product(left, right)
    expected[:, 3:5] = values.double()
    return Case(Blocks({12: rows, 0: outer, 24: Dense(values[:, :0])}, SHAPE), expected)


def blocks_of_other_places(n: int, make: Maker) -> Case:
    """The first lies as in the other case; the others, blocks of blocks, begin and end within a row."""
    first, values = make.draw(n, 3, 4), make.draw(n, 4)
    ids, rows = torch.randint(-1, 2, (n, 3)).to(make.device), make.draw(n, 3, 2)
    table = RowScatter(ids, rows, (2, 2))
    inner = Blocks({5: table, 0: Dense(values)}, (11,))
    expected = torch.zeros(n, 24, dtype=torch.float64, device=make.device)
    expected[:, :12], expected[:, 13:17] = first.double().flatten(1), values.double()
    for i in range(n):
        for t in range(3):
            if ids[i, t] >= 0:
                start = 18 + 2 * int(ids[i, t])
                expected[i, start : start + 2] += rows[i, t].double()
    return Case(Blocks({13: inner, 0: Dense(first)}, SHAPE), expected.reshape(n, *SHAPE))


def permuted(n: int, make: Maker) -> Case:
    """In two blocks, as strips of a convolution's window are kept; the parameter has the axis of blocks last."""
    values, left, right = make.draw(n, 6, 2), make.draw(n, 1, 6, 3), make.draw(n, 1, 2, 3)
    second = OuterProduct(left, right, (6, 2))
    expected = torch.stack([values.double(), _product(left, right)], 3)
    return Case(
        Permuted(Blocks({0: Dense(values), 12: second}, (2, 6, 2)), (1, 2, 0), SHAPE), expected.flatten(2)
    )


def permuted_otherwise(n: int, make: Maker) -> Case:
    values = make.draw(n, 4, 6)
    return Case(Permuted(Dense(values), (1, 0), SHAPE), values.double().mT)


def sum_with_blocks(n: int, make: Maker) -> Case:
    return _sum([blocks(n, make), outer(n, make), blocks_of_other_places(n, make)])


def micro_batches(n: int, make: Maker) -> Case:
    cut = min(n, 2)
    clean = make._replace(poison=None)
    return _concat([scatter(cut, make if n > 1 else clean), outer(0, clean), outer(n - cut, clean)])


def micro_batches_of_sums(n: int, make: Maker) -> Case:
    cut = min(n, 2)
    clean = make._replace(poison=None)
    return _concat([mixed_sum(cut, make if n > 1 else clean), sum_of_outer_products(n - cut, clean)])


def _sum(cases: list[Case]) -> Case:
    return Case(Sum([case.grad for case in cases]), torch.stack([case.expected for case in cases]).sum(0))


def _concat(cases: list[Case]) -> Case:
    return Case(Concat([case.grad for case in cases]), torch.cat([case.expected for case in cases]))


STRUCTURES: dict[str, Callable[[int, Maker], Case]] = {
    make.__name__: make
    for make in (
        dense,
        dense_strided,
        dense_expanded,
        outer,
        outer_of_one_position,
        outer_of_no_position,
        outer_of_many_positions,
        outer_grouped_strided,
        outer_depthwise,
        outer_of_other_rows,
        patches,
        patches_of_rows,
        scatter,
        scatter_of_nothing,
        blocks,
        blocks_of_other_places,
        permuted,
        permuted_otherwise,
        sum_with_blocks,
        mixed_sum,
        sum_of_outer_products,
        sum_with_micro_batches,
        micro_batches,
        micro_batches_of_sums,
    )
}


class Arguments(NamedTuple):
    """Arguments of the operations, for ``n`` samples."""

    weights: Tensor
    several_weights: Tensor
    center: Tensor
    directions: Tensor

    @classmethod
    def draw(cls, n: int, dtype: torch.dtype, device: torch.device) -> "Arguments":
        shapes = ((n,), (3, n), SHAPE, (2, *SHAPE))
        return cls(*(torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes))


# What each operation is, once on a structure and once on its gradients X [N, 24], in float64.
def mean_of(gradients: Tensor) -> Tensor:
    """Over samples; zeros without any."""
    return gradients.sum(0) / max(1, len(gradients))


OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "dense": (lambda g, a: g.dense(), lambda x, a: x.reshape(-1, *SHAPE)),
    "sum": (lambda g, a: g.sum(), lambda x, a: x.sum(0).reshape(SHAPE)),
    "weighted_sum": (
        lambda g, a: g.weighted_sum(a.weights),
        lambda x, a: torch.einsum("n,nx->x", a.weights, x).reshape(SHAPE),
    ),
    "weighted_sums": (
        lambda g, a: g.weighted_sum(a.several_weights),
        lambda x, a: torch.einsum("kn,nx->kx", a.several_weights, x).reshape(-1, *SHAPE),
    ),
    "squared_norm": (lambda g, a: g.squared_norm(), lambda x, a: x.square().sum(1)),
    "gram": (lambda g, a: g.gram(), lambda x, a: torch.einsum("nx,mx->nm", x, x)),
    "sum_of_squares": (lambda g, a: g.sum_of_squares(), lambda x, a: x.square().sum(0).reshape(SHAPE)),
    "sum_of_centered_squares": (
        lambda g, a: g.sum_of_squares(a.center),
        lambda x, a: (x - a.center.flatten()).square().sum(0).reshape(SHAPE),
    ),
    "moments": (
        lambda g, a: torch.stack(g.moments()),
        lambda x, a: torch.stack([mean_of(x), (x - mean_of(x)).square().sum(0)]).reshape(2, *SHAPE),
    ),
    # Beside the squares, whose size says what is nothing: one sample's deviation is zero to rounding.
    "squared_deviations": (
        lambda g, a: torch.stack([g.sum_of_squares(), g.squared_deviations()]),
        lambda x, a: torch.stack([x.square().sum(0), (x - mean_of(x)).square().sum(0)]).reshape(2, *SHAPE),
    ),
    "dot": (lambda g, a: g.dot(a.center), lambda x, a: torch.einsum("nx,x->n", x, a.center.flatten())),
    "compact": (
        lambda g, a: torch.stack([g.compact().squared_norm(), g.compact().dot(g.compact().sum())]),
        lambda x, a: torch.stack([x.square().sum(1), torch.einsum("nx,mx->nm", x, x).sum(1)]),
    ),
    "project": (
        lambda g, a: g.project(a.directions),
        lambda x, a: torch.einsum("nx,kx->nk", x, a.directions.flatten(1)),
    ),
}
PER_SAMPLE = ("dense", "squared_norm", "dot", "project")


def flat(expected: Tensor) -> Tensor:
    """``[N, elements]``, also where there are no samples."""
    return expected.reshape(len(expected), SHAPE[0] * SHAPE[1])


def assert_right(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal to the tolerance of the operands' dtype, relative to the largest element; at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    assert actual.dtype == wide
    scale = float(expected.abs().amax()) if expected.numel() else 1.0
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * scale)
