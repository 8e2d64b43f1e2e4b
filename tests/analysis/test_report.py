"""The report says what the log says, in a page that needs nothing else and fits the screen."""

import importlib.util
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradbatch import UsageError
from gradbatch.analysis import (
    JsonLines,
    NoiseScale,
    Record,
    Run,
    norm_histogram,
    norm_quantiles,
    norm_test,
    read_log,
    write_report,
)
from gradbatch.cli.app import app

if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib draws the report's pictures", allow_module_level=True)

NAMES = {"encoder.layers.0.self_attention.out_projection.weight": 3, "head<b>.weight": 2, "head<b>.bias": 1}
SIZES = list(NAMES.values())
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def records(steps: range, mean: float = 0.4) -> list[Record]:
    """Of gradients that are normal around a mean: the noise scale is one over its square."""
    made = []
    for step in steps:
        grads = mean + torch.randn(32, 6, dtype=torch.double)
        blocks, norms = grads.split(SIZES, 1), grads.norm(dim=1)
        hardest = [(int(i), float(norms[i])) for i in norms.argsort(descending=True)[:3]]
        made.append(
            Record(
                step,
                0.0,
                32,
                0,
                1.0,
                float(norms.mean()),
                norm_quantiles(norms).tolist(),
                [float(b.square().sum()) for b in blocks],
                [float(b.sum(0).square().sum()) for b in blocks],
                None,
                hardest,
            )
        )
    return made


def in_full(entries: list[Record]) -> list[Record]:
    """With all that the preset "full" measures, of other gradients."""
    made = []
    for entry in entries:
        grads = torch.randn(32, 6, dtype=torch.double)
        angles = torch.nn.functional.cosine_similarity(grads[:, None], grads[None], dim=2)
        made.append(
            replace(
                entry,
                histogram=norm_histogram(grads.norm(dim=1)),
                evidence_sums=[32 * float(b.mean(0).square().sum()) / 32 for b in grads.split(SIZES, 1)],
                evidence_elements=SIZES,
                cosines=angles.tolist(),
            )
        )
    return made


def written(path: Path, entries: list[Record]) -> Path:
    log = JsonLines(path)
    log.start(Run(NAMES, "standard"))
    for entry in entries:
        log.write(entry)
    log.close()
    return path


def page(directory: Path, entries: list[Record]) -> str:
    return write_report(written(directory / "run.jsonl", entries), directory / "report.html").read_text()


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL))


def test_the_page_has_the_noise_scale_of_the_end_and_a_row_for_each_layer(tmp_path: Path) -> None:
    entries = records(range(0, 600, 5))
    text, noise = words(page(tmp_path, entries)), NoiseScale()
    for entry in entries[-40:]:
        noise.update(32, torch.tensor(sum(entry.sum_of_squares)), torch.tensor(sum(entry.square_of_sum)))  # type: ignore[arg-type]
    low, high = map(float, noise.interval())
    assert f"the noise scale is {float(noise.value()):.3g} samples" in text
    assert f"95% interval {low:.3g} to {high:.3g}" in text
    assert "(steps 400 to 595, 40 records)" in text and "120 measured steps, steps 0 to 595" in text
    assert "encoder.layers.0.self_attention.out_projection" in text and "Warnings" not in text


def test_the_page_has_a_row_for_each_test_that_the_log_has_numbers_for(tmp_path: Path) -> None:
    entries = [
        replace(entry, dot_squares=2.0 * sum(s for s in entry.sum_of_squares if s))
        for entry in records(range(30))
    ]
    text = words(page(tmp_path, entries))
    sizes = sorted(
        norm_test(32, sum(entry.sum_of_squares), sum(entry.square_of_sum)).batch_size  # type: ignore[arg-type]
        for entry in entries[-20:]
    )
    median = (sizes[9] + sizes[10]) / 2
    assert f"norm test {median:.3g}" in text and "inner product test" in text and "orthogonality test" in text
    assert (
        "inner product test" not in words(page(tmp_path / "..", records(range(30)))).split("How to read")[0]
    )


def test_the_page_has_rows_for_parameters_and_groups_whose_noise_is_that_of_their_sums(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.jsonl"
    log = JsonLines(path)
    weights = [name for name in NAMES if name.endswith("weight")]
    log.start(Run(NAMES, "standard", {"weights": weights}))
    entries, noise = records(range(30)), NoiseScale()
    for entry in entries:
        log.write(entry)
    log.close()
    for entry in entries[-20:]:
        noise.update(32, *(torch.tensor(sum(p[:2])) for p in (entry.sum_of_squares, entry.square_of_sum)))  # type: ignore[arg-type]
    text = words(write_report(path, tmp_path / "report.html").read_text())
    assert re.search(rf"Groups, in these steps .* weights 5 [\d.]+ {float(noise.value()):.3g} ", text)
    assert re.search(r"Parameters, in these steps .* head&lt;b&gt;.bias 1 ", text)
    assert "Groups, in these steps" not in words(page(tmp_path / "..", records(range(30))))


def test_the_page_needs_nothing_but_itself_and_escapes_what_it_shows(tmp_path: Path) -> None:
    text = page(tmp_path, records(range(40)))
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert "<script" not in text and "head&lt;b&gt;" in text and "head<b>" not in text
    assert text.count("data:image/svg+xml;base64,") == 5
    assert page(tmp_path, []) == text, "the same log gives the same page"


@pytest.mark.parametrize("count", [1, 2, 11, 13])
def test_short_logs_make_a_page(tmp_path: Path, count: int) -> None:
    assert f"{count} measured step" in words(page(tmp_path, records(range(count))))


def test_a_gradient_lost_in_noise_is_called_that(tmp_path: Path) -> None:
    entries = [
        replace(entry, square_of_sum=[s * 0.9 for s in entry.sum_of_squares if s])
        for entry in records(range(60))
    ]
    text = words(page(tmp_path, entries))
    assert "does not stand out of its noise" in text and "∞" in text and "nan" not in text.lower()


DEAD = {"sum_of_squares": [4.0, 0.0, 0.0], "square_of_sum": [2.0, 0.0, 0.0]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda n, e: replace(e, **DEAD), "No gradient reaches head<b> at the end"),
        (
            lambda n, e: e if n < 50 else replace(e, sum_of_squares=[1e6 * s for s in e.sum_of_squares]),
            "The gradients of head<b> explode: at the end their norm is",
        ),
        (
            lambda n, e: replace(e, non_finite=2, sum_of_squares=[None] * 3) if n == 7 else e,
            "2 gradients of samples are not finite, in 1 of 60 records, first in step 7",
        ),
        (
            lambda n, e: replace(
                e,
                non_finite=32,
                mean_norm=None,
                quantiles=[None] * 7,
                sum_of_squares=[None] * 3,
                hardest=None,
            ),
            "there is nothing to say about noise",
        ),
    ],
    ids=["dead", "exploding", "one batch not finite", "nothing finite"],
)
def test_what_looks_wrong_is_said(
    tmp_path: Path, changed: Callable[[int, Record], Record], message: str
) -> None:
    entries = [changed(number, entry) for number, entry in enumerate(records(range(60)))]
    text = words(page(tmp_path, entries))
    assert message.replace("<b>", "&lt;b&gt;") in text and "nan" not in text.lower()


def test_a_log_cut_off_makes_a_page_that_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", records(range(30)))
    path.write_bytes(path.read_bytes()[:-20])
    text = words(write_report(path, tmp_path / "report.html").read_text())
    assert "29 measured steps" in text and "1 line was cut off, or of another program, and left out" in text


def test_ranks_are_pooled(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{rank}.jsonl", records(range(20))) for rank in (0, 1)]
    text = words(write_report(paths, tmp_path / "report.html").read_text())
    assert "0.jsonl, 1.jsonl: 20 measured steps of 2 ranks, steps 0 to 19" in text
    assert "The run used 64 a step" in text


def test_the_command_writes_the_page_and_says_why_it_cannot(tmp_path: Path) -> None:
    path, runner = written(tmp_path / "run.jsonl", records(range(20))), CliRunner()
    output = tmp_path / "page.html"
    ended = runner.invoke(app, ["report", str(path), "-o", str(output)])
    assert (
        ended.exit_code == 0
        and "Written" in ended.output
        and output.read_text().startswith("<!doctype html>")
    )
    for arguments, message in (
        ([str(tmp_path / "none.jsonl")], "No such file"),
        ([str(path), "-o", str(tmp_path / "none" / "page.html")], "No such file"),
        ([str(written(tmp_path / "empty.jsonl", [])), "-o", str(output)], "no record of two samples"),
    ):
        ended = runner.invoke(app, ["report", *arguments])
        assert ended.exit_code == 2 and message in ended.stderr


def test_without_matplotlib_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'gradbatch\[analysis\]'"):
        page(tmp_path, records(range(20)))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here to open the page in")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_the_page_fits_the_screen_and_loads_without_an_error(tmp_path: Path, width: int) -> None:
    page(tmp_path, in_full(records(range(0, 600, 5))))
    # In a frame, which may be narrower than a browser's window. The probe writes what it finds into the title.
    text = (tmp_path / "report.html").read_text()
    probe = """<script>addEventListener("load", () => {
      const wide = [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth
        || e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1);
      const broken = [...document.images].filter(i => !i.naturalWidth);
      parent.document.title = `wide ${wide.map(e => e.tagName)} broken ${broken.length} at ${innerWidth}`;
    });</script>"""
    framed = (text + probe).replace("&", "&amp;").replace('"', "&quot;")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<meta charset="utf-8"><iframe width="{width}" height="3000" style="border:0" srcdoc="{framed}"></iframe>'
    )
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
    ]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    ended = subprocess.run(
        [
            *command,
            profile,
            "--virtual-time-budget=5000",
            "--window-size=1400,3200",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    title = re.search(r"<title>(.*?)</title>", ended.stdout)
    assert title and title[1] == f"wide  broken 0 at {width}"
    assert "CONSOLE" not in ended.stderr
    picture = tmp_path / "page.png"
    subprocess.run(
        [
            *command,
            profile,
            f"--window-size={max(width, 500)},3000",
            f"--screenshot={picture}",
            (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert picture.stat().st_size > 50_000


def test_a_picture_takes_any_layer_without_a_defined_ratio(tmp_path: Path) -> None:
    from gradbatch.analysis import plots

    log = read_log(written(tmp_path / "run.jsonl", [replace(entry, **DEAD) for entry in records(range(40))]))  # type: ignore[arg-type]
    figure = plots.layer_signal(log)
    mesh = figure.axes[0].collections[0].get_array()
    assert mesh is not None and mesh.shape == (2, 5)
    assert [set(row) for row in mesh.mask.tolist()] == [{False}, {True}], "the head has no gradients"


def test_pictures_show_the_numbers_of_the_log(tmp_path: Path) -> None:
    from gradbatch.analysis import plots

    entries = in_full(records(range(0, 80, 2)))
    log = read_log(written(tmp_path / "run.jsonl", entries))
    mesh = plots.norm_histogram(log).axes[0].collections[0]
    counts: Counter[int] = Counter()
    for entry in entries[:2]:
        first, found = entry.histogram or (0, [])
        counts.update({first + place: count for place, count in enumerate(found)})
    shares = mesh.get_array()
    assert shares is not None and shares.shape[1] == 16, "of two records: a histogram is no average"
    column = [float(share) for share in shares[:, 0] if share]
    assert column == pytest.approx([counts[place] / 64 for place in sorted(counts) if counts[place]])
    image = plots.agreement(log).axes[0].images[0].get_array()
    assert image is not None and image.tolist() == entries[-1].cosines
    batches, mean, zero = plots.evidence(log).axes[0].lines
    four = [1 - 32 * sum(value or 0 for value in entry.evidence_sums or ()) / 6 for entry in entries[:4]]
    assert batches.get_ydata()[:4] == pytest.approx(four) and zero.get_ydata()[0] == 0
    assert len(mean.get_xdata()) == 10, "four batches a mark, as few as have an interval"
    (band,) = plots.evidence(log).axes[0].collections
    ends = [y for x, y in band.get_paths()[0].vertices if x == mean.get_xdata()[0]]
    assert max(ends) - min(ends) == pytest.approx(3.182 * statistics.stdev(four), rel=0.01), "Student's"


def test_the_page_has_a_picture_of_all_that_was_measured(tmp_path: Path) -> None:
    text = page(tmp_path, in_full(records(range(40))))
    assert text.count("data:image/svg+xml;base64,") == 8 and "in step 39" in words(text)
    assert re.search(r"mean cosine of a pair is -?0\.0\d \(95% interval -0\.\d\d to 0\.\d\d\)", words(text))
    from gradbatch.analysis import plots

    log = read_log(written(tmp_path / "without.jsonl", records(range(40))))
    for picture in (plots.norm_histogram, plots.agreement, plots.evidence):
        with pytest.raises(UsageError, match="no record has"):
            picture(log)
