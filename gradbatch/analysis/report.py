"""A page about a run's gradients, made from its log."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gradbatch.analysis import page, plots
from gradbatch.analysis.agreement import stiffness, stiffness_interval
from gradbatch.analysis.log import Log, Record, read_log
from gradbatch.analysis.noise import NoiseScale
from gradbatch.analysis.parts import By, batch_size, numbers, parts_of, step_sizes
from gradbatch.analysis.summary import evidence, recent, sizes_by_test, warnings, whole_noise
from gradbatch.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "parameters",
    "gradient norm",
    "noise scale",
    "95% interval",
    "signal to noise",
    "share of noise",
)

TEST_COLUMNS = ("test", "batch size (median)", "middle half", "passed")

READING = (
    "The noise scale is the batch size at which the noise of the mean gradient is as large as the gradient: the trace "
    "of the covariance of a sample's gradient over the squared norm of the true gradient. Both are estimated without "
    "bias in each batch, averaged over batches, and divided last (An Empirical Model of Large-Batch Training, "
    "McCandlish et al., 2018, arXiv:1812.06162). The interval takes batches for independent draws from one state of "
    "the model; while the model changes quickly it is of the average.",
    "Signal to noise is that of the mean gradient over a batch of the run's size: batch size over noise scale. The "
    "gradient norm of a layer is the root mean square over samples, each of its own loss.",
    "The tests ask of each batch alone whether its mean gradient can be relied on: as a vector (norm test, Byrd et "
    "al., 2012), as a direction downhill (inner product test) that does not stray sideways (orthogonality test, "
    "Bollapragada et al., 2018, arXiv:1710.11258). They take the batch's own mean for the gradient, noise included, "
    "and so ask for smaller batches than the noise scale where noise prevails. Each "
    "rank's share is a batch of its own.",
)


def write_report(
    logs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> Path:
    """Write a self-contained HTML page about a run: in words, in pictures, layer by layer.

    Args:
        logs: path of the run's log, or of one log for each rank of data-parallel training.
        output: of the page; what is there is overwritten.

    Returns: the page's path.

    Raises:
        UsageError: a log cannot be read or has no record of two samples, matplotlib is not installed, or the page
            cannot be written, or would be written over a log.

    Edge cases: of a log that is cut off all whole lines are used, and the page says so.
    """
    paths = [logs] if isinstance(logs, (str, os.PathLike)) else list(logs)
    if Path(output).resolve() in {Path(path).resolve() for path in paths}:
        raise UsageError(f"{output} is a log itself, and would be gone: give the page another name")
    text = render(read_log(*paths), ", ".join(Path(path).name for path in paths))
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output}: {error.strerror}") from error
    return Path(output)


def render(log: Log, source: str) -> str:
    """The page.

    Args:
        log: with a record of two samples or more.
        source: what the page says the log is.

    Raises:
        UsageError: the log has less, or matplotlib is not installed.
    """
    figures, records = _pictures(log), log.records
    first, last = records[0].step, records[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    ranks = f" of {len(log.ranks)} ranks" if len(log.ranks) > 1 else ""
    about = (
        f"{source}: {_count(len(step_sizes(log)), 'measured step')}{ranks}, {steps}, "
        f"{_count(sum(log.run.parameters.values()), 'parameter')} in {_count(len(log.run.parameters), 'tensor')}."
    )
    return page.page(
        "Gradients of a training run",
        about,
        [
            page.numbers(_cards(log)),
            page.words("In words", summary(log)),
            page.warned(warnings(log)),
            page.pictures(figures),
            page.table(f"Layers ({_where(log)})", ("layer", *COLUMNS), _rows(log, "layer")),
            page.table("Groups, in these steps", ("group", *COLUMNS), _rows(log, "group")),
            page.table(
                "Parameters, in these steps", ("parameter", *COLUMNS), _rows(log, "parameter"), folded=True
            ),
            page.table("Batch sizes by other rules", TEST_COLUMNS, _test_rows(log)),
            page.words("How to read this", READING),
        ],
    )


def _pictures(log: Log) -> list[tuple[str, Figure]]:
    """Captions and figures of all that the log has the data for."""
    records = log.records
    figures = [
        (
            "Noise scale, with its 95% interval. Triangles: the estimate is infinite, above this.",
            plots.noise_scale(log),
        ),
        (
            "Norms of the samples' gradients: how far the largest are from the rest.",
            plots.gradient_norms(log),
        ),
        (
            "Signal to noise ratio of a batch's mean gradient: red is noise, blue is signal.",
            plots.layer_signal(log),
        ),
    ]
    if any(record.histogram and record.histogram[1] for record in records):
        caption = "Histogram of the norms over time: the share of the samples with each norm."
        figures.append((caption, plots.norm_histogram(log)))
    if any(norm is not None for record in records for _, norm in record.hardest or ()):
        caption = "Samples with the largest gradients, by id: how often among the largest of their batch."
        figures.append((caption, plots.hardest_samples(log)))
    if any(evidence(record) is not None for record in records):
        caption = (
            "Evidence that what is left of the gradient is noise, with the 95% interval of its mean: above 0, "
            "training may stop."
        )
        figures.append((caption, plots.evidence(log)))
    if any(record.loss is not None for record in records):
        figures.append(("The mean loss of a batch.", plots.loss(log)))
    with_cosines = [record for record in records if record.cosines]
    if with_cosines:
        caption = (
            f"Angles between the gradients of the first samples of a batch, in step {with_cosines[-1].step}: blue "
            f"samples pull in one direction, red ones against each other. {_agreement(with_cosines[-1])}"
        )
        figures.append((caption, plots.agreement(log)))
    return figures


def _agreement(record: Record) -> str:
    angles = torch.stack([numbers(row) for row in record.cosines or ()])
    same = torch.zeros(len(angles))
    mean, (_, low, high) = float(stiffness(angles, same)[1]), stiffness_interval(angles, same)
    if math.isnan(mean):
        return ""
    return f"The mean cosine of a pair is {mean:.2f} (95% interval {float(low):.2f} to {float(high):.2f})."


def summary(log: Log) -> list[str]:
    """What the end of a run says about the batch size, and which layer is the noisiest, in words.

    Args:
        log: with one record at least.
    """
    noise, batch = whole_noise(recent(log)), batch_size(log, recent(log))
    (low, high), value = map(float, noise.interval()), float(noise.value())
    if math.isnan(value):
        unknown = math.isnan(noise.variance())
        why = "no batch had two samples and finite gradients" if unknown else "all gradients are zero"
        return [f"{_when(log)} {why}: there is nothing to say about noise."]
    if math.isinf(value):
        first = (
            f"{_when(log)} the gradient does not stand out of its noise: the noise scale "
            f"cannot be told from infinity; the lower end of its 95% interval is {_bounded(low)} samples. Measure more "
            "steps, or take it that larger batches than these would pay."
        )
    else:
        first = (
            f"{_when(log)} the noise scale is {_rounded(value)} samples (95% interval "
            f"{_bounded(low)} to {_bounded(high)}). {_advice(value, low, high)} Below it, a batch twice as large saves "
            f"nearly half of the steps; above, it mostly costs samples. The run used {_rounded(batch)} a step: by that "
            f"model, each step makes {batch / (batch + value):.0%} of the progress of a step without noise, and each "
            f"sample {value / (batch + value):.0%} of what it makes in a tiny batch."
        )
    layers = [layer for layer in parts_of(log, recent(log)) if layer.share > 0]
    paragraphs = [first]
    if len(layers) > 1:
        loudest = max(layers, key=lambda layer: layer.share)
        weakest = min(layers, key=lambda layer: layer.signal_to_noise)
        paragraphs.append(
            f"Layer {_name(loudest.name)} has the largest share of the noise ({loudest.share:.0%}); the gradient of "
            f"layer {_name(weakest.name)} stands out least (signal to noise {_ratio(weakest.signal_to_noise)} in a "
            "batch)."
        )
    return paragraphs


def _advice(value: float, low: float, high: float) -> str:
    if value < 1:
        return "Suggested batch size: 1, since the gradients of different samples hardly differ."
    if low == 0 and math.isinf(high):
        return "No batch size is suggested: the measured steps do not bound it at all. Measure more of them."
    size = f"Suggested batch size: {value:,.0f}"
    if math.isinf(high):
        return f"{size}, or at least {max(low, 1):,.0f}: the measured steps do not bound it from above."
    return f"{size}, give or take that interval."


def _cards(log: Log) -> list[tuple[str, str]]:
    noise = whole_noise(recent(log))
    low, high = map(float, noise.interval())
    median = log.records[-1].quantiles[3]
    bad = sum(record.non_finite for record in log.records)
    return [
        (_estimate(noise), f"noise scale, in samples ({_bounded(low)} to {_bounded(high)})"),
        (_rounded(batch_size(log, recent(log))), "samples a step, on average"),
        ("–" if median is None else f"{median:.3g}", "median norm of a sample's gradient, last record"),
        (f"{bad:,}", "gradients that are not finite"),
    ]


def _rows(log: Log, by: By) -> list[list[str]]:
    rows = []
    for part in parts_of(log, recent(log), by):
        low, high = part.interval
        defined = not math.isnan(part.noise)
        rows.append(
            [
                _name(part.name),
                f"{part.elements:,}",
                "–" if math.isnan(part.norm) else f"{part.norm:.3g}",
                _bounded(part.noise) if defined else "–",
                f"{_bounded(low)} to {_bounded(high)}" if defined else "–",
                _ratio(part.signal_to_noise) if defined else "–",
                "–" if math.isnan(part.share) else f"{part.share:.1%}",
            ]
        )
    return rows


def _test_rows(log: Log) -> list[list[str]]:
    return [
        [
            row.test,
            _rounded(row.median),
            f"{_rounded(row.lower)} to {_rounded(row.upper)}",
            f"{row.passed:.0%} of records",
        ]
        for row in sizes_by_test(log)
    ]


def _where(log: Log) -> str:
    records = recent(log)
    return f"steps {records[0].step} to {records[-1].step}, {_count(len(records), 'record')}"


def _when(log: Log) -> str:
    """What the numbers are of: the end of the run, unless that is most of what was measured."""
    if len(recent(log)) <= len(log.records) / 2:
        return f"At the end of the run ({_where(log)})"
    return f"Over {_where(log)}, most of the run (measure more often to see its end alone),"


def _estimate(noise: NoiseScale) -> str:
    value = float(noise.value())
    return "–" if math.isnan(value) else _bounded(value)


def _bounded(value: float) -> str:
    return "∞" if math.isinf(value) else _rounded(value)


def _ratio(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.2g}"


def _rounded(value: float) -> str:
    """To three digits, and whole where it is large."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _name(name: str) -> str:
    return name or "(model)"
