"""The rows as pictures: a dot for each contestant and model, and curves of the sweeps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import OURS, PEERS, PLAIN
from benchmarks.report import present
from benchmarks.rows import Cell, Row

# Shape and colour of everybody, the same in all panels.
SHAPES = zip([OURS.name, *PEERS, PLAIN.name], "osD^v<>*", strict=True)
MARKS = {name: f"C{number}{shape}" for number, (name, shape) in enumerate(SHAPES)}


def draw(rows: Sequence[Row], sweeps: Sequence[Row], folder: Path, device: str) -> dict[str, Path]:
    """Write the plots.

    Args:
        rows, sweeps: what was measured; of several numbers of threads the first is drawn.
        folder: where to.
        device: part of the files' names.

    Returns:
        Files by what they show.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    # The same numbers give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "gradbatch"
    first = [row for row in rows if row.threads == rows[0].threads]
    figures = {"Time": _dots(first, lambda cell: cell.ratio and cell.ratio[0], "time / plain step")}
    if any(cell.memory_ratio for row in first for cell in row.cells.values()):
        figures["Memory"] = _dots(first, lambda cell: cell.memory_ratio, "memory / plain step")
    if sweeps:
        figures["Growth"] = _curves(sweeps)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for what, figure in figures.items():
        files[what] = folder / f"benchmark-{device}-{what.lower()}.svg"
        figure.savefig(files[what], bbox_inches="tight", metadata={"Date": None})
    return files


def _dots(rows: Sequence[Row], value: Callable[[Cell], float | None], label: str) -> Any:
    from matplotlib import pyplot

    quantities = list(dict.fromkeys(row.quantity for row in rows))
    cases = list(dict.fromkeys(row.case for row in rows))
    names = present(rows)
    figure, all_axes = pyplot.subplots(
        len(quantities), figsize=(9, 2.3 * len(quantities)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, quantity in zip(all_axes[:, 0], quantities, strict=True):
        for name in names:
            points = [
                (cases.index(row.case), found)
                for row in rows
                if row.quantity == quantity and name in row.cells and (found := value(row.cells[name]))
            ]
            x = [place + 0.08 * (names.index(name) - len(names) / 2) for place, _ in points]
            axes.plot(x, [found for _, found in points], MARKS[name], label=name, markersize=5)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(yscale="log", title=quantity, ylabel=label)
        axes.grid(axis="y", alpha=0.3)
    all_axes[-1, 0].set_xticks(range(len(cases)), cases)
    _legend(figure, columns=4)
    return figure


def _curves(rows: Sequence[Row]) -> Any:
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row.case, row.quantity) for row in rows))
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(3.2 * len(panels), 3), squeeze=False, layout="constrained"
    )
    for axes, (case, quantity) in zip(all_axes[0], panels, strict=True):
        own = [row for row in rows if (row.case, row.quantity) == (case, quantity)]
        sizes = [row.samples if row.length is None else row.length for row in own]
        for name in [PLAIN.name, *present(own)]:
            points = [
                (size, found[0])
                for size, row in zip(sizes, own, strict=True)
                if name in row.cells and (found := row.cells[name].milliseconds)
            ]
            axes.plot([x for x, _ in points], [y for _, y in points], f"{MARKS[name]}-", label=name)
        axis = "N" if own[0].length is None else "T"
        axes.set(xscale="log", yscale="log", title=f"{case}, {quantity}", xlabel=axis, ylabel="ms")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
    _legend(figure, columns=8)
    return figure


def _legend(figure: Any, columns: int) -> None:
    """One for all panels, of everybody who is in any of them."""
    entries = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)
