"""Gradients in a few rows of a table: embeddings."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.errors import RuleError
from gradbatch.factors.base import PerSampleGrad
from gradbatch.factors.dense import check_devices, check_floating
from gradbatch.plans.contractions import accumulation_dtype
from gradbatch.plans.kernels import noise
from gradbatch.plans.slabs import spans


class RowScatter(PerSampleGrad):
    r"""Per-sample gradients that are rows added into a table.

    .. math:: g_n = \sum_t e_{i_{nt}} v_{nt}^\top

    Args:
        ids: ``[N, T]`` int64, rows of the table; -1 stands for no row, and its values are never read. Never cast.
        values: ``[N, T, D]``.
        shape: ``[V, D]``.

    Raises:
        RuleError: when ranks, sizes, devices or dtypes do not fit together.

    Edge cases: a row that a sample has several times is added up; ``T = 0`` gives zero gradients.
    """

    def __init__(self, ids: Tensor, values: Tensor, shape: Sequence[int]) -> None:
        sizes = f"ids {list(ids.shape)}, values {list(values.shape)}, shape {list(shape)}"
        if ids.dim() != 2 or values.dim() != 3 or len(shape) != 2:
            raise RuleError(f"RowScatter takes ids [N, T], values [N, T, D] and a shape [V, D]; got {sizes}.")
        if values.shape[:2] != ids.shape or values.shape[2] != shape[1]:
            raise RuleError(
                f"RowScatter: ids [N, T], values [N, T, D], shape [V, D] differ in N, T or D: {sizes}."
            )
        if ids.dtype != torch.int64:
            raise RuleError(f"RowScatter takes int64 ids; these are {ids.dtype}.")
        check_floating("RowScatter", values=values.dtype)
        check_devices("RowScatter", [ids.device, values.device])
        # Out of range, a row would be taken for another sample's. Elsewhere than on a CPU the look would be a wait.
        if ids.device.type == "cpu" and ids.numel():
            first, last = map(int, ids.aminmax())
            if first < -1 or last >= shape[0]:
                raise RuleError(
                    f"RowScatter: ids from {first} to {last} for a table of {shape[0]} rows (-1: none)."
                )
        super().__init__(shape, ids.shape[0], [values.dtype], values.device)
        self.ids, self.values = ids, values

    def compact(self) -> "RowScatter":
        return self._occurring()[1]

    def _dense(self) -> Tensor:
        return self._dense_into(self.values.new_empty(self.num_samples, *self.shape, dtype=self.dtype))

    def _dense_into(self, out: Tensor) -> Tensor:
        samples, rows, values = self._entries(self.dtype)
        table = out.zero_().view(self.num_samples * self.shape[0], self.shape[1])
        table.index_add_(0, samples * self.shape[0] + rows, values)
        return out

    def _select(self, index: Tensor) -> "RowScatter":
        return RowScatter(self.ids[index], self.values[index], self.shape)

    def _part(self, start: int, stop: int) -> "RowScatter":
        return RowScatter(self.ids[start:stop], self.values[start:stop], self.shape)

    def _regroup(self, k: int) -> "RowScatter":
        samples, length = self.num_samples // k, k * self.ids.shape[1]
        values = self.values.reshape(samples, length, self.shape[1])
        return RowScatter(self.ids.reshape(samples, length), values, self.shape)

    def _noise(self) -> Tensor:
        norms = torch.linalg.vector_norm(self.values.to(self.dtype), dim=2)
        return noise(torch.where(self.ids >= 0, norms, 0)[:, None])

    def _sum(self) -> Tensor:
        _, rows, values = self._entries(self.dtype)
        return values.new_zeros(self.shape).index_add_(0, rows, values)

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        dtype = accumulation_dtype(self.dtype, weights.dtype)
        samples, rows, values = self._entries(dtype)
        out = values.new_zeros(len(weights), *self.shape)
        for k, weight in enumerate(weights.to(dtype)):
            out[k].index_add_(0, rows, weight[samples, None] * values)
        return out

    def _squared_norm(self) -> Tensor:
        entries = self.combined(self.dtype)
        return _sums(entries, self.num_samples, entries[2])

    def _sum_of_squares(self, center: Tensor | None) -> Tensor:
        dtype = self.dtype if center is None else accumulation_dtype(self.dtype, center.dtype)
        _, rows, values = self.combined(dtype)
        if center is None:
            return values.new_zeros(self.shape).index_add_(0, rows, values.square())
        center = center.to(dtype)
        out = values.new_zeros(self.shape).index_add_(0, rows, (values - center[rows]).square_())
        absent = self.num_samples - torch.bincount(rows, minlength=self.shape[0])[:, None]
        return out.add_(torch.where(absent > 0, absent * center.square(), 0))

    def _moments(self) -> tuple[Tensor, Tensor]:
        rows, occurring = self._occurring()
        mean, squares = PerSampleGrad._moments(occurring)
        return self._placed(rows, mean), self._placed(rows, squares)

    def _squared_deviations(self) -> Tensor:
        # Filling a large table with zeros takes longer than what is in it: the mean is not asked for.
        rows, occurring = self._occurring()
        return self._placed(rows, PerSampleGrad._moments(occurring)[1])

    def _placed(self, rows: Tensor, values: Tensor) -> Tensor:
        return values.new_zeros(self.shape).index_copy_(0, rows, values)

    def _dot(self, direction: Tensor) -> Tensor:
        dtype = accumulation_dtype(self.dtype, direction.dtype)
        samples, rows, values = self._entries(dtype)
        out = values.new_zeros(self.num_samples)
        return out.index_add_(0, samples, (values * direction[rows]).sum(1))

    def _project(self, directions: Tensor) -> Tensor:
        each = [self._dot(direction) for direction in directions]
        dtype = accumulation_dtype(self.dtype, directions.dtype)
        nothing = torch.zeros(self.num_samples, 0, dtype=dtype, device=self.device)
        return torch.stack(each, 1) if each else nothing

    def _occurring(self) -> tuple[Tensor, "RowScatter"]:
        """Rows that some sample has, ``[R]``, and the same gradients in a table of these alone, ``[R, D]``."""
        rows, ids = torch.unique(self.ids, return_inverse=True)
        absent = int((rows < 0).sum())  # -1 comes first
        rows = rows[absent:]
        table = RowScatter(ids - absent, self.values, (len(rows), self.shape[1]))
        return rows, table._planned(self.planner)

    def _entries(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Sample, row and value of every entry that has a row: ``[E]``, ``[E]``, ``[E, D]``."""
        present = self.ids >= 0
        if present.all():
            samples = (
                torch.arange(self.num_samples, device=self.device)[:, None].expand_as(self.ids).flatten()
            )
            return samples, self.ids.flatten(), self.values.flatten(0, 1).to(dtype)
        samples, positions = present.nonzero(as_tuple=True)
        return samples, self.ids[samples, positions], self.values[samples, positions].to(dtype)

    def combined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The same with every row of a sample once, sorted by sample and row."""
        samples, rows, values = self._entries(dtype)
        height = max(1, self.shape[0])
        keys, inverse = torch.unique(samples * height + rows, return_inverse=True)
        values = values.new_zeros(len(keys), self.shape[1]).index_add_(0, inverse, values)
        return keys // height, keys % height, values


def inner(left: RowScatter, right: RowScatter) -> Tensor:
    """Inner products, ``[N]``: rows that a sample has in both."""
    dtype = accumulation_dtype(left.dtype, right.dtype)
    (samples, rows, values), (samples2, rows2, values2) = left.combined(dtype), right.combined(dtype)
    out = values.new_zeros(left.num_samples)
    keys, keys2 = samples * left.shape[0] + rows, samples2 * left.shape[0] + rows2
    if len(keys2) == 0:
        return out
    found = torch.searchsorted(keys2, keys).clamp_max(len(keys2) - 1)
    hit = (keys2[found] == keys).nonzero()[:, 0]
    products = (values[hit] * values2[found[hit]]).sum(1)
    return out.index_add_(0, samples[hit], products)


def gram(left: RowScatter, right: RowScatter) -> Tensor:
    """Inner products of all pairs, ``[N, M]``: dense, but in the rows that two samples have, some rows at a time."""
    dtype = accumulation_dtype(left.dtype, right.dtype)
    entries = left.combined(dtype)
    entries2 = entries if right is left else right.combined(dtype)
    # Of most rows of a large table only one sample has anything.
    found, counts = torch.unique(entries[1], return_counts=True)
    shared = found[counts > 1] if right is left else found[torch.isin(found, entries2[1])]
    # Zeros, but where a sample is not finite, which multiplied with zeros is not finite either.
    out = _sums(entries, left.num_samples, 0)[:, None] + _sums(entries2, right.num_samples, 0)
    row_bytes = (left.num_samples + right.num_samples) * left.shape[1] * dtype.itemsize
    for start, stop in spans(len(shared), left.planner.budget // max(1, row_bytes)):
        chosen = shared[start:stop]
        table = _table(entries, chosen, left.num_samples)
        table2 = table if right is left else _table(entries2, chosen, right.num_samples)
        out += table @ table2.mT
    if right is left:
        out.diagonal().copy_(_sums(entries, left.num_samples, entries[2]))
    return out


def _sums(entries: tuple[Tensor, Tensor, Tensor], num_samples: int, factor: Tensor | int) -> Tensor:
    """Sum of each sample's values times a factor, ``[N]``."""
    samples, _, values = entries
    return values.new_zeros(num_samples).index_add_(0, samples, (values * factor).sum(1))


def _table(entries: tuple[Tensor, Tensor, Tensor], chosen: Tensor, num_samples: int) -> Tensor:
    """Materialise the ``chosen`` rows (sorted) of every sample, ``[N, rows * D]``."""
    samples, rows, values = entries
    width = values.shape[1]
    table = values.new_zeros(num_samples * len(chosen), width)
    if len(chosen):
        found = torch.searchsorted(chosen, rows).clamp_max(len(chosen) - 1)
        hit = (chosen[found] == rows).nonzero()[:, 0]
        table.index_add_(0, samples[hit] * len(chosen) + found[hit], values[hit])
    return table.reshape(num_samples, len(chosen) * width)
