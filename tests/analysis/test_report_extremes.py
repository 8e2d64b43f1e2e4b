"""A report of any run that a monitor can log: all equal, all zero, nothing finite, ranks, long, strangely named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradbatch import UsageError
from gradbatch.analysis import JsonLines, NoiseScale, Record, Run, read_log, write_report
from gradbatch.analysis.parts import parts_of
from gradbatch.analysis.summary import recent, whole_noise
from tests.analysis.test_report import NAMES, page, records, words, written


@pytest.fixture
def words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without pictures, which take most of the time."""
    monkeypatch.setattr("gradbatch.analysis.report._pictures", lambda log: [])


def changed(entries: list[Record], **changes: object) -> list[Record]:
    return [replace(entry, **changes) for entry in entries]  # type: ignore[arg-type]


@pytest.mark.usefixtures("words_alone")
def test_the_batch_of_a_step_is_that_of_all_ranks(tmp_path: Path) -> None:
    from gradbatch.analysis import plots

    paths = [written(tmp_path / f"{rank}.jsonl", records(range(25))) for rank in (0, 1)]
    text = words(write_report(paths, tmp_path / "report.html").read_text())
    log = read_log(*paths)
    value = float(whole_noise(recent(log)).value())
    assert "64 samples a step, on average" in text and "The run used 64 a step" in text
    assert f"each step makes {64 / (64 + value):.0%} of the progress" in text
    for part in parts_of(log, recent(log)):
        assert part.signal_to_noise == pytest.approx(64 / part.noise)
    (batch,) = (line for line in plots.noise_scale(log).axes[0].lines if line.get_label() == "batch size")
    assert set(batch.get_ydata()) == {64} and len(batch.get_xdata()) == 25  # type: ignore[arg-type]


NOTHING = {
    "sum_of_squares": [None] * 3,
    "square_of_sum": [None] * 3,
    "mean_norm": None,
    "quantiles": [None] * 7,
}


def test_samples_that_are_not_finite_are_named_although_nothing_else_can_be_said(tmp_path: Path) -> None:
    hardest = [[7, None], [3, None]]
    text = words(page(tmp_path, changed(records(range(20)), **NOTHING, non_finite=2, hardest=hardest)))
    assert "40 gradients of samples are not finite" in text and "Among them: sample 3, sample 7." in text
    assert "no batch had two samples and finite gradients" in text


@pytest.mark.usefixtures("words_alone")
def test_gradients_that_agree_are_not_told_to_have_a_batch_of_none(tmp_path: Path) -> None:
    agree = changed(records(range(20)), sum_of_squares=[32.0] * 3, square_of_sum=[1024.0] * 3)
    text = words(page(tmp_path, agree))
    assert "Suggested batch size: 1, since the gradients of different samples hardly differ" in text
    assert " inf " not in text and "nan" not in text.lower()
    (lone,) = records(range(1))
    assert "or at least 1: the measured steps do not bound it" in words(page(tmp_path / "..", [lone]))


def test_gradients_of_zero_are_called_that(tmp_path: Path) -> None:
    zero = {"sum_of_squares": [0.0] * 3, "square_of_sum": [0.0] * 3, "quantiles": [0.0] * 7}
    text = words(page(tmp_path, changed(records(range(20)), **zero, hardest=[[1, 0.0]])))
    assert "all gradients are zero: there is nothing to say about noise" in text


@pytest.mark.usefixtures("words_alone")
def test_numbers_at_the_end_of_what_floats_hold_are_not_finite(tmp_path: Path) -> None:
    huge = {"sum_of_squares": [1.5e308] * 3, "square_of_sum": [1.5e308] * 3, "dot_squares": 1e308}
    assert "no batch had two samples and finite gradients" in words(
        page(tmp_path, changed(records(range(20)), **huge))
    )


def test_a_page_is_not_written_over_a_log(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", records(range(5)))
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"run\.jsonl is a log itself, and would be gone"):
        write_report(path, tmp_path / "." / "run.jsonl")
    assert path.read_bytes() == before


@pytest.mark.usefixtures("words_alone")
def test_steps_that_are_counted_anew_are_said(tmp_path: Path) -> None:
    text = words(page(tmp_path, [*records(range(20)), *records(range(15))]))
    assert "20 measured steps" in text and "15 records are left out, since later ones" in text


def test_a_long_run_is_drawn_with_as_many_points_as_there_is_room_for(tmp_path: Path) -> None:
    from gradbatch.analysis import plots

    some = records(range(10))
    entries = [
        replace(some[k % 10], step=k, evidence_sums=[0.1] * 3, evidence_elements=[1] * 3) for k in range(3000)
    ]
    entries[1234] = replace(entries[1234], quantiles=[*entries[1234].quantiles[:6], 1e6])
    log = read_log(written(tmp_path / "run.jsonl", entries))
    median, largest = plots.gradient_norms(log).axes[0].lines
    assert len(median.get_xdata()) == len(largest.get_xdata()) == 500  # type: ignore[arg-type]
    assert list(largest.get_ydata()).count(1e6) == 1, "the largest is in the picture whatever its step"  # type: ignore[arg-type]
    middle = sorted(entry.quantiles[3] or 0 for entry in entries[:6])
    assert median.get_ydata()[0] == pytest.approx((middle[2] + middle[3]) / 2)  # type: ignore[index]
    assert all(len(line.get_xdata()) <= 500 for line in plots.noise_scale(log).axes[0].lines)  # type: ignore[arg-type]
    assert all(len(line.get_xdata()) <= 500 for line in plots.evidence(log).axes[0].lines)  # type: ignore[arg-type]


def test_many_records_at_once_are_records_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbatch.analysis.parts.BLOCK", 7)
    log, noise = read_log(written(tmp_path / "run.jsonl", records(range(30)))), NoiseScale((3,))
    for entry in log.records:
        noise.update(32, *torch.tensor([entry.sum_of_squares, entry.square_of_sum], dtype=torch.double))
    parts = parts_of(log, log.records, "parameter")
    assert [part.noise for part in parts] == pytest.approx(noise.value().tolist())
    assert [part.norm for part in parts] == pytest.approx(
        [(sum(e.sum_of_squares[i] or 0 for e in log.records) / 960) ** 0.5 for i in range(3)]
    )


def test_names_of_any_letters_make_a_page(tmp_path: Path) -> None:
    names = dict(zip(("$\\frac{$.weight", "层.weight", "<b>&amp;.bias"), NAMES.values(), strict=True))
    log = JsonLines(tmp_path / "run.jsonl")
    log.start(Run(names, "standard", {"<i>$\\frac{$": ["层.weight"]}))
    for entry in records(range(20)):
        log.write(entry)
    log.close()
    text = write_report(tmp_path / "run.jsonl", tmp_path / "report.html").read_text()
    assert "层" in text and "$\\frac{$" in text and "<b>&amp;" not in text and "&lt;i&gt;$\\frac{$" in text
