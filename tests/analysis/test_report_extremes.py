"""A report of any run that a monitor can log: all equal, all zero, nothing finite, ranks, long, strangely named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradbatch import UsageError
from gradbatch.analysis import JsonLines, NoiseScale, Record, Run, read_log, write_report
from gradbatch.analysis.parts import parts_of
from gradbatch.analysis.summary import recent, whole_noise, windows
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
    alone = words(page(tmp_path / "..", [lone]))
    assert "No batch size is suggested" in alone and "1 measured step, step 0," in alone


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


@pytest.mark.usefixtures("words_alone")
def test_what_most_of_a_run_says_is_not_called_its_end(tmp_path: Path) -> None:
    text = words(page(tmp_path, records(range(0, 270, 10))))
    assert "Over steps 70 to 260, 20 records, most of the run" in text and "end of the run" not in text
    assert "At the end of the run (steps 200 to 390, 20 records)" in words(
        page(tmp_path, records(range(0, 400, 10)))
    )


@pytest.mark.usefixtures("words_alone")
def test_runs_that_are_no_ranks_of_one_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "0.jsonl", records(range(0, 40, 2)))
    cut = written(tmp_path / "1.jsonl", records(range(0, 30, 2)))
    other = written(tmp_path / "2.jsonl", records(range(0, 40, 3)))
    found = "The logs have measured different steps"
    assert found not in words(write_report([path, cut], tmp_path / "page.html").read_text())
    assert found in words(write_report([path, other], tmp_path / "page.html").read_text())
    for number, run in enumerate((Run(NAMES, "full"), Run(NAMES, "standard", {"all": [*NAMES]}))):
        log = JsonLines(tmp_path / f"other{number}.jsonl")
        log.start(run)
        log.close()
        with pytest.raises(UsageError, match="presets or groups differ, so these are no ranks of one run"):
            read_log(path, tmp_path / f"other{number}.jsonl")


def test_a_stretch_has_twenty_records_or_in_short_runs_eight(tmp_path: Path) -> None:
    entries = records(range(8)) * 50
    for count, lengths in (
        (7, {7}),
        (15, {15}),
        (28, {9, 10}),
        (64, {8}),
        (92, {11, 12}),
        (320, {20}),
        (400, {25}),
    ):
        log = read_log(
            written(tmp_path / f"{count}.jsonl", [replace(e, step=k) for k, e in enumerate(entries[:count])])
        )
        stretches = windows(log)
        assert {len(stretch) for stretch in stretches} == lengths and sum(map(len, stretches)) == count
    assert [len(stretch) for stretch in windows(read_log(tmp_path / "7.jsonl"), 1)] == [1] * 7


def test_pictures_of_few_records(tmp_path: Path) -> None:
    from gradbatch.analysis import plots

    path = written(tmp_path / "run.jsonl", records(range(7)))
    _, bar = plots.noise_scale(read_log(path)).axes[0].collections
    ends = bar.get_segments()[0][:, 1]
    assert ends[0] < float(whole_noise(read_log(path).records).value()) < ends[1]
    (losses,) = plots.loss(read_log(path)).axes[0].lines
    assert list(losses.get_ydata()) == [1.0] * 7  # type: ignore[arg-type]
    silent = written(tmp_path / "silent.jsonl", changed(records(range(7)), loss=None))
    with pytest.raises(UsageError, match="no record has a loss"):
        plots.loss(read_log(silent))
    for picture in (plots.noise_scale, plots.gradient_norms, plots.layer_signal, plots.norm_histogram, plots.loss,
                    plots.agreement, plots.evidence, plots.hardest_samples):  # fmt: skip
        with pytest.raises(UsageError, match=r"a picture is of a log, not of a str: .*read_log\(path\)"):
            picture("run.jsonl")  # type: ignore[arg-type]


def test_the_hardest_samples_are_those_with_the_largest_gradients_together(tmp_path: Path) -> None:
    from gradbatch.analysis import plots

    hardest = ([(3, 1.0), (5, 9.0)], [(3, 1.5), (4, 2.0)], [(3, 1.0), (4, 2.0)])
    entries = [replace(e, hardest=h) for e, h in zip(records(range(3)), hardest, strict=True)]
    axes = plots.hardest_samples(read_log(written(tmp_path / "run.jsonl", entries))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["5", "4", "3"]
    assert [bar.get_width() for bar in axes.patches] == [9.0, 4.0, 3.5]
    assert [text.get_text() for text in axes.texts] == ["1×", "2×", "3×"]
