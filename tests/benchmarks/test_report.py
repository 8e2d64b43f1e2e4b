"""Nobody's own lines are lost, and what went wrong is in the table."""

from pathlib import Path

import pytest

from benchmarks.report import markers, put_between, section
from benchmarks.rows import Cell, Row

BEGIN, END = markers("cpu")
FACTS = {"device": "cpu", "command": "python -m benchmarks.run", "torch": "2.13.0"}


def row(quantity: str = "BatchGrad", threads: int = 1, **cells: Cell) -> Row:
    plain = Cell("", (10.0, 9.0, 11.0), (1.0, 1.0, 1.0), 5, 20.0, 1.0)
    return Row("cnn", "small CNN", quantity, 8, threads, cells={"plain": plain, **cells})


def timed(ratio: float, memory: float | None = None, said: str = "") -> Cell:
    return Cell(said, (10 * ratio,) * 3, (ratio,) * 3, 5, memory and 20 * memory, memory)


def test_hand_written_lines_around_the_markers_stay() -> None:
    text = f"# Results\n\nby hand\n\n{BEGIN}\nold\n{END}\n\nalso by hand\n"
    assert put_between(text, "cpu", "new\n") == text.replace("old", "new")


def test_a_section_is_appended_where_there_is_none_and_other_devices_keep_theirs() -> None:
    cuda = put_between("# Results\n", "cuda", "fast")
    both = put_between(cuda, "cpu", "slow")
    assert both.startswith(cuda.rstrip("\n"))
    assert both.endswith(f"{BEGIN}\nslow\n{END}\n")
    assert put_between(both, "cpu", "slow") == both


@pytest.mark.parametrize("text", [BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_broken_markers_are_an_error_and_not_a_guess(text: str) -> None:
    with pytest.raises(ValueError, match="not there once each"):
        put_between(text, "cpu", "new")


def test_the_table_shows_ratios_the_best_of_the_row_and_every_reason() -> None:
    refused = Cell("refused: RuntimeError: no batching rule")
    rows = [row(gradbatch=timed(1.5, 2.0), vmap=timed(1.2, 3.0, "wrong by 3.0e-01"), BackPACK=refused)]
    text = section(rows, [], FACTS, {})
    assert (
        "| small CNN, N=8 | BatchGrad | 10.0 | **1.50** | 1.20, wrong by 3.0e-01 [1] | refused [2] |" in text
    )
    assert "| small CNN, N=8 | BatchGrad | 20 | **2.00** | 3.00, wrong by 3.0e-01 [1] | refused [2] |" in text
    assert "2. BackPACK: RuntimeError: no batching rule" in text
    assert "Opacus" not in text, "a column for nobody"


def test_the_summary_counts_only_peers_that_are_right() -> None:
    rows = [
        row(gradbatch=timed(1.5), vmap=timed(1.2, said="wrong by 3.0e-01"), BackPACK=timed(1.6)),
        row(gradbatch=timed(1.7), vmap=timed(1.2)),
    ]
    rows[1].title = "another"
    assert "| BatchGrad | 1.60 | 1.70 (another) | 1 of 2 | – | – | – |" in section(rows, [], FACTS, {})


def test_each_number_of_threads_has_tables_of_its_own() -> None:
    text = section([row(gradbatch=timed(1.5)), row(threads=2, gradbatch=timed(1.4))], [], FACTS, {})
    assert text.count("### Time, ") == 2
    assert "### Time, 2 threads" in text


def test_the_same_numbers_give_the_same_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots are drawn where the group bench is installed")
    from benchmarks.plots import draw

    rows = [
        row(gradbatch=timed(1.5, 2.0), vmap=timed(1.2, 3.0)),
        row("BatchL2Grad", gradbatch=timed(1.1, 1.0)),
    ]
    first, second = (draw(rows, rows, tmp_path / name, "cpu") for name in ("a", "b"))
    assert {*first} == {"Time", "Memory", "Growth"}
    for what, file in first.items():
        assert file.read_bytes() == second[what].read_bytes()
