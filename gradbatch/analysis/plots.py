"""Pictures of a log, drawn by matplotlib: each function takes a log and returns a figure."""

from __future__ import annotations

import importlib
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from gradbatch.analysis.intervals import FEWEST, mean_interval
from gradbatch.analysis.log import Log, Record
from gradbatch.analysis.norms import LEVELS
from gradbatch.analysis.parts import batch_size, part_noise, step_sizes
from gradbatch.analysis.summary import (
    LEAST_RECORDS,
    MOST_WINDOWS,
    evidence as evidence_of,
    whole_noise,
    windows,
)
from gradbatch.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.8, 3.2)  # inches: readable on a telephone, where it is as wide as the screen
BLUE, RED, GREY = "#1f5fa8", "#b3372f", "#6b7280"
MOST_ROWS, MOST_SAMPLES, MOST_POINTS = 24, 10, 500

Point = TypeVar("Point")


def noise_scale(log: Log) -> Figure:
    """Noise scale against the step, with its 95% interval, and the batch size.

    Args:
        log: with two records of at least two samples.

    Raises:
        UsageError: matplotlib is not installed, or the log has less.

    Edge cases: where the estimate is infinite (the gradient does not stand out of its noise), only the lower end of the
    interval is drawn, as a triangle that points upwards. The batch is that of all ranks.
    """
    figure, axes = _figure("step", "samples")
    resolved, unresolved = [], []
    for stretch in _stretches(log):
        noise = whole_noise(stretch)
        (low, high), value = noise.interval(), float(noise.value())
        middle = sum(record.step for record in stretch) / len(stretch)
        if math.isfinite(value) and value > 0:
            resolved.append((middle, value, float(low), float(high)))
        elif value > 0:
            unresolved.append((middle, float(low)))
    sizes = sorted(step_sizes(log).items())
    batches = [
        (part[len(part) // 2][0], sum(size for _, size in part) / len(part)) for part in _thinned(sizes)
    ]
    marks = [value for _, value, _, _ in resolved] + [low for _, low in unresolved]
    marks += [samples for _, samples in batches]
    marks = [mark for mark in marks if 0 < mark < math.inf]
    # Ends of intervals may be at any distance: what is further away goes to the edge of the picture.
    bottom, top = min(marks) / 4, max(marks) * 4
    if resolved:
        steps, values, lows, highs = zip(*resolved, strict=True)
        band = [max(low, bottom) for low in lows], [min(high, top) for high in highs]
        axes.fill_between(steps, *band, color=BLUE, alpha=0.18, linewidth=0)
        if len(steps) == 1:  # of which a band has no width
            axes.vlines(steps, *band, color=BLUE, alpha=0.4)
        axes.plot(steps, values, color=BLUE, marker="o", markersize=3.5, label="noise scale")
    if unresolved:
        steps, lows = zip(*unresolved, strict=True)
        axes.plot(
            steps,
            [min(max(low, bottom), top) for low in lows],
            "^",
            color=BLUE,
            markersize=5,
            label="at least",
        )
    axes.plot(*zip(*batches, strict=True), color=GREY, linestyle="--", linewidth=1.2, label="batch size")
    axes.set(yscale="log", ylim=(bottom, top))
    _legend(axes)
    return figure


def gradient_norms(log: Log) -> Figure:
    """Quantiles of the norms of samples' gradients against the step: median, middle half, 5% to 95%, largest.

    Args:
        log: with two records of at least two samples.

    Raises:
        UsageError: matplotlib is not installed, or the log has less.

    Edge cases: records without a finite norm are left out. Of more than there is room for, the median of each
    quantile is drawn, and the largest of all.
    """
    _stretches(log)
    figure, axes = _figure("step", "norm of a sample's gradient")
    points = []
    for part in _thinned([record for record in log.records if None not in record.quantiles]):
        of_part = zip(*([value or 0.0 for value in record.quantiles] for record in part), strict=True)
        *below, largest = of_part
        points.append((part[len(part) // 2].step, *map(statistics.median, below), max(largest)))
    if points:
        steps, *values = zip(*points, strict=True)
        at = dict(zip(LEVELS, values, strict=True))
        axes.fill_between(steps, at[0.05], at[0.95], color=BLUE, alpha=0.15, linewidth=0, label="5% to 95%")
        axes.fill_between(steps, at[0.25], at[0.75], color=BLUE, alpha=0.3, linewidth=0, label="middle half")
        axes.plot(steps, at[0.5], color=BLUE, linewidth=1.2, label="median")
        axes.plot(steps, at[1.0], color=RED, linewidth=0, marker=".", markersize=2, label="largest")
        if any(value > 0 for value in at[0.5]):
            axes.set_yscale("log")
    _legend(axes)
    return figure


def loss(log: Log) -> Figure:
    """The batch's mean loss against the step.

    Args:
        log: of a monitor that was told the losses.

    Raises:
        UsageError: matplotlib is not installed, or no record has a loss that is finite.

    Edge cases: of more records than there is room for, the median of some together. Each rank's is its own share's.
    """
    known = [(record.step, record.loss) for record in _records(log) if record.loss is not None]
    if not known:
        raise UsageError("no record has a loss; set step.loss in the monitor's with block")
    figure, axes = _figure("step", "loss")
    parts = _thinned(known)
    steps = [part[len(part) // 2][0] for part in parts]
    axes.plot(
        steps, [statistics.median(value for _, value in part) for part in parts], color=BLUE, linewidth=1.2
    )
    return figure


def norm_histogram(log: Log) -> Figure:
    """Histogram of the norms of samples' gradients, over time: how many of the samples have which norm.

    Args:
        log: with two records of at least two samples.

    Raises:
        UsageError: matplotlib is not installed, the log has less, or no record has a histogram.

    Edge cases: norms that are zero or not finite are left out.
    """
    stretches, columns = _stretches(log, 1), []
    for stretch in stretches:
        counts: defaultdict[int, int] = defaultdict(int)
        for record in stretch:
            first, found = record.histogram or (0, [])
            for place, count in enumerate(found):
                counts[first + place] += count
        columns.append(counts)
    bins = [place for counts in columns for place in counts]
    if not bins:
        raise UsageError("no record has a histogram of norms: it was made by an earlier version")
    rows = range(min(bins), max(bins) + 1)
    shares = [
        [counts[place] / max(1, sum(counts.values())) or math.nan for counts in columns] for place in rows
    ]
    figure, axes = _figure("step", "norm of a sample's gradient")
    edges = [2 ** (place / 2) for place in (*rows, rows.stop)]
    # Else the first steps, in which all norms are alike, would leave no colour for the rest.
    scale = importlib.import_module("matplotlib.colors").PowerNorm(0.5, 0)
    image = axes.pcolormesh(_edges(log, stretches), edges, shares, cmap="Blues", norm=scale)
    axes.set_yscale("log")
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="share of the samples")
    return figure


def agreement(log: Log) -> Figure:
    """Cosines of the angles between the gradients of the batch's first samples, in the last record that has them.

    Args:
        log: of a monitor with the preset ``"full"``.

    Raises:
        UsageError: matplotlib is not installed, or no record has angles.

    Edge cases: a gradient that is zero or not finite has a white row and column.
    """
    found = [record for record in _records(log) if record.cosines]
    if not found:
        raise UsageError('no record has the angles between gradients; measure them with preset="full"')
    rows = [[math.nan if value is None else value for value in row] for row in found[-1].cosines or []]
    figure, axes = _figure("sample", "sample")
    image = axes.imshow(rows, cmap="RdBu", vmin=-1, vmax=1)
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="cosine")
    return figure


def evidence(log: Log) -> Figure:
    """Evidence that what is left of the gradient is noise, against the step; above the line, training may stop.

    The mean over some batches has the 95% interval of :func:`~gradbatch.analysis.mean_interval`.

    Args:
        log: of a monitor with the preset ``"full"``.

    Raises:
        UsageError: matplotlib is not installed, or no record has evidence.

    Edge cases: no interval where a mean is over fewer than four batches.
    """
    known = [(record.step, value) for record in _records(log) if (value := evidence_of(record)) is not None]
    if not known:
        raise UsageError('no record has evidence for stopping; measure it with preset="full"')
    figure, axes = _figure("step", "evidence")
    some = [part[0] for part in _thinned(known)]
    axes.plot(*zip(*some, strict=True), ".", color=GREY, markersize=3, label="a batch")
    size = max(FEWEST, -(-len(known) // MOST_WINDOWS))
    parts = torch.tensor(known, dtype=torch.double).split(size)
    steps, means = torch.stack([part.mean(0) for part in parts]).unbind(1)
    low, high = torch.tensor([mean_interval(part[:, 1]) for part in parts]).unbind(1)
    axes.fill_between(steps, low, high, where=high.isfinite(), color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(steps, means, color=BLUE, marker="o", markersize=3.5, label="mean")
    axes.axhline(0, color=RED, linewidth=1.2, linestyle="--", label="only noise is left")
    _legend(axes)
    return figure


def layer_signal(log: Log) -> Figure:
    """Signal to noise ratio of the batch's mean gradient, layer by layer and over time, as a heat map.

    Args:
        log: with two records of at least two samples.

    Raises:
        UsageError: matplotlib is not installed, or the log has less.

    Edge cases: ratios below 0.01, and above 100, have the colour of the end of the scale; a layer without gradients is
    left white. Of more layers than there is room for, the first are drawn.
    """
    columns, stretches = [], _stretches(log)
    names: list[str] = []
    for stretch in stretches:
        names, noise = part_noise(log, stretch)
        columns.append(noise.signal_to_noise(batch_size(log, stretch)).tolist()[:MOST_ROWS])
    shown = names[:MOST_ROWS]
    figure, axes = _figure("step", "", height=max(2.6, 1.2 + 0.22 * len(shown)))
    norm = importlib.import_module("matplotlib.colors").LogNorm(0.01, 100)
    rows = [[min(max(value, 0.01), 100.0) for value in row] for row in zip(*columns, strict=True)]
    image = axes.pcolormesh(_edges(log, stretches), range(len(shown) + 1), rows, norm=norm, cmap="RdYlBu")
    axes.set_yticks(
        [place + 0.5 for place in range(len(shown))], [_short(name) for name in shown], parse_math=False
    )
    axes.invert_yaxis()
    figure.colorbar(image, ax=axes, label="signal to noise")
    return figure


def hardest_samples(log: Log) -> Figure:
    """Samples with the largest gradients: the sum of their norms over the batches that they were among the largest of.

    How often that was is written behind each bar. For all samples and not eight of each batch,
    :class:`~gradbatch.analysis.SampleScores`.

    Args:
        log: of a monitor that was given the samples' ids.

    Raises:
        UsageError: matplotlib is not installed, or no record has ids, or none has a norm that is finite.
    """
    norms: defaultdict[int, list[float]] = defaultdict(list)
    for record in _records(log):
        for sample, norm in record.hardest or ():
            if norm is not None:
                norms[sample].append(norm)
    if not norms:
        raise UsageError(
            "no record says which samples have the largest gradients; give the monitor their ids="
        )
    order = sorted(norms, key=lambda sample: (-sum(norms[sample]), sample))[:MOST_SAMPLES]
    figure, axes = _figure("sum of gradient norms", "sample")
    sums = [sum(norms[sample]) for sample in order]
    bars = axes.barh(range(len(order)), sums, color=BLUE, alpha=0.8)
    axes.bar_label(bars, [f"{len(norms[sample])}×" for sample in order], padding=3, color=GREY, fontsize=9)
    axes.set_yticks(range(len(order)), [str(sample) for sample in order])
    axes.set_xlim(0, 1.15 * max(sums) or 1)
    axes.invert_yaxis()
    return figure


def _records(log: Log) -> list[Record]:
    if not isinstance(log, Log):
        raise UsageError(f"a picture is of a log, not of a {type(log).__name__}: plots.loss(read_log(path))")
    return log.records


def _stretches(log: Log, least: int = LEAST_RECORDS) -> list[list[Record]]:
    _records(log)
    stretches = windows(log, least)
    if not stretches:
        raise UsageError("the log has no record of two samples or more: there is nothing to draw")
    return stretches


def _thinned(points: Sequence[Point]) -> list[Sequence[Point]]:
    """Points one by one, or some together where there are more than a line has room for."""
    size = max(1, -(-len(points) // MOST_POINTS))
    return [points[start : start + size] for start in range(0, len(points), size)]


def _edges(log: Log, stretches: list[list[Record]]) -> list[int]:
    """The steps between stretches."""
    return [*(stretch[0].step for stretch in stretches), log.records[-1].step + 1]


def _figure(x: str, y: str, height: float = SIZE[1]) -> tuple[Figure, Axes]:
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install 'gradbatch[analysis]'") from error
    # Not by pyplot, which would open windows and keep every figure.
    figure: Figure = figures.Figure(figsize=(SIZE[0], height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9, columnspacing=1.2
        )


def _short(name: str) -> str:
    """The end of a path, which is what tells layers apart."""
    return (name if len(name) <= 18 else f"…{name[-17:]}") or "(model)"
