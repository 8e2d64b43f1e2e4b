"""A log stays readable, wherever it ends."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradbatch import UsageError
from gradbatch.analysis import Csv, JsonLines, Record, Run, read_log

ROOT = Path(__file__).parent.parent.parent
RUN = Run({"0.weight": 6, "0.bias": 2}, "standard")


def record(step: int) -> Record:
    return Record(step, 1.5, 4, 0, 0.25, 1.0, [1.0] * 7, [2.0 + step, 1.0], [3.0, 0.5], 1.0, [(7, 3.0)])


def written(path: Path, steps: range) -> Path:
    log = JsonLines(path)
    log.start(RUN)
    for step in steps:
        log.write(record(step))
    log.close()
    return path


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "run.jsonl", range(3)))
    assert log.run == RUN and log.broken == []
    # JSON knows lists only.
    assert log.records == [replace(record(step), hardest=[[7, 3.0]]) for step in range(3)]


def test_numbers_that_json_has_no_word_for_become_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = JsonLines(path)
    log.start(RUN)
    log.write(replace(record(0), loss=math.nan, sum_of_squares=[math.inf, 1.0], hardest=[(3, math.inf)]))
    log.close()
    (read,) = read_log(path).records
    assert read.loss is None and read.sum_of_squares == [None, 1.0] and read.hardest == [[3, None]]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-1e999", "1" + 400 * "0", 5000 * "1"])
@pytest.mark.parametrize("name", ["loss", "samples", "square_of_sum"])
def test_a_line_with_what_is_no_number_is_left_out(tmp_path: Path, name: str, word: str) -> None:
    path = written(tmp_path / "run.jsonl", range(3))
    lines = path.read_text().splitlines()
    entry = json.loads(lines[2])
    entry[name] = [3.0, "here"] if name == "square_of_sum" else "here"
    changed = json.dumps(entry).replace('"here"', word)
    path.write_text("\n".join([*lines[:2], changed, *lines[3:], ""]))
    log = read_log(path)
    assert [entry.step for entry in log.records] == [0, 2] and log.broken == [f"{path}:3"]


def test_a_log_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    whole = written(tmp_path / "run.jsonl", range(3)).read_bytes()
    cut = tmp_path / "cut.jsonl"
    first = whole.index(b"\n")
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(first + 1, len(whole)):
        cut.write_bytes(whole[:length])
        log = read_log(cut)
        # A line is whole with its last brace, before the end of the line.
        assert len(log.records) == sum(end <= length for end in ends[1:])
        assert len(log.broken) == (length not in ends and length - 1 not in ends)


def test_a_log_goes_on_where_a_killed_process_left_it_and_later_records_count(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", range(4))
    path.write_bytes(path.read_bytes()[:-9])
    log = JsonLines(path)
    log.start(RUN)
    log.write(replace(record(2), samples=9))
    log.write(record(3))
    log.close()
    read = read_log(path)
    assert [entry.step for entry in read.records] == [0, 1, 2, 3]
    assert read.records[2].samples == 9 and read.broken == [f"{path}:5"]


def test_what_was_logged_survives_a_kill(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.analysis.test_log import RUN, record
from gradbatch.analysis import JsonLines
log = JsonLines("run.jsonl")
log.start(RUN)
for step in range(10**9):
    log.write(record(step))
    if step == 20:
        print("written", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    log = read_log(tmp_path / "run.jsonl")
    assert [entry.step for entry in log.records][:21] == list(range(21))
    assert len(log.broken) <= 1


def test_one_log_for_each_rank_makes_one(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "0.jsonl", range(3)), written(tmp_path / "1.jsonl", range(2)))
    assert [entry.step for entry in log.records] == [0, 0, 1, 1, 2]
    assert [len(rank) for rank in log.ranks] == [3, 2]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    log = JsonLines(other)
    log.start(Run({"weight": 6}, "standard"))
    log.close()
    path, text = written(tmp_path / "run.jsonl", range(1)), tmp_path / "text"
    text.write_text("some text\n[1]\n3\n")
    for paths, message in (
        ((), "takes the path of a log"),
        ((tmp_path / "none.jsonl",), "No such file"),
        ((text,), "is it a gradbatch log"),
        ((path, other), "logs of different models"),
    ):
        with pytest.raises(UsageError, match=message):
            read_log(*paths)
    path.write_text('{"record":"run","format":2,"parameters":{},"preset":"x"}\n')
    with pytest.raises(UsageError, match="of a later gradbatch"):
        read_log(path)
    with pytest.raises(UsageError, match="is closed"):
        log.write(record(0))


def test_a_record_that_does_not_fit_the_run_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", range(1))
    log = JsonLines(path)
    log.write(replace(record(1), sum_of_squares=[1.0]))
    log.close()
    with pytest.raises(UsageError, match="step 1 has 1 parameters; the run has 2"):
        read_log(path)


def test_a_spreadsheet_has_the_numbers_of_the_whole_model(tmp_path: Path) -> None:
    table = Csv(tmp_path / "run.csv")
    table.start(RUN)
    table.write(record(5))
    table.write(replace(record(6), sum_of_squares=[None, 1.0], loss=None))
    table.close()
    assert (tmp_path / "run.csv").read_text().splitlines() == [
        "step,time,samples,non_finite,loss,mean_norm,sum_of_squares,square_of_sum",
        "5,1.5,4,0,0.25,1.0,8.0,3.5",
        "6,1.5,4,0,,1.0,,3.5",
    ]


@pytest.mark.parametrize(
    "odd", [{"samples": 10**19}, {"cosines": [[1.0, 0.5], [0.5]]}, {"cosines": [[1.0, 0.5]]}]
)
def test_a_line_that_no_writer_makes_is_left_out(tmp_path: Path, odd: dict[str, Any]) -> None:
    path = written(tmp_path / "run.jsonl", range(3))
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), **odd})
    path.write_text("\n".join(lines))
    log = read_log(path)
    assert [entry.step for entry in log.records] == [0, 2] and log.broken == [f"{path}:3"]
