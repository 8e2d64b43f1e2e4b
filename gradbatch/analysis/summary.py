"""What a log says: noise scales over time, batch sizes by rules, and what looks wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradbatch.analysis.batch_size import BatchTest, inner_product_test, norm_test, orthogonality_test
from gradbatch.analysis.log import Log, Record, total
from gradbatch.analysis.noise import NoiseScale
from gradbatch.analysis.norms import norm_quantiles
from gradbatch.analysis.parts import partition, rms_norms, stacked, step_sizes

MOST_WINDOWS = 16
# Records to average over: as many as a noise scale wants, and as few as say anything where the run has no more.
ENOUGH_RECORDS, LEAST_RECORDS = 20, 8
EXPLODED = 100.0  # times its usual norm


def whole_noise(records: Sequence[Record]) -> NoiseScale:
    """Noise scale of all parameters together.

    Args:
        records: of one or several ranks.
    """
    noise = NoiseScale()
    for counts, squares, square in stacked(records):
        noise.update_all(counts, squares.sum(1), square.sum(1))
    return noise


def evidence(record: Record) -> float | None:
    """Evidence that what is left of the gradient is noise, see :func:`~gradbatch.analysis.stopping_evidence`.

    Returns: ``None`` where it was not measured, or is not defined.
    """
    if record.evidence_sums is None or record.evidence_elements is None:
        return None
    ratios, elements = total(record.evidence_sums), sum(record.evidence_elements)
    return None if ratios is None or not elements else 1 - record.samples * ratios / elements


def windows(log: Log, least: int = LEAST_RECORDS) -> list[list[Record]]:
    """The records in order, cut into stretches: sixteen, of 20 records at least.

    Where there are fewer records, into as many stretches of ``least`` as there are, up to eight.

    Args:
        log: with any number of records.
        least: fewest records to average over; what is no average does with 1.
    """
    records = [record for record in log.records if record.samples > 1]
    few = min(MOST_WINDOWS // 2 if least > 1 else MOST_WINDOWS, len(records) // least)
    count = max(1, few, min(MOST_WINDOWS, len(records) // ENOUGH_RECORDS))
    edges = [len(records) * i // count for i in range(count + 1)]
    return [records[start:stop] for start, stop in pairwise(edges) if stop > start]


def recent(log: Log) -> list[Record]:
    """The last third of the records, and at least twenty, where there are so many."""
    records = log.records
    return records[-max(ENOUGH_RECORDS, -(-len(records) // 3)) :]


@dataclass(frozen=True)
class SizeByTest:
    """The batch size at which a test would just be passed, over the recent records.

    Args:
        test: its name.
        median, lower, upper: median and quartiles over records.
        passed: part of the records in which the step's batch, of all ranks together, was as large.
    """

    test: str
    median: float
    lower: float
    upper: float
    passed: float


def sizes_by_test(log: Log) -> list[SizeByTest]:
    """What the tests of batch sizes say of the recent records; those that the log has the numbers for."""
    tests: dict[str, list[tuple[BatchTest, bool]]] = {}
    sizes = step_sizes(log)
    for record in recent(log):
        squares, square, dots = total(record.sum_of_squares), total(record.square_of_sum), record.dot_squares
        if squares is None or square is None:
            continue
        made = {"norm test": norm_test(record.samples, squares, square)}
        if dots is not None:
            made["inner product test"] = inner_product_test(record.samples, square, dots)
            made["orthogonality test"] = orthogonality_test(record.samples, squares, square, dots)
        for name, result in made.items():
            if not math.isnan(result.ratio):
                enough = result.batch_size <= sizes[record.step]
                tests.setdefault(name, []).append((result, enough))
    found = []
    for name, results in tests.items():
        asked = torch.tensor([result.batch_size for result, _ in results])
        median, lower, upper = norm_quantiles(asked, (0.5, 0.25, 0.75)).tolist()
        passed = sum(enough for _, enough in results) / len(results)
        found.append(SizeByTest(name, median, lower, upper, passed))
    return found


def warnings(log: Log) -> list[str]:
    """What looks wrong, in words; nothing where nothing does."""
    return [*_about_samples(log), *_about_layers(log), *_about_lines(log)]


def _about_samples(log: Log) -> list[str]:
    bad = [record for record in log.records if record.non_finite]
    if not bad:
        return []
    count = sum(record.non_finite for record in bad)
    counted = "1 gradient of a sample is" if count == 1 else f"{count} gradients of samples are"
    known = sorted({sample for record in bad for sample, norm in record.hardest or () if norm is None})
    which = f" Among them: {_shown([f'sample {sample}' for sample in known])}." if known else ""
    return [
        f"{counted} not finite, in {len(bad)} of {len(log.records)} records, first in step "
        f"{bad[0].step}.{which} These batches are left out of the noise scale of the layers concerned, and of the "
        "whole model."
    ]


def _about_layers(log: Log) -> list[str]:
    found = []
    stretches = windows(log)
    names = partition(log.run, "layer").names
    norms = [rms_norms(log, stretch) for stretch in stretches]
    dead = [name for place, name in enumerate(names) if norms and norms[-1][place] == 0]
    if dead:
        found.append(f"No gradient reaches {_listed(dead)} at the end of the run.")
    for place, name in enumerate(names):
        course = [at[place] for at in norms]
        usual = statistics.median(course) if course else 0.0
        if usual > 0 and course[-1] > EXPLODED * usual:
            found.append(
                f"The gradients of {_listed([name])} explode: at the end their norm is {course[-1] / usual:.0f} times "
                "the median over the run."
            )
    return found


def _about_lines(log: Log) -> list[str]:
    found = []
    if log.broken:
        lines = "line was" if len(log.broken) == 1 else "lines were"
        found.append(
            f"{len(log.broken)} {lines} cut off, or of another program, and left out ({', '.join(log.broken[:3])})."
        )
    end = min((rank[-1].step for rank in log.ranks if rank), default=0)
    if len({tuple(record.step for record in rank if record.step <= end) for rank in log.ranks}) > 1:
        found.append(
            "The logs have measured different steps, as the ranks of one run never do. Of different runs, make a page "
            "each: here their batches are added up."
        )
    if log.replaced:
        found.append(
            f"{log.replaced} records are left out, since later ones of the same file count: a resumed run went back to "
            "an earlier step. Otherwise steps are counted anew in each epoch, or several processes write to one file: "
            "give each step a number, and each process a file, of its own."
        )
    return found


def _listed(names: Sequence[str]) -> str:
    return _shown([name or "the model's own parameters" for name in names])


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
