"""Ids of samples, as users give them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.errors import UsageError


def ids_of(ids: Tensor | Sequence[int], size: int | None = None) -> Tensor:
    """Ids as a vector, ``[N]``, int64 on the CPU.

    Args:
        ids: whole numbers, in a tensor or array of any integer type, or one by one.
        size: of the data set, where they are places in it: from 0, below this.

    Raises:
        UsageError: they are no vector, are no whole numbers (a mask is none, and rounding would take one sample for
            another), or out of range.
    """
    try:
        found = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"ids are a vector of whole numbers, one a sample: {error}") from error
    if found.dim() != 1:
        raise UsageError(f"ids have shape {list(found.shape)}; expected [N], one a sample")
    if len(found) and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        hint = "; of a mask, take mask.nonzero()[:, 0]" if found.dtype == torch.bool else ""
        raise UsageError(f"ids are {found.dtype}; they are whole numbers, such as int64{hint}")
    found = found.long()
    if size is not None and len(found) and not 0 <= int(found.min()) <= int(found.max()) < size:
        raise UsageError(f"ids from {int(found.min())} to {int(found.max())}, of {size} samples")
    return found
