"""The evaluations that a plan chooses from: every one is tiled, none forms the product of one group with another.

Operands are ``left [N, G, P, T]`` and ``right [N, G, D, T]``, a tensor or patches that are not yet unfolded, both in
the dtype to compute in. A tile bounds how many samples, output rows (``p``) and second positions (``s``) are held at
once. Samples are only ever independent rows, columns or batches of a product, so that a non-finite one stays alone.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradbatch.plans.convolutions import STRIPS, Patches, correlate_sum
from gradbatch.plans.costs import contract
from gradbatch.plans.slabs import (
    Operand,
    Tile,
    columns,
    cut,
    joined,
    part,
    shape_of,
    slabs,
    spans,
    unstripped,
)

_LONG_ROW, _PIECE = 4096, 1024


def summed(left: Tensor, right: Operand, tile: Tile, native: bool) -> Tensor:
    """Sum over samples, ``[G, P, D]``."""
    if native and isinstance(right, Patches):
        return correlate_sum(left, right)
    out = left.new_zeros(shape_of(left, right)[1:])
    for start, stop in spans(left.shape[0], min(tile.samples, tile.unfold)):
        out += summed_product(left[start:stop], columns(part(right, start, stop)))
    return out


def summed_product(left: Tensor, right: Tensor) -> Tensor:
    """Contract samples and positions, ``[G, P, D]``; row-major like the parameter, as an einsum's result may not be."""
    rows = left.permute(1, 2, 0, 3).flatten(2)
    return torch.bmm(rows, right.permute(1, 0, 3, 2).flatten(1, 2))


def weighted_dense(left: Tensor, right: Operand, weights: Tensor, tile: Tile, method: str) -> Tensor:
    """Weighted sums, ``[K, G, P, D]``, of materialised gradients."""
    out = cut(left.new_zeros(len(weights), *shape_of(left, right)[1:]), right, method)
    for samples, rows, strip, block in slabs(left, right, tile, method):
        out[strip][:, :, rows] += torch.tensordot(weights[:, samples], block, 1)
    return joined(out, right, method)


def squared_norm_dense(left: Tensor, right: Operand, tile: Tile, method: str) -> Tensor:
    """Squared norms, ``[N]``, of materialised gradients."""
    out = left.new_zeros(left.shape[0])
    for samples, _, _, block in slabs(left, right, tile, method):
        out[samples] += squared_norms(block)
    return out


def inner_ghost(left: Tensor, right: Operand, left2: Tensor, right2: Operand, tile: Tile) -> Tensor:
    """Inner products, ``[N]``, without materialised gradients: positions against positions.

    References:
        Efficient Per-Example Gradient Computations (Goodfellow, 2015), https://arxiv.org/abs/1510.01799
    """
    out = left.new_zeros(left.shape[0])
    same = right is right2
    for start, stop in spans(left.shape[0], min(tile.samples, tile.unfold)):
        rights = columns(part(right, start, stop))
        rights2 = rights if same else columns(part(right2, start, stop))
        for first, last in spans(left2.shape[3], tile.positions):
            lefts = torch.matmul(left[start:stop].mT, left2[start:stop, ..., first:last])
            lefts *= torch.matmul(rights.mT, rights2[..., first:last])
            out[start:stop] += lefts.sum((1, 2, 3))
    return out


def squared_norm_ghost(
    left: Tensor, right: Operand, tile: Tile, products_of_left: Callable[[], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Squared norms, ``[N]``, without materialised gradients, and the estimate of :func:`rounding`, ``[N]``.

    Args:
        left, right, tile: the operands, and how much of them is held at once.
        products_of_left: gives the products of its positions, ``[N, G, T, T]``.
    """
    samples, _, _, positions = left.shape
    if positions == 1:  # the norm of an outer product is the product of the norms, and cancels with nothing
        squares = left.square().sum((2, 3)) * columns(right).square().sum((2, 3))
        norms = squares.sum(1) if squares.shape[1] > 1 else squares.flatten()
        return norms, norms
    if tile.positions < positions:
        return inner_ghost(left, right, left, right, tile), rounding(left, right, tile)
    norms, size = left.new_zeros(samples), left.new_zeros(samples)
    for start, stop in spans(samples, min(tile.samples, tile.unfold)):
        rights = columns(part(right, start, stop))
        products = torch.matmul(rights.mT, rights)
        if products_of_left is not None and stop - start == samples:
            products *= products_of_left()
        else:
            products *= torch.matmul(left[start:stop].mT, left[start:stop])
        norms[start:stop] = products.sum((1, 2, 3))
        size[start:stop] = noise(products.diagonal(dim1=2, dim2=3).clamp_min(0).sqrt())
    return norms, size


def squared_norms(block: Tensor) -> Tensor:
    """Squared norm of each row, ``[n, *]`` to ``[n]``, in one pass without a temporary.

    By pieces of a row: a long one would be added up term by term, and lose four digits to rounding.
    """
    rows = block.flatten(1)
    if rows.shape[1] <= _PIECE:
        short: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return short.square_()
    whole = rows.shape[1] // _PIECE * _PIECE
    pieces = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _PIECE)), dim=2)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1)
    norms: Tensor = pieces.square().sum(1) + rest.square()
    return norms


def add_squares(out: Tensor, block: Tensor) -> None:
    """Add the squares of all rows, ``out[*] += sum_n block[n, *] ** 2``."""
    if _is_long(block):
        for row in block:  # a temporary of squares would cost more than the calls
            out.addcmul_(row, row)
    else:
        out += block.square().sum(0)


def _is_long(block: Tensor) -> bool:
    """Whether a sample is long enough to be handled by itself."""
    return block.device.type == "cpu" and block[:1].numel() > _LONG_ROW


def inner_dense(
    left: Tensor, right: Operand, left2: Tensor, right2: Operand, tile: Tile, methods: tuple[str, str]
) -> Tensor:
    """Inner products, ``[N]``, of materialised gradients."""
    out = left.new_zeros(left.shape[0])
    first, second = (unstripped(method) for method in methods)
    pairs = zip(slabs(left, right, tile, first), slabs(left2, right2, tile, second), strict=True)
    for (samples, *_, block), (*_, block2) in pairs:
        out[samples] += (block * block2).sum((1, 2, 3))
    return out


def gram_ghost(left: Tensor, right: Operand, left2: Tensor, right2: Operand, tile: Tile) -> Tensor:
    """Inner products of all pairs, ``[N, M]``, without materialised gradients."""
    out = left.new_zeros(left.shape[0], left2.shape[0])
    same = left is left2 and right is right2
    step = min(tile.samples, tile.unfold)
    for start, stop in spans(left.shape[0], step):
        rights = columns(part(right, start, stop))
        for start2, stop2 in spans(left2.shape[0], step):
            if same and stop2 <= start:
                continue
            rights2 = rights if same and start2 == start else columns(part(right2, start2, stop2))
            for first, last in spans(left2.shape[3], tile.positions):
                lefts = _all_positions(left[start:stop], left2[start2:stop2, ..., first:last])
                products = lefts * _all_positions(rights, rights2[..., first:last])
                out[start:stop, start2:stop2] += products.sum((0, 2, 4))
    return mirrored(out) if same else out


def _all_positions(first: Tensor, second: Tensor) -> Tensor:
    """Inner products over channels of all positions of all samples, ``[G, n, T, m, S]``."""
    groups, inner = first.shape[1:3]
    rows = first.permute(1, 0, 3, 2).reshape(groups, first.shape[0] * first.shape[3], inner)
    cols = second.permute(1, 2, 0, 3).reshape(groups, inner, second.shape[0] * second.shape[3])
    product = torch.bmm(rows, cols)
    return product.reshape(groups, first.shape[0], first.shape[3], second.shape[0], second.shape[3])


def gram_dense(
    left: Tensor, right: Operand, left2: Tensor, right2: Operand, tile: Tile, methods: tuple[str, str]
) -> Tensor:
    """Inner products of all pairs, ``[N, M]``, of materialised gradients, a slab of output rows at a time."""
    out = left.new_zeros(left.shape[0], left2.shape[0])
    same = left is left2 and right is right2
    if same and tile.samples >= len(left) and (methods[0] not in STRIPS or tile.unfold >= len(left)):
        for *_, block in slabs(left, right, tile, methods[0]):
            flat = block.reshape(len(block), math.prod(block.shape[1:]))
            out += flat @ flat.mT
        return mirrored(out)
    first, second = (unstripped(method) for method in methods)
    for top, bottom in spans(left.shape[2], tile.rows):
        lefts, lefts2 = left[:, :, top:bottom], left2[:, :, top:bottom]
        whole = tile._replace(rows=bottom - top)
        for samples, *_, block in slabs(lefts, right, whole, first):
            flat = block.reshape(len(block), math.prod(block.shape[1:]))
            for samples2, *_, block2 in slabs(lefts2, right2, whole, second):
                out[samples, samples2] += flat @ block2.reshape(len(block2), flat.shape[1]).mT
    return mirrored(out) if same else out


def mirrored(gram: Tensor) -> Tensor:
    """Make a square matrix exactly symmetric: what is below the diagonal is read from above it."""
    above = torch.ones(gram.shape, dtype=torch.bool, device=gram.device).triu()
    return torch.where(above, gram, gram.mT)


def sum_of_squares(left: Tensor, right: Operand, center: Tensor | None, tile: Tile, method: str) -> Tensor:
    """Sums over samples of squared differences from ``center [G, P, D]``, ``[G, P, D]``."""
    out = cut(left.new_zeros(shape_of(left, right)[1:]), right, method)
    centers = None if center is None else cut(center, right, method)
    for _, rows, strip, block in slabs(left, right, tile, method):
        add_squares(out[strip][:, rows], block if centers is None else block - centers[strip][:, rows])
    return joined(out, right, method)


def moments(left: Tensor, right: Operand, tile: Tile, method: str) -> tuple[Tensor, Tensor]:
    """Means over samples and sums of squared differences from them, ``[G, P, D]`` each, in one pass.

    References:
        Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (Chan, Golub and LeVeque, 1979)
    """
    means, squares = (cut(left.new_zeros(shape_of(left, right)[1:]), right, method) for _ in range(2))
    for samples, rows, strip, block in slabs(left, right, tile, method):
        _add_moments(means[strip][:, rows], squares[strip][:, rows], block, samples.start)
    return joined(means, right, method), joined(squares, right, method)


def _add_moments(mean: Tensor, squares: Tensor, block: Tensor, before: int) -> None:
    """Join ``block [n, *]``, which is overwritten, to the moments ``[*]`` of the samples before.

    What is joined is centered by its own mean, so that no digits are lost to a mean that is large.
    """
    if _is_long(block):  # sample by sample each number is read once
        for count, row in enumerate(block, before + 1):
            step = row.sub_(mean)
            mean.add_(step, alpha=1 / count)
            squares.addcmul_(step, step, value=(count - 1) / count)
    elif len(block):
        count = before + len(block)
        center = block.mean(0)
        add_squares(squares, block.sub_(center))
        step = center.sub_(mean)
        mean.add_(step, alpha=len(block) / count)
        squares.addcmul_(step, step, value=len(block) * before / count)


def project_contract(left: Tensor, right: Operand, directions: Tensor, tile: Tile) -> Tensor:
    """Inner products with ``directions [K, G, P, D]``, ``[N, K]``, without materialised gradients."""
    out = left.new_zeros(left.shape[0], len(directions))
    for start, stop in spans(left.shape[0], min(tile.samples, tile.unfold)):
        out[start:stop] = contract("project", left[start:stop], columns(part(right, start, stop)), directions)
    return out


def project_dense(left: Tensor, right: Operand, directions: Tensor, tile: Tile, method: str) -> Tensor:
    """Inner products with ``directions [K, G, P, D]``, ``[N, K]``, of materialised gradients."""
    out = left.new_zeros(left.shape[0], len(directions))
    directions = cut(directions, right, method)
    for samples, rows, strip, block in slabs(left, right, tile, method):
        out[samples] += torch.tensordot(block, directions[strip][:, :, rows].permute(1, 2, 3, 0), 3)
    return out


def rounding(left: Tensor, right: Operand, tile: Tile) -> Tensor:
    """Estimate how large the terms of a ghost norm are, ``[N]``: its rounding error in units of the last place.

    The terms are products of positions with positions. Their errors are independent as a rule, and then what counts is
    the sum of the squared norms of the outer products; the worst case, positions that repeat each other, is the square
    of the sum of their norms. The estimate takes the first, and the second at a discount.
    """
    out = left.new_zeros(left.shape[0])
    for start, stop in spans(left.shape[0], min(tile.samples, tile.unfold)):
        lefts = torch.linalg.vector_norm(left[start:stop], dim=2)
        out[start:stop] = noise(lefts * torch.linalg.vector_norm(columns(part(right, start, stop)), dim=2))
    return out


def noise(norms: Tensor) -> Tensor:
    """The estimate of :func:`rounding` from the norms of the terms, ``[n, G, T]``; ``[n]``."""
    return torch.maximum(norms.square().sum(-1), norms.sum(-1).square() / 32).sum(1)


def cancelled(noise: Tensor, squared_norm: Tensor) -> Tensor:
    """Where a ghost norm is not to be trusted, ``[N]``: its terms are much larger than it, or it is not finite.

    That includes every norm that rounding has taken below zero.
    """
    return ~(noise <= _limit(squared_norm)) | ~squared_norm.isfinite()


def is_trusted(noise: Tensor, squared_norm: Tensor) -> bool:
    """Whether :func:`cancelled` is true of no ghost norm, as is the rule; may say no where all are huge."""
    if not math.isfinite(squared_norm.sum()):
        return False
    return noise is squared_norm or bool((noise <= _limit(squared_norm)).all())


def _limit(squared_norm: Tensor) -> Tensor:
    return squared_norm * (3e3 if squared_norm.dtype == torch.float64 else 3e2)


def cancelled_samples(left: Tensor, right: Operand, norms: Tensor, tile: Tile) -> Tensor:
    """The samples of which :func:`cancelled` is true, by their positions."""
    exact = left.shape[3] < 2  # an outer product alone has nothing to cancel with
    return cancelled(norms if exact else rounding(left, right, tile), norms).nonzero()[:, 0]


def repaired(
    inner: Tensor, size: Tensor, norms: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor]
) -> Tensor:
    """Evaluate again those inner products, ``[N]``, that have lost their digits to cancellation.

    Args:
        inner: evaluated with terms of a ``size [N]`` that may be much larger.
        size: estimate of :func:`rounding`, for inner products: the geometric mean of both operands'.
        norms: the products of the norms of the samples at some positions; what an inner product is exact to.
        again: the inner products of the samples at some positions, evaluated without such terms.
    """
    # A small inner product is suspicious; only small norms convict it, and they are dear.
    index = cancelled(size, inner.abs()).nonzero()[:, 0]
    if len(index):
        index = index[cancelled(size[index], norms(index))]
    return inner.index_copy(0, index, again(index)) if len(index) else inner
