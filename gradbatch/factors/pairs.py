"""What two structures do together: the one place that knows them all.

The tables at the end name the function of each pair; a pair that is in a table in neither order is materialised, some
samples at a time. Where the terms of a product can be much larger than their sum, the samples that lost their digits to
cancellation are found by an estimate and materialised after all.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradbatch.factors import row_scatter
from gradbatch.factors.base import PerSampleGrad
from gradbatch.factors.blocks import Blocks, matched
from gradbatch.factors.dense import Dense
from gradbatch.factors.outer_product import OuterProduct
from gradbatch.factors.permuted import Permuted
from gradbatch.factors.row_scatter import RowScatter
from gradbatch.factors.sums import Concat, Sum, sum_tensors
from gradbatch.plans.contractions import accumulation_dtype
from gradbatch.plans.convolutions import Patches
from gradbatch.plans.kernels import cancelled, mirrored, repaired
from gradbatch.plans.slabs import spans


def inner(left: PerSampleGrad, right: PerSampleGrad) -> Tensor:
    """Inner products of each sample's two gradients, ``[N]``; exact to rounding of the product of the norms."""
    value = inner_of_terms(left, right)
    if not _approximate(left, right):
        return value
    size = (left._noise() * right._noise()).sqrt()

    def norms(index: Tensor) -> Tensor:
        return (left.select(index)._squared_norm() * right.select(index)._squared_norm()).sqrt()

    def again(index: Tensor) -> Tensor:
        return _dense_inner(left.select(index), right.select(index))

    return repaired(value, size, norms, again)


def inner_of_terms(left: PerSampleGrad, right: PerSampleGrad) -> Tensor:
    """Inner products, ``[N]``; exact to rounding of the terms, which may be larger than the gradients."""
    if isinstance(left, Concat) or isinstance(right, Concat):
        return torch.cat([inner(a, b) for a, b in _aligned(left, right)])
    if isinstance(left, Sum) or isinstance(right, Sum):
        return sum_tensors([inner_of_terms(a, b) for a in _terms(left) for b in _terms(right)])
    evaluate = _INNER.get((type(left), type(right)))
    if evaluate is None and (swapped := _INNER.get((type(right), type(left)))):
        return swapped(right, left)
    return (evaluate or _dense_inner)(left, right)


def gram(left: PerSampleGrad, right: PerSampleGrad) -> Tensor:
    """Inner products of all pairs of samples, ``[N, M]``; exactly symmetric where ``right is left``."""
    value = _gram_of_terms(left, right)
    same = right is left
    if not _approximate(left, right):
        return mirrored(value) if same else value
    norms = left._squared_norm()
    for index, rows in _cancelled_rows(left, norms, right):
        value = value.index_copy(0, index, rows)
        value = value.index_copy(1, index, rows.mT) if same else value
    if same:
        return torch.diagonal_scatter(mirrored(value), norms)
    for index, rows in _cancelled_rows(right, right._squared_norm(), left):
        value = value.index_copy(1, index, rows.mT)
    return value


def _gram_of_terms(left: PerSampleGrad, right: PerSampleGrad) -> Tensor:
    """Inner products, ``[N, M]``; exact to rounding of the terms, which may be larger than the gradients."""
    if isinstance(left, Concat) or isinstance(right, Concat):
        return _gram_of_parts(left, right)
    if isinstance(left, Sum) or isinstance(right, Sum):
        same, terms = right is left, _terms(left)
        products = [
            (i, j, _gram_of_terms(a, b))
            for i, a in enumerate(terms)
            for j, b in enumerate(_terms(right))
            if i <= j or not same
        ]
        return sum_tensors([p + p.mT if same and i < j else p for i, j, p in products])
    evaluate = _GRAM.get((type(left), type(right)))
    if evaluate is None and (swapped := _GRAM.get((type(right), type(left)))):
        return swapped(right, left).mT
    if evaluate is None and isinstance(right, Dense) and not isinstance(left, Dense):
        return left._project(right.values)
    if evaluate is None and isinstance(left, Dense) and not isinstance(right, Dense):
        return right._project(left.values).mT
    return (evaluate or _dense_gram)(left, right)


def _gram_of_parts(left: PerSampleGrad, right: PerSampleGrad) -> Tensor:
    """Inner products, ``[N, M]``, block by block; with itself, half of the blocks."""
    dtype = accumulation_dtype(left.dtype, right.dtype)
    out = torch.zeros(left.num_samples, right.num_samples, dtype=dtype, device=left.device)
    for start, stop, part in _parts(left):
        for start2, stop2, part2 in _parts(right):
            if right is not left or start2 >= start:
                out[start:stop, start2:stop2] = gram(part, part2)
    return mirrored(out) if right is left else out


def _cancelled_rows(
    left: PerSampleGrad, norms: Tensor, right: PerSampleGrad
) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples of ``left`` whose terms cancel: their positions, and their inner products with ``right``, ``[n, M]``."""
    lost = cancelled(left._noise(), norms).nonzero()[:, 0]
    dtype = accumulation_dtype(left.dtype, right.dtype)
    for start, stop in spans(len(lost), left._step()) if len(lost) else ():
        index = lost[start:stop]
        yield index, right._project(left.select(index)._dense()).mT.to(dtype)


def add(left: PerSampleGrad, right: PerSampleGrad) -> PerSampleGrad:
    """Add the gradients of the same samples, in one structure where there is one, else as a :class:`Sum`."""
    if isinstance(left, Concat) or isinstance(right, Concat):
        return Concat([add(a, b) for a, b in _aligned(left, right)]).with_planner(left.planner)
    terms = list(_terms(left))
    for new in _terms(right):
        for i, term in enumerate(terms):
            merged = _merge(term, new)
            if merged is not None:
                terms[i] = merged
                break
        else:
            terms.append(new)
    return (terms[0] if len(terms) == 1 else Sum(terms)).with_planner(left.planner)


def _merge(left: PerSampleGrad, right: PerSampleGrad) -> PerSampleGrad | None:
    """Add two gradients of one structure without leaving it; None where that is not possible or not wise."""
    if isinstance(left, Dense) and isinstance(right, Dense):
        return Dense(left._dense() + right._dense())
    if isinstance(left, Blocks) and isinstance(right, Blocks):
        both = set(left.blocks) & set(right.blocks)
        if matched(left, right) is None:
            return None
        sums = {start: add(left.blocks[start], right.blocks[start]) for start in both}
        return Blocks({**left.blocks, **right.blocks, **sums}, left.shape)
    if isinstance(left, RowScatter) and isinstance(right, RowScatter):
        ids, values = torch.cat([left.ids, right.ids], 1), torch.cat([left.values, right.values], 1)
        return RowScatter(ids, values, left.shape)
    if isinstance(left, OuterProduct) and isinstance(right, OuterProduct):
        if left.factor_sizes != right.factor_sizes:
            return None
        if not (left.has_patches or right.has_patches):
            return left.followed_by(right)
        joined = _join(left.right, right.right)
        if joined is not None:
            return OuterProduct(torch.cat([left.left, right.left], 3), joined, left.shape)
    return None


def _join(first: Tensor | Patches, second: Tensor | Patches) -> Patches | None:
    """Concatenate positions. Patches of different windows or sizes stay apart: unfolding them could need any memory."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return None
    layout, layout2 = (
        (each.window, each.groups, each.positions, each.source.shape[1:]) for each in (first, second)
    )
    if layout != layout2:
        return None
    source = torch.cat([first.per_sample(), second.per_sample()], 1).flatten(0, 1)
    return Patches(source, first.window, first.groups, first.positions, first.rows + second.rows)


def _terms(grad: PerSampleGrad) -> tuple[PerSampleGrad, ...]:
    return grad.terms if isinstance(grad, Sum) else (grad,)


def _parts(grad: PerSampleGrad) -> tuple[tuple[int, int, PerSampleGrad], ...]:
    return tuple(grad.spans()) if isinstance(grad, Concat) else ((0, grad.num_samples, grad),)


def _aligned(left: PerSampleGrad, right: PerSampleGrad) -> Iterator[tuple[PerSampleGrad, PerSampleGrad]]:
    """Cut two gradients of the same samples into parts of the same samples."""
    cuts = {0, left.num_samples}
    for grad in (left, right):
        if isinstance(grad, Concat):
            cuts |= {stop for _, stop, _ in grad.spans()}
    bounds = sorted(cuts)
    for start, stop in zip(bounds, bounds[1:] or [0], strict=False):
        yield _cut(left, start, stop), _cut(right, start, stop)


def _cut(grad: PerSampleGrad, start: int, stop: int) -> PerSampleGrad:
    chosen = grad._part(start, stop)._planned(grad.planner)
    return chosen.parts[0] if isinstance(chosen, Concat) and len(chosen.parts) == 1 else chosen


def _approximate(left: PerSampleGrad, right: PerSampleGrad) -> bool:
    """Whether a pair's terms are not repaired where they are evaluated."""
    kinds = {type(left), type(right)}
    return Concat not in kinds and (Sum in kinds or kinds == {RowScatter, OuterProduct})


def _dense_inner(left: PerSampleGrad, right: PerSampleGrad) -> Tensor:
    """Inner products, ``[N]``, of any two structures, some samples at a time."""
    dtype = accumulation_dtype(left.dtype, right.dtype)
    out = torch.zeros(left.num_samples, dtype=dtype, device=left.device)
    step = left._step()
    pairs = zip(left._blocks(dtype, step), right._blocks(dtype, step), strict=True)
    for (samples, block), (_, block2) in pairs:
        out[samples] = (block * block2).sum(1)
    return out


def _dense_gram(left: PerSampleGrad, right: PerSampleGrad) -> Tensor:
    """Inner products of all pairs, ``[N, M]``, of any two structures, some samples at a time."""
    dtype = accumulation_dtype(left.dtype, right.dtype)
    out = torch.zeros(left.num_samples, right.num_samples, dtype=dtype, device=left.device)
    for samples, block in left._blocks(dtype):
        for samples2, block2 in right._blocks(dtype):
            if right is not left or samples2.stop > samples.start:
                out[samples, samples2] = block @ block2.mT
    return mirrored(out) if right is left else out


def _outer_outer_inner(left: OuterProduct, right: OuterProduct) -> Tensor:
    if left.factor_sizes != right.factor_sizes:
        return _dense_inner(left, right)
    return left.planner.inner(left.left, left.right, right.left, right.right)


def _outer_outer_gram(left: OuterProduct, right: OuterProduct) -> Tensor:
    if right is left:
        return left.planner.gram(left.left, left.right)
    if left.factor_sizes != right.factor_sizes:
        return _dense_gram(left, right)
    return left.planner.gram(left.left, left.right, right.left, right.right)


def _scatter_outer_inner(scatter: RowScatter, outer: OuterProduct) -> Tensor:
    """Gather the outer product's rows at the ids: never ``V x D`` numbers a sample."""
    dtype = accumulation_dtype(scatter.dtype, outer.dtype)
    factors = _rows_of_table(scatter, outer, dtype)
    if factors is None:
        return _dense_inner(scatter, outer)
    left, right = factors
    values, ids = scatter.values.to(dtype), scatter.ids
    positions, length = left.shape[2], ids.shape[1]
    out = values.new_zeros(scatter.num_samples)
    room = scatter.planner.budget // max(1, 3 * positions * dtype.itemsize)
    for start, stop in spans(len(ids), room // max(1, length)):
        for first, last in spans(length, room):
            chosen = ids[start:stop, first:last]
            index = chosen.clamp_min(0)[..., None].expand(-1, -1, positions)
            products = left[start:stop].gather(1, index) * (
                values[start:stop, first:last] @ right[start:stop]
            )
            out[start:stop] += torch.where(chosen >= 0, products.sum(2), 0).sum(1)
    return out


def _scatter_outer_gram(scatter: RowScatter, outer: OuterProduct) -> Tensor:
    """The same for all pairs of samples, ``[N, M]``."""
    dtype = accumulation_dtype(scatter.dtype, outer.dtype)
    factors = _rows_of_table(scatter, outer, dtype)
    if factors is None:
        return _dense_gram(scatter, outer)
    left, right = factors
    samples, positions = scatter.num_samples, left.shape[2]
    ids, values = scatter.ids.flatten(), scatter.values.to(dtype).flatten(0, 1)
    owners = torch.arange(samples, device=ids.device).repeat_interleave(scatter.ids.shape[1])
    kept = (ids >= 0).nonzero()[:, 0]
    ids, values, owners = ids[kept], values[kept], owners[kept]
    out = values.new_zeros(samples, outer.num_samples)
    room = scatter.planner.budget // max(1, 3 * positions * dtype.itemsize)
    for start, stop in spans(outer.num_samples, room // max(1, len(ids))):
        columns = right[start:stop].movedim(1, 0).flatten(1)
        for first, last in spans(len(ids), room):
            products = (values[first:last] @ columns).reshape(last - first, stop - start, positions)
            products = products * left[start:stop, ids[first:last]].movedim(0, 1)
            out[:, start:stop].index_add_(0, owners[first:last], products.sum(2))
    return out


def _rows_of_table(
    scatter: RowScatter, outer: OuterProduct, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Factors ``[M, V, T]``, ``[M, D, T]`` of an outer product whose rows are the table's; None if they are not."""
    if outer.factor_sizes != (1, *scatter.shape) or not isinstance(outer.right, Tensor):
        return None
    return outer.left[:, 0].to(dtype), outer.right[:, 0].to(dtype)


def _blocks_inner(left: Blocks, right: Blocks) -> Tensor:
    """Blocks in different places are orthogonal."""
    pairs = matched(left, right)
    if pairs is None:
        return _dense_inner(left, right)
    nothing = torch.zeros(left.num_samples, dtype=left.dtype, device=left.device)
    return sum_tensors([nothing, *(inner(a, b) for a, b in pairs)])


def _blocks_gram(left: Blocks, right: Blocks) -> Tensor:
    pairs = matched(left, right)
    if pairs is None:
        return _dense_gram(left, right)
    nothing = torch.zeros(left.num_samples, right.num_samples, dtype=left.dtype, device=left.device)
    return sum_tensors([nothing, *(gram(a, b) for a, b in pairs)])


def _permuted_inner(left: Permuted, right: Permuted) -> Tensor:
    return inner(left.grad, right.grad) if left.is_like(right) else _dense_inner(left, right)


def _permuted_gram(left: Permuted, right: Permuted) -> Tensor:
    return gram(left.grad, right.grad) if left.is_like(right) else _dense_gram(left, right)


_INNER: dict[tuple[type, type], Callable[..., Tensor]] = {
    (OuterProduct, OuterProduct): _outer_outer_inner,
    (RowScatter, RowScatter): row_scatter.inner,
    (RowScatter, OuterProduct): _scatter_outer_inner,
    (Blocks, Blocks): _blocks_inner,
    (Permuted, Permuted): _permuted_inner,
}

_GRAM: dict[tuple[type, type], Callable[..., Tensor]] = {
    (OuterProduct, OuterProduct): _outer_outer_gram,
    (RowScatter, RowScatter): row_scatter.gram,
    (RowScatter, OuterProduct): _scatter_outer_gram,
    (Blocks, Blocks): _blocks_gram,
    (Permuted, Permuted): _permuted_gram,
}
