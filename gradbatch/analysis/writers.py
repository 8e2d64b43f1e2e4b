"""Writers of logs: a line for each record, handed to the system at once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradbatch.analysis.log import FORMAT, Record, Run, Writer, entry_of, total
from gradbatch.errors import UsageError

# How the first line of every log starts.
START = b'{"record":"'


class JsonLines:
    """Writes a line of JSON for each record, and hands it to the system at once.

    What was written stays readable if the process is killed. A log that is there is continued; where a run goes back to
    an earlier step, the later records count.

    Args:
        path: of the file.

    Raises:
        UsageError: the file cannot be written to, or is something else than a log; when it is started, it is the log of
            another model.

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
        self._lines = _Lines(path, START, "gradbatch log")
        self.path = self._lines.path

    def start(self, run: Run) -> None:
        """Write what holds for all records to come."""
        # Of a line that a killed process has left half, nobody knows.
        first = entry_of(self._lines.first(), self.path)
        if isinstance(first, Run) and first.parameters != run.parameters:
            raise UsageError(
                f"{self.path} is the log of a model with other parameters, and would be readable as neither's: take "
                "another path, or move that file away"
            )
        self._add({"record": "run", "format": FORMAT, **vars(run)})

    def write(self, record: Record) -> None:
        """Write a record."""
        self._add({"record": "step", **vars(record)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _add(self, entry: Mapping[str, Any]) -> None:
        self._lines.add(json.dumps(_finite(entry), allow_nan=False, separators=(",", ":")))


class Csv:
    """Writes a line of comma-separated numbers for each record, for spreadsheets: whole-model numbers alone.

    Args:
        path: of the file. A table that is there is continued; steps that a resumed run measures again are in it twice.

    Raises:
        UsageError: the file cannot be written to, or is something else than such a table.
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
        self._header = ",".join(self.COLUMNS)
        self._lines = _Lines(path, self._header.encode(), "table of a monitor")
        self.path = self._lines.path

    def start(self, run: Run) -> None:
        """Write the names of the columns, which do not depend on the run, to a new file."""
        if not self._lines.first():
            self._lines.add(self._header)

    def write(self, record: Record) -> None:
        """Write a line; what is not finite is empty."""
        whole = {name: total(getattr(record, name)) for name in ("sum_of_squares", "square_of_sum")}
        values = {**vars(record), **whole}
        self._lines.add(",".join("" if values[name] is None else repr(values[name]) for name in self.COLUMNS))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def writers_of(
    log: str | os.PathLike[str] | Writer | Sequence[str | os.PathLike[str] | Writer],
) -> list[Writer]:
    """A monitor's writers: one, or several, each a writer or the path of a :class:`JsonLines` file.

    Raises:
        UsageError: one is neither.
    """
    if isinstance(log, (str, os.PathLike)):
        return [JsonLines(log)]
    if isinstance(log, Writer):
        return [log]
    if isinstance(log, Sequence):
        return [writer for one in log for writer in writers_of(one)]
    raise UsageError(
        f"a log is a path, a writer (with start, write and close), or several, not a {type(log).__name__}"
    )


class _Lines:
    """A file that lines are added to; what is there is continued, if it is of the same kind.

    Args:
        path: of the file.
        start: that each file of this kind starts with.
        kind: what such files are.
    """

    def __init__(self, path: str | os.PathLike[str], start: bytes, kind: str) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("ab+")
            if self.first() and not start.startswith(self.first()[: len(start)].rstrip(b"\n")):
                self._file.close()
                raise UsageError(f"{path} is there and is no {kind}; take another path")
            if self.first():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")  # the line that a killed process left stays alone
                    self._file.flush()
        except OSError as error:
            raise UsageError(f"a log cannot be written to {path}: {error.strerror or error}") from error

    def first(self) -> bytes:
        """The first line; empty in a new file, and in what is no file: a device may never come to its end."""
        if not self.path.is_file():
            return b""
        self._file.seek(0)
        return self._file.readline()

    def add(self, line: str) -> None:
        if self._file.closed:
            raise UsageError(f"the log {self.path} is closed; make a new monitor, which continues the file")
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(f"the log {self.path} could not be written: {error.strerror}") from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise UsageError(
                f"the end of the log {self.path} could not be written: {error.strerror}"
            ) from error


def _finite(value: Any) -> Any:
    """The same with ``None`` for each number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
