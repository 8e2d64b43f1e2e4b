"""What a log says: noise scales over time and by layer, and what looks wrong."""

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

MOST_WINDOWS, LEAST_RECORDS = 16, 20
EXPLODED = 100.0  # times its usual norm


@dataclass(frozen=True)
class Layer:
    """The gradients of a layer's parameters at the end of a run.

    Args:
        name: path of the module; ``""`` is the model itself.
        elements: of its parameters together.
        norm: root of the mean squared norm of a sample's gradient; NaN without finite records.
        noise: its noise scale; NaN for a layer without gradients.
        interval: of the noise scale.
        signal_to_noise: of the mean gradient over a batch.
        share: of the noise of all layers together.
    """

    name: str
    elements: int
    norm: float
    noise: float
    interval: tuple[float, float]
    signal_to_noise: float
    share: float


def layer_of(parameter: str) -> str:
    """Path of the module that a parameter is in."""
    return parameter.rpartition(".")[0]


def whole_noise(records: Sequence[Record]) -> NoiseScale:
    """Noise scale of all parameters together.

    Args:
        records: of one or several ranks.
    """
    noise = NoiseScale()
    for record in records:
        squares, square = total(record.sum_of_squares), total(record.square_of_sum)
        if squares is not None and square is not None:
            noise.update(record.samples, torch.tensor(squares), torch.tensor(square))
    return noise


def layer_noise(log: Log, records: Sequence[Record]) -> tuple[list[str], NoiseScale]:
    """Names of the layers, and their noise scales, ``[layers]``.

    Args:
        log: that the records are of.
        records: some of its records.
    """
    names, places = _layers(log)
    noise = NoiseScale((len(names),))
    for record in records:
        parts = [
            torch.zeros(len(names), dtype=torch.double).index_add(0, places, _numbers(part))
            for part in (record.sum_of_squares, record.square_of_sum)
        ]
        noise.update(record.samples, *parts)
    return names, noise


def windows(log: Log) -> list[list[Record]]:
    """The records in order, cut into stretches that are long enough to average over."""
    records = [record for record in log.records if record.samples > 1]
    count = max(1, min(MOST_WINDOWS, len(records) // LEAST_RECORDS))
    edges = [len(records) * i // count for i in range(count + 1)]
    return [records[start:stop] for start, stop in pairwise(edges) if stop > start]


def recent(log: Log) -> list[Record]:
    """The last third of the records, and at least twenty, where there are so many."""
    records = log.records
    return records[-max(20, -(-len(records) // 3)) :]


def layers_at_end(log: Log) -> list[Layer]:
    """The gradients of each layer, from the recent records.

    Args:
        log: with one record at least.
    """
    records = recent(log)
    names, noise = layer_noise(log, records)
    _, places = _layers(log)
    elements = torch.zeros(len(names), dtype=torch.long).index_add(
        0, places, torch.tensor(list(log.run.parameters.values()))
    )
    batch = sum(record.samples for record in records) / len(records)
    low, high = noise.interval()
    variances = noise.variance()
    found = zip(
        names,
        elements.tolist(),
        _rms_norms(log, records),
        noise.value().tolist(),
        low.tolist(),
        high.tolist(),
        noise.signal_to_noise(batch).tolist(),
        (variances / variances.nansum()).tolist(),
        strict=True,
    )
    return [
        Layer(name, n, norm, value, (lo, hi), snr, share)
        for name, n, norm, value, lo, hi, snr, share in found
    ]


@dataclass(frozen=True)
class SizeByTest:
    """The batch size at which a test would just be passed, over the recent records.

    Args:
        test: its name.
        median, lower, upper: median and quartiles over records.
        passed: part of the records whose batch passed.
    """

    test: str
    median: float
    lower: float
    upper: float
    passed: float


def sizes_by_test(log: Log) -> list[SizeByTest]:
    """What the tests of batch sizes say of the recent records; those that the log has the numbers for."""
    tests: dict[str, list[BatchTest]] = {}
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
                tests.setdefault(name, []).append(result)
    found = []
    for name, results in tests.items():
        sizes = torch.tensor([result.batch_size for result in results])
        median, lower, upper = norm_quantiles(sizes, (0.5, 0.25, 0.75)).tolist()
        passed = sum(result.passed for result in results) / len(results)
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
    return [
        f"{count} gradients of samples are not finite, in {len(bad)} of {len(log.records)} records, first in step "
        f"{bad[0].step}. These batches are left out of the noise scale of the layers concerned, and of the whole model."
    ]


def _about_layers(log: Log) -> list[str]:
    found = []
    stretches = windows(log)
    names, _ = _layers(log)
    norms = [_rms_norms(log, stretch) for stretch in stretches]
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
    if not log.broken:
        return []
    lines = "line was" if len(log.broken) == 1 else "lines were"
    return [f"{len(log.broken)} {lines} cut off and left out ({', '.join(log.broken[:3])})."]


def _rms_norms(log: Log, records: Sequence[Record]) -> list[float]:
    """Root of the mean squared norm of a sample's gradient, for each layer; NaN where no record is finite."""
    names, places = _layers(log)
    sums, counts = torch.zeros(len(names), dtype=torch.double), torch.zeros(len(names), dtype=torch.double)
    for record in records:
        squares = torch.zeros_like(sums).index_add(0, places, _numbers(record.sum_of_squares))
        sums += squares.nan_to_num(nan=0.0)
        counts += record.samples * squares.isfinite()
    return (sums / counts).sqrt().tolist()


def _layers(log: Log) -> tuple[list[str], torch.Tensor]:
    """Names of the layers, and for each parameter the place of its layer among them."""
    layers = [layer_of(name) for name in log.run.parameters]
    names = list(dict.fromkeys(layers))
    return names, torch.tensor([names.index(layer) for layer in layers])


def _numbers(parts: Sequence[float | None]) -> torch.Tensor:
    return torch.tensor([torch.nan if part is None else part for part in parts], dtype=torch.double)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name or "the model's own parameters" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
