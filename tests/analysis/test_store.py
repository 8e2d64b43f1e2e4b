"""A store is made where nothing else is, where there is room, and holds what it is told of whole ids."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gradbatch import UsageError
from gradbatch.analysis import FeatureStore, RandomProjection

PROJECTION = RandomProjection(4)


@pytest.mark.parametrize("taken", ["features", "features.json"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, taken: str) -> None:
    for text in ("mine", "[1]", '{"size": 3}'):
        (tmp_path / taken).write_text(text)
        with pytest.raises(UsageError, match=r"is there and is no store|is no description of a store"):
            FeatureStore(tmp_path / "features", 3, PROJECTION)
        assert [path.read_text() for path in tmp_path.iterdir()] == [text]


def test_a_store_whose_making_was_broken_off_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "features"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(UsageError, match="features of 48 bytes: No space left on device"):
            FeatureStore(path, 3, PROJECTION)
    with pytest.raises(UsageError, match="there is no store at"):
        FeatureStore(path)
    assert FeatureStore(path, 5, PROJECTION).missing() == [0, 1, 2, 3, 4]
    path.unlink()
    assert FeatureStore(path, 2, PROJECTION).missing() == [0, 1], "its description alone is no store"
    assert FeatureStore(path).missing() == [0, 1]


def test_a_file_system_that_reserves_nothing_holds_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable, raising=False)
    assert FeatureStore(tmp_path / "features", 3, PROJECTION).missing() == [0, 1, 2]


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for path in (tmp_path / "directory", tmp_path / "none" / "features"):
        with pytest.raises(UsageError, match=r"is there and is no store|No such file"):
            FeatureStore(path, 3, PROJECTION)
    FeatureStore(tmp_path / "features", 3, PROJECTION)
    with pytest.raises(UsageError, match="holds 3 samples of"):
        FeatureStore(tmp_path / "features", 0, PROJECTION)
    about = tmp_path / "features.json"
    about.write_text(about.read_text()[:-5])
    with pytest.raises(UsageError, match=r"features\.json is no description of a store"):
        FeatureStore(tmp_path / "features")


def test_a_store_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    FeatureStore(tmp_path / "features", 2, PROJECTION).write([0, 1], torch.ones(2, 4))
    (tmp_path / "features.json").write_text(json.dumps({"size": 2, "features": 4, "seed": 0}))
    assert FeatureStore(tmp_path / "features").missing() == []


def test_ids_are_whole_numbers_of_any_type(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "features", 6, PROJECTION)
    for place, kind in enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)):
        store.write(torch.tensor([place], dtype=kind), torch.full((1, 4), float(place)))
    store.write(range(5, 6), torch.full((1, 4), 5.0))
    store.write([], torch.zeros(0, 4))
    assert store.features[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    before = store.features.clone()
    mask = torch.tensor([True, False])
    for ids in (mask, torch.tensor([0.7, 1.2]), [0.5, 1], torch.zeros(2, 1, dtype=torch.long), ["a", "b"]):
        with pytest.raises(UsageError, match=r"^ids "):
            store.write(ids, torch.zeros(2, 4))  # type: ignore[arg-type]
    assert torch.equal(store.features, before)
