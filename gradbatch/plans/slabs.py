"""Gradients materialised a piece at a time: samples, output rows, and strips of a convolution's window.

Operands are ``left [N, G, P, T]`` and ``right [N, G, D, T]``, a tensor or patches that are not yet unfolded.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gradbatch.plans.convolutions import STRIPS, Patches, correlate, from_strips, in_strips

Operand = Tensor | Patches
AnyOperand = TypeVar("AnyOperand", Tensor, Patches, Operand)


class Tile(NamedTuple):
    """How much is held at once: samples, output rows of the gradient, second positions, samples unfolded."""

    samples: int
    rows: int
    positions: int
    unfold: int


class Slab(NamedTuple):
    """Some of the gradients: of which samples, output rows and strip, and ``[n, G, p, D / strips]``."""

    samples: slice
    rows: slice
    strip: int
    block: Tensor


def spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut ``range(total)`` into spans of at most ``step``; an empty range is one empty span."""
    for start in range(0, max(total, 1), max(step, 1)):
        yield start, min(start + max(step, 1), total)


def part(operand: AnyOperand, start: int, stop: int) -> AnyOperand:
    """View the samples from ``start`` to ``stop``."""
    if isinstance(operand, Tensor):
        return operand[start:stop]
    rows = operand.rows
    source = operand.source[start * rows : stop * rows]
    return Patches(source, operand.window, operand.groups, operand.positions, rows)


def columns(right: Operand) -> Tensor:
    """The right operand as a tensor, ``[N, G, D, T]``."""
    return right if isinstance(right, Tensor) else right.unfold()


def shape_of(left: Tensor, right: Operand) -> tuple[int, int, int, int]:
    """``(N, G, P, D)``."""
    return left.shape[0], left.shape[1], left.shape[2], right.shape[2]


def strips_of(right: Operand, method: str) -> list[Tensor] | list[Operand]:
    """The right operand, or the strips that a method cuts it into."""
    if isinstance(right, Patches) and method in STRIPS:
        return list(right.strips(STRIPS[method]))
    return [right]


def unstripped(method: str) -> str:
    """A method that gives whole gradients: what is cut into strips can only be put next to the like."""
    return "unfold" if method in STRIPS else method


def cut(tensor: Tensor, right: Operand, method: str) -> Tensor:
    """What belongs to each strip of ``tensor [*, D]``, ``[strips, *, D / strips]``."""
    if isinstance(right, Patches) and method in STRIPS:
        return in_strips(tensor, right, method).flatten(-2)
    return tensor[None]


def joined(strips: Tensor, right: Operand, method: str) -> Tensor:
    """Put together what :func:`cut` has cut."""
    return (
        from_strips(strips, right, method) if isinstance(right, Patches) and method in STRIPS else strips[0]
    )


def slab(left: Tensor, right: Operand, tile: Tile, method: str) -> Tensor:
    """Materialise the gradients of some samples and output rows, ``[n, G, p, D]``.

    Unfolded patches may be far larger than the gradients, so they have a tile of their own.
    """
    if isinstance(right, Tensor):
        return products(left, right)
    if method in STRIPS or (method == "unfold" and tile.unfold < len(left)):
        return fill(left.new_empty(shape_of(left, right)), left, right, len(left), tile, method)
    return correlate(left, right, method)


def products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Sums over positions of outer products, ``[N, G, P, D]``; of one position, what bounds them is to write them."""
    if left.shape[3] == 1:
        return torch.mul(left, right.mT, out=out)
    if left.shape[1] == 1 and out is None:  # what matmul comes to as well, in many calls more
        return torch.bmm(left[:, 0], right[:, 0].mT).unsqueeze(1)
    return torch.matmul(left, right.mT, out=out)


def fill(out: Tensor, left: Tensor, right: Operand, samples: int, tile: Tile, method: str) -> Tensor:
    """Write the gradients to ``out [N, G, P, D]``; so many samples at a time where a kernel allocates its result."""
    product = isinstance(right, Tensor) or method == "unfold"
    step = min(tile.unfold, len(left)) if product or method in STRIPS else samples
    for start, stop in spans(len(left), step):
        chosen = part(right, start, stop)
        if product:
            products(left[start:stop], columns(chosen), out[start:stop])
        elif isinstance(chosen, Patches) and method in STRIPS:
            places = in_strips(out[start:stop], chosen, method)
            for place, strip in zip(places, chosen.strips(STRIPS[method]), strict=True):
                place.copy_(torch.matmul(left[start:stop], strip.mT).view(place.shape))
        else:
            out[start:stop] = slab(left[start:stop], chosen, tile, method)
    return out


def stripped(left: Tensor, right: Operand, tile: Tile, method: str) -> list[Tensor]:
    """The gradients as strips with two axes of elements, ``[N, G, P, *]`` each; ``[N, G, P, D]`` by other methods."""
    if not (isinstance(right, Patches) and method in STRIPS):
        return [slab(left, right, tile, method)]
    shape = in_strips(left.new_empty(1).expand(shape_of(left, right)), right, method).shape
    strips = [left.new_empty(shape[1:]) for _ in range(shape[0])]
    for start, stop in spans(len(left), min(tile.unfold, len(left))):
        operands = part(right, start, stop).strips(STRIPS[method])
        for strip, operand in zip(strips, operands, strict=True):
            torch.matmul(left[start:stop], operand.mT, out=strip[start:stop].flatten(-2))
    return strips


def slabs(left: Tensor, right: Operand, tile: Tile, method: str) -> Iterator[Slab]:
    """Materialise the gradients tile by tile."""
    step = min(tile.samples, tile.unfold) if method in STRIPS else tile.samples
    for start, stop in spans(left.shape[0], step):
        chosen = part(right, start, stop)
        if method == "unfold" and stop - start <= tile.unfold and tile.rows < left.shape[2]:
            chosen = columns(chosen)
        for i, strip in enumerate(strips_of(chosen, method)):
            for top, bottom in spans(left.shape[2], tile.rows):
                block = slab(left[start:stop, :, top:bottom], strip, tile, method)
                yield Slab(slice(start, stop), slice(top, bottom), i, block)
