"""Samples: which of them each row of the losses, or of the model's outputs, belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradbatch.errors import UsageError


@dataclass(frozen=True)
class Samples:
    """The samples of a batch.

    Args:
        count: ``N``.
        ids: the sample of each row, ``[rows]``; ``None``: every row is one.
    """

    count: int
    ids: Tensor | None = None

    def of_rows(self, weights: Tensor) -> Tensor:
        """Spread weights of the samples ``[N]`` over their rows, ``[rows]``."""
        return weights if self.ids is None else weights[self.ids.to(weights.device)]

    def gathered(self, rows: Tensor) -> Tensor:
        """Samples ``[N]`` of which some row is marked, from marks of the rows, ``[rows]``."""
        if self.ids is None:
            return rows
        return rows.new_zeros(self.count).index_put((self.ids.to(rows.device)[rows],), rows.new_ones(()))


def samples_of(rows: int, sample_ids: Tensor | None) -> Samples:
    """The samples of a batch with so many rows.

    Args:
        rows: losses, or rows of the model's outputs.
        sample_ids: the sample of each row, ``[rows]``, whole numbers from 0; ``None``: every row is one.

    Raises:
        UsageError: ids of another kind or number, or more samples than rows.

    Edge cases: ``N`` is the largest number plus one; a smaller one that no row has is a sample with zero gradients.
    """
    if sample_ids is None:
        return Samples(rows)
    if not isinstance(sample_ids, Tensor) or sample_ids.dim() != 1 or len(sample_ids) != rows:
        got = list(sample_ids.shape) if isinstance(sample_ids, Tensor) else type(sample_ids).__name__
        raise UsageError(f"sample_ids is {got}; expected a tensor [{rows}], the sample of each row")
    if sample_ids.is_floating_point() or sample_ids.is_complex() or sample_ids.dtype == torch.bool:
        raise UsageError(f"sample_ids are {sample_ids.dtype}; expected whole numbers from 0")
    if rows and int(sample_ids.min()) < 0:
        raise UsageError(
            f"sample_ids has {int(sample_ids.min())}; samples are numbered from 0 (torch.unique(ids, "
            "return_inverse=True)[1] numbers any ids)"
        )
    ids = sample_ids.detach().long()
    if rows and int(ids.max()) >= rows:
        raise UsageError(
            f"sample_ids go up to {int(ids.max())} for {rows} rows, but there are no more samples than rows; "
            "torch.unique(ids, return_inverse=True)[1] numbers any ids"
        )
    return Samples(int(ids.max()) + 1 if rows else 0, ids)
