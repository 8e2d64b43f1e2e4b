"""Writers continue what they began, leave alone what is not theirs, and say so when a line could not be written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional as F

from gradbatch import UsageError
from gradbatch.analysis import Csv, GradientMonitor, JsonLines, Record, Run, read_log
from tests.analysis.monitored import batch, network
from tests.analysis.test_log import RUN, record, written


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "notes.txt"
    for text in ("what I found\n", '{"mine": 1}\n', "step,loss\n1,2\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"notes\.txt is there and is no"):
            kind(path)
        assert path.read_text() == text


def test_the_log_of_another_model_is_left_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", range(3))
    before, log = path.read_bytes(), JsonLines(path)
    with pytest.raises(UsageError, match="is the log of a model with other parameters"):
        log.start(Run({"0.weight": 7}, "standard"))
    log.close()
    with pytest.raises(UsageError, match="is the log of a model with other parameters"):
        GradientMonitor(network(), [tmp_path / "new.jsonl", path])
    assert path.read_bytes() == before and len(read_log(path).records) == 3


def test_a_log_is_continued_wherever_its_first_line_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = written(path, range(0)).read_bytes()
    for length in (0, 3, 20, len(first) - 1, len(first)):
        path.write_bytes(first[:length])
        written(path, range(2))
        written(path, range(2, 4))
        assert [entry.step for entry in read_log(path).records] == [0, 1, 2, 3]


def test_a_table_is_continued(tmp_path: Path) -> None:
    for step in (1, 2):
        table = Csv(tmp_path / "run.csv")
        table.start(RUN)
        table.write(record(step))
        table.close()
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2"]
    with pytest.raises(UsageError, match="is closed"):
        table.write(record(3))


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_what_cannot_be_opened_is_refused(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none" / "run.jsonl", tmp_path):
        with pytest.raises(UsageError, match="a log cannot be written to"):
            kind(path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"a log cannot be written to .*: Permission denied"):
        kind(tmp_path / "run.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_full_disk_is_said(kind: Any) -> None:
    writer = kind("/dev/full")
    with pytest.raises(UsageError, match="/dev/full could not be written: No space left"):
        writer.start(RUN)
    with pytest.raises(UsageError, match="end of the log /dev/full could not be written"):
        writer.close()


class Broken:
    """A writer that cannot write."""

    def start(self, run: Run) -> None:
        pass

    def write(self, record: Record) -> None:
        raise OSError("no space")

    def close(self) -> None:
        raise OSError("no space to close")


def test_a_writer_that_fails_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    model, (x, y) = network(), batch(4)
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    monitor = GradientMonitor(model, [str(before), Broken(), after], every=1)
    for k in range(2):
        with pytest.raises(OSError, match="no space"), monitor.step(k) as step:
            F.cross_entropy(model(x), y).backward()
        assert step.record
    with pytest.raises(OSError, match="no space to close"):
        monitor.close()
    for path in (before, after):
        assert [entry.step for entry in read_log(path).records] == [0, 1]
        with pytest.raises(UsageError, match="is closed"):
            next(w for w in monitor._writers if isinstance(w, JsonLines) and w.path == path).write(record(3))


def test_what_is_no_writer_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "text").open("w") as file:
        for log in (5, file, [file]):
            with pytest.raises(UsageError, match="a log is a path, a writer"):
                GradientMonitor(network(), log)  # type: ignore[arg-type]


def test_a_run_that_goes_back_leaves_the_course_that_it_gave_up(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", range(8))
    log = JsonLines(path)
    log.start(RUN)
    for step in (3, 5):
        log.write(replace(record(step), samples=9))
    log.close()
    read = read_log(path)
    assert [(entry.step, entry.samples) for entry in read.records] == [(0, 4), (1, 4), (2, 4), (3, 9), (5, 9)]
    assert read.replaced == 5
    assert read_log(written(tmp_path / "new.jsonl", range(3))).replaced == 0


def test_one_log_given_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", range(2))
    with pytest.raises(UsageError, match="a log is given twice"):
        read_log(path, tmp_path / "." / "run.jsonl")


def test_lines_of_an_unknown_kind_are_listed_and_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", range(1))
    strange = (
        b'{"record":"note","format":1,"parameters":{},"preset":"x"}\n'
        b'{"record":"step","step":"7","time":0,"samples":1,"non_finite":0,"loss":0,"mean_norm":0,"quantiles":[],'
        b'"sum_of_squares":[0,0],"square_of_sum":[0,0]}\n\x00\x00\x00\n'
    )
    with path.open("ab") as file:
        file.write(strange)
    read = read_log(path)
    assert read.run == RUN and len(read.records) == 1
    assert read.broken == [f"{path}:{line}" for line in (3, 4, 5)]


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1.5},
        {"samples": None},
        {"samples": True},
        {"loss": "low"},
        {"quantiles": [1.0] * 6},
        {"quantiles": [[1.0]] * 7},
        {"sum_of_squares": [1.0, {}]},
        {"sum_of_squares": None},
        {"hardest": [[7]]},
        {"hardest": [["a", 3.0]]},
        {"histogram": [0, 3]},
        {"cosines": [1.0]},
    ],
)
def test_a_line_with_something_else_in_it_is_listed_and_left_out(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = written(tmp_path / "run.jsonl", range(2))
    line = {**json.loads(path.read_bytes().splitlines()[-1]), "step": 7, **change}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    read = read_log(path)
    assert [entry.step for entry in read.records] == [0, 1] and read.broken == [f"{path}:4"]


def test_a_run_whose_groups_are_of_other_parameters_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = JsonLines(path)
    log.start(replace(RUN, groups={"all": ["none"]}))
    log.close()
    with pytest.raises(UsageError, match="no line says what was measured"):
        read_log(path)
