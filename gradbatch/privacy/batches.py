"""Logical batches: handed out one by one, counted, and split into parts that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.privacy.sampling import PoissonLoader


def batch_parts(batch: Any, size: int) -> Iterator[Any]:
    """Split a batch of any structure along its first axis.

    Args:
        batch: tensors ``[N, ...]`` in tuples, lists and mappings, however nested; a list that holds no tensor has one
            entry a sample; anything else goes into every part as it is.
        size: samples in a part.

    Yields:
        Batches of the same structure; one, if there are no samples.

    Raises:
        UsageError: ``size`` is not positive, there is no tensor, or tensors of different lengths.
    """
    if size < 1:
        raise UsageError(f"size is {size}; it is the number of samples in a part")
    lengths = {len(tensor) for tensor in _tensors(batch)}
    if len(lengths) != 1:
        raise UsageError(
            f"a batch is split along the first axis of its tensors, but they have lengths {sorted(lengths)}"
            if lengths
            else "a batch is split along the first axis of its tensors, but there is none in it"
        )
    count = lengths.pop()
    for start in range(0, max(count, 1), size):
        yield _part(batch, slice(start, start + size), count)


def empty_part(batch: Any) -> Any:
    """A part of no sample."""
    return _part(batch, slice(0, 0), _length(batch))


class BatchAtHand:
    """The batch that was drawn last: how many records it has, and how many of them were clipped.

    Attributes:
        records: how many it has; ``None``: there is no batch, or it was stepped on.
    """

    def __init__(self) -> None:
        self.records: int | None = None
        self._clipped = 0

    def draw(self, records: int) -> None:
        """Take a new batch (:class:`UsageError` if there is one)."""
        if self.records is not None:
            raise UsageError(
                "the batch before was not used: each batch of private.loader is one optimizer.step(), also an empty "
                "one (private.backward of its empty losses); private.discard() leaves it out"
            )
        self.records = records

    def count(self, samples: int) -> int:
        """How many records are clipped with so many more (:class:`UsageError` if there are not as many)."""
        if self.records is None:
            raise UsageError(
                "there is no batch to go backward: take each from private.loader, which draws it as it is accounted for"
            )
        if self._clipped + samples > self.records:
            raise UsageError(
                f"{self._clipped + samples} samples went backward for a batch of {self.records} records: each record "
                "may be clipped once. Sum the losses of a record before, or say with sample_ids which losses are one "
                "record's"
            )
        return self._clipped + samples

    def add(self, samples: int) -> None:
        """So many more were clipped."""
        self._clipped = self.count(samples)

    def check_complete(self) -> None:
        """Refuse a step before all records were clipped (:class:`UsageError`)."""
        if self.records is not None and self._clipped < self.records:
            raise UsageError(
                f"{self._clipped} of the batch's {self.records} records went through private.backward: the loop over "
                "private.parts was left early? private.discard() drops the batch"
            )

    def end(self) -> None:
        """The batch is stepped on, or dropped."""
        self.records, self._clipped = None, 0


class Batches:
    """The batches of a loader; how many records each has is reported before it is handed out.

    Args:
        loader: knows how many it has ``drawn``; of any other the first tensor is measured.
        opened: called when a pass begins.
        drawn: called with the number of records of each batch.
    """

    def __init__(self, loader: Any, opened: Callable[[], None], drawn: Callable[[int], None]) -> None:
        self._loader, self._opened, self._drawn = loader, opened, drawn

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._opened()
        for batch in self._loader:
            self._drawn(self._loader.drawn if isinstance(self._loader, PoissonLoader) else _length(batch))
            yield batch


def _length(batch: Any) -> int:
    return next((len(tensor) for tensor in _tensors(batch)), 0)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        for entry in batch.values():
            yield from _tensors(entry)
    elif isinstance(batch, (list, tuple)):
        for entry in batch:
            yield from _tensors(entry)


def _part(batch: Any, where: slice, count: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[where] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _part(entry, where, count) for key, entry in batch.items()}
    if isinstance(batch, (list, tuple)):
        if not any(True for _ in _tensors(batch)):
            return _listed(batch, where, count)
        entries = [_part(entry, where, count) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    return batch


def _listed(entries: Sequence[Any], where: slice, count: int) -> Any:
    # Names, texts and the like, one a sample; of another length, something about the batch as a whole.
    return entries[where] if len(entries) == count else entries
