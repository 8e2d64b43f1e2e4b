"""A batch of any structure is split along its samples, and put together again it is what it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from gradbatch.errors import UsageError
from gradbatch.privacy.batches import batch_parts


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def of(samples: int) -> dict[str, Any]:
    x = torch.arange(samples * 2.0).view(samples, 2)
    return {
        "tensors": (x, [x[:, 0], {"ids": x.long()}]),
        "named": Pair(x, x[:, 1]),
        "texts": [f"text {n}" for n in range(samples)],
        "scale": torch.tensor(2.0),
        "size": 7,
        "nothing": None,
    }


@pytest.mark.parametrize("samples", [1, 5, 6])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_parts_hold_every_sample_once_and_in_order(samples: int, size: int) -> None:
    whole = of(samples)
    parts = list(batch_parts(whole, size))
    assert len(parts) == -(-samples // size)
    assert all(len(part["tensors"][0]) == size for part in parts[:-1])
    for pick in (
        lambda part: part["tensors"][0],
        lambda part: part["tensors"][1][0],
        lambda part: part["tensors"][1][1]["ids"],
        lambda part: part["named"].label,
    ):
        assert torch.cat([pick(part) for part in parts]).equal(pick(whole))
    assert [text for part in parts for text in part["texts"]] == whole["texts"]
    assert all(isinstance(part["named"], Pair) and isinstance(part["tensors"], tuple) for part in parts)
    assert all((part["scale"], part["size"], part["nothing"]) == (2.0, 7, None) for part in parts)


def test_an_empty_batch_is_one_part() -> None:
    [part] = batch_parts(of(0), 4)
    assert part["tensors"][0].shape == (0, 2) and part["texts"] == []


def test_a_tensor_is_a_batch() -> None:
    assert [len(part) for part in batch_parts(torch.ones(5, 2), 2)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("batch", "size", "says"),
    [
        (torch.ones(3), 0, "size is 0"),
        ((torch.ones(3), torch.ones(4)), 2, r"lengths \[3, 4\]"),
        (["a", "b"], 2, "there is none in it"),
        ((torch.ones(()),), 2, "there is none in it"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: Any, size: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        list(batch_parts(batch, size))
