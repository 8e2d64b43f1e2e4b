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
        size: of the data set, where they are places in it.

    Raises:
        UsageError: they are no vector, are no whole numbers (a mask is none, and rounding would take one sample for
            another), or are below 0 or not below the size.
    """
    try:
        found = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"ids are a vector of whole numbers, one a sample; number names, and keep the list: {error}"
        ) from error
    if found.dim() != 1:
        raise UsageError(f"ids have shape {list(found.shape)}; expected [N], one a sample")
    if len(found) and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        hint = "; of a mask, take mask.nonzero()[:, 0]" if found.dtype == torch.bool else ""
        raise UsageError(f"ids are {found.dtype}; they are whole numbers, such as int64{hint}")
    found = found.long()
    if len(found):
        first, last = map(int, found.aminmax())
        if first < 0 or (size is not None and last >= size):
            of = "; they are counted from 0" if size is None else f", of {size} samples"
            raise UsageError(f"ids from {first} to {last}{of}")
    return found
