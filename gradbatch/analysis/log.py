"""Logs of gradient statistics: one line of JSON a record, readable however the run ended."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gradbatch.errors import UsageError

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """What holds for all records of a run: the first line of its log.

    Args:
        parameters: number of elements of each parameter by name, in the order of the records' lists.
        preset: of the monitor.
        groups: names of the parameters in each group that was asked for.
    """

    parameters: dict[str, int]
    preset: str
    groups: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """What was measured in one step.

    Numbers are those of the samples' own losses, whatever the loss was scaled with. ``None`` stands for what is not
    finite, or was not measured.

    Args:
        step: number of the step, as the monitor was told.
        time: seconds since 1970.
        samples: of the batch, ``N``.
        non_finite: samples whose gradient has no finite norm.
        loss: mean over the batch.
        mean_norm: mean of the norms that are finite.
        quantiles: of the norms: 0 (the smallest), 5, 25, 50, 75, 95 and 100 percent.
        sum_of_squares: of the norms, for each parameter.
        square_of_sum: squared norm of the summed gradients, for each parameter.
        dot_squares: sum over samples of the squared dot product with the batch's sum.
        histogram: of the norms, see :func:`~gradbatch.analysis.norm_histogram`.
        hardest: id and norm of the samples with the largest gradients, largest first.
        evidence_sums, evidence_elements: for each parameter, the sum of squared mean gradients over variances, and over
            how many elements: what :func:`~gradbatch.analysis.stopping_evidence` is made of.
        cosines: between the gradients of the batch's first samples, ``[M, M]``, to four digits.
        ids: of these samples, where the monitor was told.
    """

    step: int
    time: float
    samples: int
    non_finite: int
    loss: float | None
    mean_norm: float | None
    quantiles: list[float | None]
    sum_of_squares: list[float | None]
    square_of_sum: list[float | None]
    dot_squares: float | None = None
    hardest: list[tuple[int, float | None]] | None = None
    histogram: tuple[int, list[int]] | None = None
    evidence_sums: list[float | None] | None = None
    evidence_elements: list[int] | None = None
    cosines: list[list[float | None]] | None = None
    ids: list[int] | None = None


@runtime_checkable
class Writer(Protocol):
    """Where a monitor writes to: anything with these methods."""

    def start(self, run: Run) -> None:
        """Take what holds for all records to come."""

    def write(self, record: Record) -> None:
        """Take a record."""

    def close(self) -> None:
        """Let go of what is open; nothing is written after it."""


class JsonLines:
    """Writes a line of JSON for each record, and hands it to the system at once.

    What was written stays readable if the process is killed. A file that is there is continued; of a step that was
    measured before and after, the later record counts.

    Args:
        path: of the file.

    Example:
        >>> import tempfile, pathlib
        >>> from gradbatch.analysis import JsonLines, Run, read_log
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = pathlib.Path(directory) / "run.jsonl"
        ...     log = JsonLines(path)
        ...     log.start(Run({"weight": 6}, "standard"))
        ...     log.close()
        ...     read_log(path).run.parameters
        {'weight': 6}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir() or self.path.is_dir():
            raise UsageError(
                f"a log cannot be written to {path}: it is a directory, or in one that does not exist"
            )
        self._file = self.path.open("ab+")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")  # the line that a killed process left stays alone

    def start(self, run: Run) -> None:
        """Write what holds for all records to come."""
        self._line({"record": "run", "format": FORMAT, **asdict(run)})

    def write(self, record: Record) -> None:
        """Write a record."""
        self._line({"record": "step", **asdict(record)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, entry: Mapping[str, Any]) -> None:
        if self._file.closed:
            raise UsageError(f"the log {self.path} is closed; make a new monitor, which continues the file")
        self._file.write(json.dumps(_finite(entry), allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


class Csv:
    """Writes a line of comma-separated numbers for each record, for spreadsheets: whole-model numbers alone.

    Args:
        path: of the file; what is there is overwritten.
    """

    COLUMNS = (
        "step",
        "time",
        "samples",
        "non_finite",
        "loss",
        "mean_norm",
        "sum_of_squares",
        "square_of_sum",
    )

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = self.path.open("w", encoding="utf-8")
        self._line(self.COLUMNS)

    def start(self, run: Run) -> None:
        """Nothing: the columns do not depend on the run."""

    def write(self, record: Record) -> None:
        """Write a line; what is not finite is empty."""
        whole = {name: total(getattr(record, name)) for name in ("sum_of_squares", "square_of_sum")}
        values = {**asdict(record), **whole}
        self._line("" if values[name] is None else repr(values[name]) for name in self.COLUMNS)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, cells: Iterable[str]) -> None:
        self._file.write(",".join(cells) + "\n")
        self._file.flush()


@dataclass(frozen=True)
class Log:
    """What one or several files hold.

    Args:
        run: what holds for all records.
        ranks: the records of each file by step, in order; one file for each rank of data-parallel training.
        broken: lines that could not be read, as ``file:line``: a killed process leaves one, cut off.
    """

    run: Run
    ranks: list[list[Record]]
    broken: list[str]

    @property
    def records(self) -> list[Record]:
        """All records, by step."""
        return sorted((record for rank in self.ranks for record in rank), key=lambda record: record.step)


def read_log(*paths: str | os.PathLike[str]) -> Log:
    """Read the logs of a run: one file, or one of each rank.

    Args:
        paths: of files that :class:`JsonLines` wrote, complete or cut off anywhere.

    Returns: all that is whole.

    Raises:
        UsageError: there is no path or no such file, none has its first line, the files are of different models, or a
            file has the format of a later version.

    Edge cases: lines that are cut off are left out and listed. Of several records of one step in one file the last
    counts.
    """
    if not paths:
        raise UsageError("read_log takes the path of a log, or of one of each rank")
    runs: list[Run] = []
    ranks: list[list[Record]] = []
    broken: list[str] = []
    for path in paths:
        steps: dict[int, Record] = {}
        for number, entry in enumerate(_entries(Path(path)), 1):
            if isinstance(entry, Run):
                runs.append(entry)
            elif isinstance(entry, Record):
                steps[entry.step] = entry
            else:
                broken.append(f"{path}:{number}")
        ranks.append([steps[step] for step in sorted(steps)])
    if not runs:
        raise UsageError(
            f"{', '.join(map(str, paths))}: no line says what was measured; is it a gradbatch log?"
        )
    for run in runs:
        if run.parameters != runs[0].parameters:
            raise UsageError(f"{', '.join(map(str, paths))}: logs of different models, or parts of one")
    size = len(runs[-1].parameters)
    for record in (record for rank in ranks for record in rank):
        for parts in (
            record.sum_of_squares,
            record.square_of_sum,
            record.evidence_sums,
            record.evidence_elements,
        ):
            if parts is not None and len(parts) != size:
                raise UsageError(f"step {record.step} has {len(parts)} parameters; the run has {size}")
    return Log(runs[-1], ranks, broken)


def total(parts: Sequence[float | None]) -> float | None:
    """Sum over parameters; ``None`` where one is not finite."""
    finite = [part for part in parts if part is not None and math.isfinite(part)]
    return math.fsum(finite) if len(finite) == len(parts) else None


def _entries(path: Path) -> list[Run | Record | None]:
    """A run, a record, or ``None`` for each line that is neither."""
    try:
        return [_entry(line, path) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _entry(line: bytes, path: Path) -> Run | Record | None:
    try:
        entry = json.loads(line)
        if entry["record"] == "step":
            return Record(**_known(Record, entry))
        if entry["format"] > FORMAT:
            raise UsageError(
                f"{path} has format {entry['format']}, of a later gradbatch; this reads {FORMAT}"
            )
        return Run(**_known(Run, entry))
    except (ValueError, KeyError, TypeError):
        return None


def _known(kind: type[Run] | type[Record], entry: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: entry[field.name] for field in fields(kind) if field.name in entry}


def _finite(value: Any) -> Any:
    """The same with ``None`` for each number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
