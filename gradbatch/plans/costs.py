"""What an evaluation costs: orders and operation counts by ``opt_einsum``, memory and traffic by the sizes.

An operation on ``left [N, G, P, T]`` and ``right [N, G, D, T]`` is one einsum. It is evaluated either from the
materialised gradients (positions are contracted first) or without them (channels first); the tables below write both
down, so that what a plan reports is the cost of what runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import opt_einsum
from torch import Tensor

from gradbatch.plans.convolutions import STRIPS

Path = tuple[tuple[int, ...], ...]

MATERIALISE = "ngpt,ngdt->ngpd"

# From materialised gradients: what is left to do with them.
FROM_DENSE: Mapping[str, str] = {
    "weighted_sum": "kn,ngpd->kgpd",
    "squared_norm": "ngpd,ngpd->n",
    "inner": "ngpd,ngpd->n",
    "gram": "ngpd,mgpd->nm",
    "sum_of_squares": "ngpd,ngpd->gpd",
    "moments": "ngpd,ngpd->gpd",
    "dot": "ngpd,gpd->n",
    "project": "ngpd,kgpd->nk",
}

# Without them: the einsum, and the pairwise orders that never form [N, G, P, D].
_GHOST: tuple[Path, ...] = (((0, 1), (0, 1), (0, 1)),)
_PROJECT: tuple[Path, ...] = (((0, 2), (0, 1)), ((1, 2), (0, 1)))
WITHOUT_DENSE: Mapping[str, tuple[str, tuple[Path, ...]]] = {
    "sum": ("ngpt,ngdt->gpd", (((0, 1),),)),
    "weighted_sum": ("kn,ngpt,ngdt->kgpd", (((0, 1), (0, 1)),)),
    "squared_norm": ("ngpt,ngps,ngdt,ngds->n", _GHOST),
    "inner": ("ngpt,ngps,ngdt,ngds->n", _GHOST),
    "gram": ("ngpt,mgps,ngdt,mgds->nm", _GHOST),
    "sum_of_squares": ("ngpt,ngdt->gpd", (((0, 1),),)),
    "moments": ("ngpt,ngdt->gpd", (((0, 1),),)),
    "dot": ("ngpt,ngdt,gpd->n", _PROJECT),
    "project": ("ngpt,ngdt,kgpd->nk", _PROJECT),
}

# An element that is written takes about as long as this many floating point operations; one that is read, as this many;
# and one that is written to memory that has to be fetched from the system first, page by page.
_FLOPS_WRITTEN, FLOPS_READ, FLOPS_FETCHED = 16, 4, 100


class Sizes(NamedTuple):
    """The sizes of an operation's operands, named by their einsum letters, and how they are stored.

    ``pair``: there is a second left and right; ``window``: elements of the window that patches, not unfolded yet, are
    read with, 0 where there are none; ``strips``: how many of them those can be cut into, and ``stripped`` the elements
    that are unfolded for that in a sample; ``cuda``: they are on a CUDA device; ``shared``: another parameter has the
    left one too.
    """

    n: int
    g: int
    p: int
    d: int
    t: int
    m: int
    s: int
    k: int
    itemsize: int
    pair: bool
    window: int
    strips: int
    stripped: int
    cuda: bool
    shared: bool = False

    def shapes(self, equation: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of the operands of an einsum."""
        terms = equation.split("->")[0].split(",")
        return tuple(tuple(int(getattr(self, letter)) for letter in term) for term in terms)


@dataclass(frozen=True)
class Cost:
    """What an evaluation needs.

    Args:
        flops: floating point operations.
        elements: of the temporaries of one sample (of one pair of samples, for a ghost Gram matrix).
        unfolded: elements of one sample's unfolded patches, where they are needed and do not exist yet.
        written: elements written in all.
    """

    flops: int
    elements: int
    unfolded: int
    written: int

    @property
    def time(self) -> int:
        """Time, in floating point operations."""
        return self.flops + _FLOPS_WRITTEN * self.written


@lru_cache(maxsize=4096)
def order(equation: str, paths: tuple[Path, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[Path, int]:
    """Pick the cheapest of some pairwise contraction orders; returns it with its operation count."""
    counted = []
    for path in paths:
        _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=list(path))
        counted.append((int(info.opt_cost), path))
    flops, best = min(counted)
    return best, flops


@lru_cache(maxsize=4096)
def expression(equation: str, path: Path, shapes: tuple[tuple[int, ...], ...]) -> Callable[..., Tensor]:
    """Compile an einsum with a given order; cached by shape."""
    compiled: Callable[..., Tensor] = opt_einsum.contract_expression(equation, *shapes, optimize=list(path))
    return compiled


def contract(operation: str, *operands: Tensor) -> Tensor:
    """Evaluate an operation without materialised gradients, in its cheapest order."""
    equation, paths = WITHOUT_DENSE[operation]
    shapes = tuple(tuple(operand.shape) for operand in operands)
    path, _ = order(equation, paths, shapes)
    return expression(equation, path, shapes)(*operands)


def cost_without_dense(operation: str, sizes: Sizes) -> Cost:
    """Cost of the order that contracts channels first."""
    equation, paths = WITHOUT_DENSE[operation]
    path, flops = order(equation, paths, sizes.shapes(equation))
    unfolded = sizes.g * sizes.d * sizes.t if sizes.window else 0
    times = sizes.n
    if operation in ("squared_norm", "inner", "gram"):
        elements = 3 * sizes.g * sizes.t * sizes.s  # two Gram matrices of positions, and their product
        times *= sizes.m if operation == "gram" else 1
        if operation == "squared_norm" and sizes.shared:
            flops -= sizes.n * sizes.g * sizes.t * sizes.s * sizes.p  # half of the products of left positions
    elif operation in ("dot", "project"):
        elements = sizes.g * sizes.t * (sizes.d if path[0] == (0, 2) else sizes.p) * sizes.k
    else:
        elements = sizes.g * sizes.t * sizes.p
        times *= sizes.k
    return Cost(flops, elements, unfolded, times * elements + sizes.n * unfolded)


def cost_from_dense(operation: str, sizes: Sizes, kernel: str) -> Cost:
    """Cost of materialising the gradients first, with one of the kernels that do that."""
    elements = sizes.g * sizes.p * sizes.d
    unfolded = sizes.g * sizes.d * sizes.t if kernel == "unfold" else 0
    if kernel in STRIPS:
        unfolded = sizes.stripped
    flops = order(MATERIALISE, (((0, 1),),), sizes.shapes(MATERIALISE))[1]
    samples = sizes.n
    if sizes.pair:
        second = MATERIALISE.replace("n", "m").replace("t", "s")
        flops += order(second, (((0, 1),),), sizes.shapes(second))[1]
        elements, samples = 2 * elements, (sizes.n + sizes.m + 1) // 2
    if operation in FROM_DENSE:
        equation = FROM_DENSE[operation]
        flops += order(equation, (((0, 1),),), sizes.shapes(equation))[1]
    held = elements // sizes.strips if kernel in STRIPS else elements
    return Cost(flops, held, unfolded, samples * (elements + unfolded))
