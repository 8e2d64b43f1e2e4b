"""What a loader yields for a batch without samples: the structure of any other batch, with nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradbatch.errors import UsageError


class CollateEmpty:
    """A ``collate_fn`` that also takes a list without samples, which most fail on.

    What an empty batch looks like is read off two others, of one sample and of the same sample twice: what grows with
    the number of samples is continued to none. So tensors keep their dtype and all sizes but that of the axis that runs
    over samples, wherever it is; lists of strings get empty; what does not depend on the number stays.

    Args:
        collate: the function that joins a list of samples to a batch.
        sample: one sample.

    Raises:
        UsageError: a batch that does not grow in this way.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], sample: Any) -> None:
        self.collate = collate
        self.empty = _continued(collate([sample]), collate([sample, sample]), "batch")

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else _copied(self.empty)


def _continued(one: Any, two: Any, where: str) -> Any:
    """From the batches of one and of two equal samples to that of none."""
    if type(one) is not type(two):
        raise _not_found(
            where, f"of type {type(one).__name__} with one sample, {type(two).__name__} with two"
        )
    if isinstance(one, Tensor):
        return _continued_tensor(one, two, where)
    if isinstance(one, Mapping) and set(one) == set(two):
        return _like(one, {key: _continued(one[key], two[key], f"{where}[{key!r}]") for key in one})
    if isinstance(one, list | tuple):
        # As many elements as samples: a list over samples. Otherwise a structure of things that were each joined.
        if len(two) == 2 * len(one) and list(two) == [*one, *one]:
            return type(one)()
        if len(one) == len(two):
            pairs = enumerate(zip(one, two, strict=True))
            return _like(
                one, [_continued(first, second, f"{where}[{index}]") for index, (first, second) in pairs]
            )
    elif one is two or bool(one == two):
        return one
    elif isinstance(one, int | float) and two == 2 * one:
        return type(one)(0)
    raise _not_found(where, f"{one!r:.80} with one sample, {two!r:.80} with two")


def _continued_tensor(one: Tensor, two: Tensor, where: str) -> Tensor:
    grown = [axis for axis in range(min(one.dim(), two.dim())) if one.shape[axis] != two.shape[axis]]
    if one.dim() == two.dim():
        if not grown and torch.equal(one, two):
            return one
        if not grown and not one.dim() and torch.equal(two, 2 * one):
            return torch.zeros_like(one)
        if len(grown) == 1:
            [axis] = grown
            remaining = 2 * one.shape[axis] - two.shape[axis]
            # More remains than nothing where a batch has one more than its samples, as offsets do.
            if remaining >= 0 and torch.equal(one.narrow(axis, 0, remaining), two.narrow(axis, 0, remaining)):
                return one.narrow(axis, 0, remaining).clone()
    raise _not_found(where, f"of shape {list(one.shape)} with one sample, {list(two.shape)} with two")


def _like(batch: Any, content: Any) -> Any:
    """The content in a container of the batch's type: named tuples and mappings of other libraries stay such."""
    if hasattr(batch, "_fields"):
        return type(batch)(*content)
    return type(batch)(content)


def _copied(batch: Any) -> Any:
    """A batch of its own: what is done in place to one is not seen in the next."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, Mapping):
        return _like(batch, {key: _copied(value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return _like(batch, [_copied(value) for value in batch])
    return batch


def _not_found(where: str, what: str) -> UsageError:
    return UsageError(
        f"what a batch without samples looks like cannot be told from batches of one and of two: {where} is {what}. "
        "Give a collate_fn that takes an empty list, and say collates_empty=True"
    )
