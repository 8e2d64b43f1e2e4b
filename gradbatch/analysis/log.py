"""What a log of gradient statistics holds, and how it is read, however the run ended."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

from gradbatch.analysis.norms import LEVELS
from gradbatch.errors import UsageError

FORMAT = 1
# What JSON may have for a number or a string; True is no number.
SCALARS: Mapping[Any, set[type]] = {int: {int}, float: {int, float}, str: {str}, NoneType: {NoneType}}


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


@dataclass(frozen=True)
class Log:
    """What one or several files hold.

    Args:
        run: what holds for all records.
        ranks: the records of each file by step, in order; one file for each rank of data-parallel training.
        broken: lines that could not be read, as ``file:line``: a killed process leaves one, cut off.
        replaced: how many records later ones of the same file stand for, see :func:`read_log`.
    """

    run: Run
    ranks: list[list[Record]]
    broken: list[str]
    replaced: int = 0

    @cached_property
    def records(self) -> list[Record]:
        """All records, by step."""
        return sorted((record for rank in self.ranks for record in rank), key=lambda record: record.step)


def read_log(*paths: str | os.PathLike[str]) -> Log:
    """Read the logs of a run: one file, or one of each rank.

    Args:
        paths: of files that :class:`~gradbatch.analysis.JsonLines` wrote, complete or cut off anywhere.

    Returns: all that is whole.

    Raises:
        UsageError: there is no path or no such file, one is given twice, none has its first line, the files are of
            different models or have different presets or groups, or a file has the format of a later version.

    Edge cases: lines that are cut off are left out and listed. Where a file was continued by a process that went back
    to an earlier step, only what that one measured counts from this step on. Of several records of one step in one file
    the last counts.
    """
    if not paths:
        raise UsageError("read_log takes the path of a log, or of one of each rank")
    names = ", ".join(map(str, paths))
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise UsageError(f"{names}: a log is given twice, and each of its batches would count for two")
    runs: list[Run] = []
    last: list[Run] = []
    ranks: list[list[Record]] = []
    broken: list[str] = []
    replaced = 0
    for path in paths:
        entries = _entries(Path(path))
        own = [entry for entry in entries if isinstance(entry, Run)]
        runs, last = runs + own, last + own[-1:]
        broken += [f"{path}:{number}" for number, entry in enumerate(entries, 1) if entry is None]
        ranks.append(_in_force(entries))
        replaced += sum(isinstance(entry, Record) for entry in entries) - len(ranks[-1])
    if not runs:
        raise UsageError(f"{names}: no line says what was measured; is it a gradbatch log?")
    for run in runs:
        if run.parameters != runs[0].parameters:
            raise UsageError(f"{names}: logs of different models, or parts of one")
    # A continued log may have changed its preset or groups; the ranks of a run have not, at its end.
    if any((run.preset, run.groups) != (last[0].preset, last[0].groups) for run in last):
        raise UsageError(
            f"{names}: presets or groups differ, so these are no ranks of one run; read each by itself"
        )
    for record in (record for rank in ranks for record in rank):
        _check_sizes(record, len(runs[-1].parameters))
    return Log(runs[-1], ranks, broken, replaced)


def _in_force(entries: Sequence[Run | Record | None]) -> list[Record]:
    """By step, what no later record stands for."""
    steps: dict[int, Record] = {}
    started = False
    for entry in entries:
        if isinstance(entry, Run):
            started = True
        elif entry is not None:
            if started:  # what an earlier process measured from here on is of a course that was given up
                steps = {step: record for step, record in steps.items() if step < entry.step}
                started = False
            steps[entry.step] = entry
    return [steps[step] for step in sorted(steps)]


def _check_sizes(record: Record, size: int) -> None:
    for parts in (
        record.sum_of_squares,
        record.square_of_sum,
        record.evidence_sums,
        record.evidence_elements,
    ):
        if parts is not None and len(parts) != size:
            raise UsageError(f"step {record.step} has {len(parts)} parameters; the run has {size}")


def total(parts: Sequence[float | None]) -> float | None:
    """Sum over parameters; ``None`` where one, or the sum, is not finite."""
    finite = [part for part in parts if part is not None and math.isfinite(part)]
    try:
        return math.fsum(finite) if len(finite) == len(parts) else None
    except OverflowError:
        return None


def _entries(path: Path) -> list[Run | Record | None]:
    """A run, a record, or ``None`` for each line that is neither."""
    try:
        return [entry_of(line, path) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def entry_of(line: bytes, path: Path) -> Run | Record | None:
    """A run or a record of a line; ``None`` where it is neither, is cut off, or has other things in it.

    Raises:
        UsageError: it is of a later format.
    """
    try:
        entry = json.loads(line)
        if entry["record"] == "step":
            record = _made(Record, entry)
            return record if record and _is_whole(record) else None
        if entry["record"] != "run":
            return None
        if entry["format"] > FORMAT:
            raise UsageError(
                f"{path} has format {entry['format']}, of a later gradbatch; this reads {FORMAT}"
            )
        run = _made(Run, entry)
        known = run is not None and all(run.parameters.keys() >= {*names} for names in run.groups.values())
        return run if known else None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _is_whole(record: Record) -> bool:
    cosines = record.cosines or []
    return len(record.quantiles) == len(LEVELS) and all(len(row) == len(cosines) for row in cosines)


Kind = TypeVar("Kind", Run, Record)


def _made(kind: type[Kind], entry: Mapping[str, Any]) -> Kind | None:
    """A run or a record; ``None`` where something in it is of another type."""
    given = {name: entry[name] for name in CHECKS[kind] if name in entry}
    return kind(**given) if all(CHECKS[kind][name](value) for name, value in given.items()) else None


def _check(hint: Any) -> Callable[[Any], bool]:
    """Whether a value that JSON gave is of a type."""
    inner = get_args(hint)
    if hint in SCALARS or (isinstance(hint, UnionType) and all(one in SCALARS for one in inner)):
        types = {scalar for one in inner or (hint,) for scalar in SCALARS[one]}
        # Python reads NaN, 1e999 and whole numbers of any size too, which no writer of ours writes and no tensor holds.
        return lambda value: (
            type(value) in types
            and (type(value) not in (int, float) or math.isfinite(value))
            and (type(value) is not int or float in types or -(2**63) <= value < 2**63)
        )
    checks = [_check(one) for one in inner]
    if isinstance(hint, UnionType):
        return lambda value: any(check(value) for check in checks)
    if get_origin(hint) is list:
        return lambda value: type(value) is list and all(map(checks[0], value))
    if get_origin(hint) is dict:
        return lambda value: type(value) is dict and all(map(checks[1], value.values()))
    # A tuple, for which JSON has lists.
    return lambda value: (
        type(value) is list
        and len(value) == len(checks)
        and all(check(one) for check, one in zip(checks, value, strict=True))
    )


CHECKS = {kind: {name: _check(hint) for name, hint in get_type_hints(kind).items()} for kind in (Run, Record)}
