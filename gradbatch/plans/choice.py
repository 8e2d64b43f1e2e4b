"""The choice of a plan: a cost model over the sizes of the operands, and the tiles that fit a byte budget."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from gradbatch.errors import UsageError
from gradbatch.plans.convolutions import CORRELATE_METHODS
from gradbatch.plans.costs import Cost, Sizes, cost_from_dense, cost_without_dense
from gradbatch.plans.slabs import Tile

PLANS: Mapping[str, tuple[str, ...]] = {
    "dense": ("einsum", *CORRELATE_METHODS),
    "sum": ("einsum", "native"),
    "weighted_sum": ("scaled", "dense"),
    "squared_norm": ("ghost", "dense"),
    "inner": ("ghost", "dense"),
    "gram": ("ghost", "dense"),
    "sum_of_squares": ("squares", "dense"),
    "moments": ("squares", "dense"),
    "dot": ("contract", "dense"),
    "project": ("contract", "dense"),
}
"""Every operation and the names of the plans that evaluate it."""

KEEP = "keep"
"""Plans like ``"dense"``, but in whichever order of elements is the fastest."""

# Measured on a CPU, one thread (benchmarks/RESULTS.md). The native kernel is the fastest way to the gradients of a
# convolution without groups where many positions of a wide window are added up; of one with groups, where these have
# one channel or whole vectors of channels.
_MANY_POSITIONS, _NARROW, _VECTOR = 512, 64, 8

# Strips are a dozen calls more than patches, which take longer than to copy so many elements.
_FEW = 2**16

# Temporaries up to this size are carved out of memory that the C library keeps on a CPU; larger ones are fetched from
# the system page by page, which takes longer than the arithmetic. They stay in a cache besides.
RECYCLED = 8 * 2**20


@dataclass(frozen=True)
class Plan:
    """How one operation is evaluated.

    Args:
        operation: a key of :data:`PLANS`.
        name: the plan, one of ``PLANS[operation]``.
        flops: floating point operations.
        bytes: peak size of the temporaries.
        tile: how much of the operands is held at once.
        kernel: how gradients are materialised where the plan does that, a name of ``PLANS["dense"]``.
        time: estimate of the cost model, in floating point operations.
    """

    operation: str
    name: str
    flops: int
    bytes: int
    tile: Tile
    kernel: str
    time: int

    def __repr__(self) -> str:
        kernel = f" by {self.kernel}" if self.name == "dense" else ""
        samples, rows, positions, _ = self.tile
        return (
            f"Plan({self.operation}: {self.name}{kernel}, {self.flops / 1e6:.3g} MFLOP, {self.bytes / 2**20:.3g} MiB, "
            f"tiles of {samples} samples, {rows} rows, {positions} positions)"
        )


def check_operation(operation: str) -> None:
    """Raise :class:`UsageError` unless ``operation`` is a key of :data:`PLANS`."""
    if operation not in PLANS:
        raise UsageError(f"there is no operation {operation!r} to plan; there are {', '.join(PLANS)}.")


def check_force(force: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` unless ``force`` maps operations to plans that they have."""
    for operation, name in force.items():
        check_operation(operation)
        if name not in PLANS[operation]:
            raise UsageError(f"{operation!r} has no plan {name!r}; it has {', '.join(PLANS[operation])}.")


@lru_cache(maxsize=4096)
def candidates(
    operation: str, sizes: Sizes, budget: int, force: tuple[tuple[str, str], ...]
) -> tuple[Plan, ...]:
    """Every plan that can evaluate an operation, the fastest by the cost model first; the forced one alone."""
    forced = dict(force)
    # A Gram matrix needs all samples at once, or everything anew for each pair of tiles, which costs more than memory.
    room = budget if sizes.cuda else min(budget, 2 * RECYCLED if operation == "gram" else RECYCLED)
    kernels = _kernels(operation, sizes, forced.get("dense"), room // sizes.itemsize)
    costs: dict[tuple[str, str], Cost] = {}
    if operation in ("dense", KEEP):
        costs = {(kernel, kernel): cost_from_dense(operation, sizes, kernel) for kernel in kernels}
    elif operation == "sum":
        names = ("native", "einsum") if sizes.window else ("einsum",)
        costs = {(name, kernels[0]): cost_without_dense(operation, sizes) for name in names}
    else:
        direct = PLANS[operation][0]
        if direct != "squares" or sizes.t == 1:
            costs[direct, kernels[0]] = cost_without_dense(operation, sizes)
        costs |= {("dense", kernel): cost_from_dense(operation, sizes, kernel) for kernel in kernels}
    name = forced.get(operation, "")
    if any(name == other for other, _ in costs):
        costs = {plan: cost for plan, cost in costs.items() if plan[0] == name}
    # Kernels are in the order of preference; their costs differ by what is unfolded alone.
    times = {plan: (cost.time if plan[1] == kernels[0] else math.inf) for plan, cost in costs.items()}
    return tuple(
        _plan(operation, *plan, costs[plan], sizes, room // sizes.itemsize)
        for plan in sorted(costs, key=times.__getitem__)
    )


def _plan(operation: str, name: str, kernel: str, cost: Cost, sizes: Sizes, room: int) -> Plan:
    tile, held = _tile(operation, name, cost, sizes, room)
    return Plan(operation, name, cost.flops, held * sizes.itemsize, tile, kernel, cost.time)


def _kernels(operation: str, sizes: Sizes, forced: str | None, room: int) -> tuple[str, ...]:
    """How gradients can be materialised, the best guess first."""
    if not sizes.window:
        return ("einsum",)
    if forced in CORRELATE_METHODS:
        return (str(forced),)
    channels, first = sizes.d // sizes.window, "unfold"
    if not sizes.cuda and sizes.window > 1:
        wide = sizes.t > _MANY_POSITIONS and sizes.d > _NARROW
        vectors = sizes.p == channels == 1 or not (sizes.p % _VECTOR or channels % _VECTOR)
        if wide if sizes.g == 1 else vectors:
            first = "grouped"
        elif _strips_pay(operation, sizes, room):
            first = "strips_last" if sizes.g == 1 else "strips"
    return (first, *(method for method in CORRELATE_METHODS if method != first))


def _strips_pay(operation: str, sizes: Sizes, room: int) -> bool:
    """Whether strips save more than they cost: the copying of overlaps, against more and smaller products."""
    if sizes.n * sizes.g * sizes.d * sizes.t < _FEW or 2 * sizes.stripped > sizes.g * sizes.d * sizes.t:
        return False
    if operation == "dense":  # they have to be put together
        return 2 * sizes.p * sizes.strips <= sizes.t
    if operation in ("inner", "gram") and (sizes.pair or 2 * sizes.n * sizes.stripped > room):
        return False
    return 4 * sizes.t >= sizes.p


def _tile(operation: str, name: str, cost: Cost, sizes: Sizes, room: int) -> tuple[Tile, int]:
    """Fit the temporaries into ``room`` elements: fewer samples, then fewer output rows or second positions.

    Returns the tile and the elements that it holds. One row, or one second position, of one sample is never cut.
    """
    samples, rows, positions = max(sizes.n, 1), max(sizes.p, 1), max(sizes.s, 1)
    unfold = samples
    if cost.unfolded:
        room = room // 2
        unfold = min(samples, max(1, room // cost.unfolded))
    elements = max(1, cost.elements)
    if operation in ("dense", KEEP):
        return Tile(samples, rows, positions, unfold), unfold * cost.unfolded
    if operation == "gram":
        both = max(samples, sizes.m)
        if name == "ghost":
            block = min(both, max(1, math.isqrt(room // elements)))
            cut = _fit(positions, elements, room) if block == 1 else positions
            return Tile(block, rows, cut, unfold), block**2 * elements * cut // positions
        # A pair of tiles of samples is materialised anew for each other tile, so here the output rows are cut first.
        cut = _fit(rows, elements * both, room)
        block = both if cut * both * elements // rows <= room else max(1, room * rows // elements)
        return Tile(min(block, both), cut, positions, unfold), block * elements * cut // rows
    block = min(samples, room // elements)
    if block >= 1:
        held = block * elements + min(unfold, block) * cost.unfolded
        return Tile(block, rows, positions, unfold), held
    rows_cut, positions_cut = _fit(rows, elements, room), _fit(positions, elements, room)
    part = rows_cut / rows if name == "dense" else positions_cut / positions
    return Tile(1, rows_cut, positions_cut, unfold), int(elements * part) + cost.unfolded


def _fit(length: int, elements: int, room: int) -> int:
    """How much of an axis of some ``length`` fits into the room, if all of it has so many ``elements``; at least 1."""
    return min(length, max(1, length * room // elements))
