"""The rows as Markdown tables, put between two markers of a file whose other lines are left alone."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.contestants import OURS, PEERS, PLAIN
from benchmarks.rows import Cell, Row

NAMES = [OURS.name, *PEERS]


def markers(device: str) -> tuple[str, str]:
    """The lines that the generated part of a device lies between."""
    return f"<!-- measured on {device}: begin -->", f"<!-- measured on {device}: end -->"


def put_between(text: str, device: str, generated: str) -> str:
    """The text with the generated part replaced; appended, with its markers, where there is none.

    Raises:
        ValueError: one marker without the other, twice, or in the wrong order: somebody's own lines could be lost.
    """
    begin, end = markers(device)
    counts = text.count(begin), text.count(end)
    if counts == (0, 0):
        kept = text.rstrip("\n")
        return f"{kept}\n\n{begin}\n{generated.strip()}\n{end}\n".lstrip("\n")
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"the markers {begin} and {end} are not there once each, in this order; repair them")
    before, after = text[: text.index(begin)], text[text.index(end) + len(end) :]
    return f"{before}{begin}\n{generated.strip()}\n{end}{after}"


def present(rows: Sequence[Row]) -> list[str]:
    """Contestants that any row has, in their order."""
    return [name for name in NAMES if any(name in row.cells for row in rows)]


class Notes:
    """What is said of contestants, each sentence once, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def refer(self, name: str, said: str) -> str:
        """One word for the table, and the number of the note that says the rest."""
        kind, _, reason = said.partition(":")
        if said.startswith("wrong"):
            return f"{said} [{self._number(f'{name}: differs from gradbatch, relative to the norm')}]"
        return f"{kind} [{self._number(f'{name}: {(reason or said).strip()}')}]"

    def _number(self, note: str) -> int:
        return self._numbers.setdefault(note, len(self._numbers) + 1)

    def lines(self) -> list[str]:
        return [f"{number}. {note}" for note, number in self._numbers.items()]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def time_cell(cell: Cell, best: bool) -> str:
    """The median ratio, its quartiles where they differ, and bold where it is the best of the row."""
    assert cell.ratio is not None
    middle, low, high = cell.ratio
    text = f"**{middle:.2f}**" if best else f"{middle:.2f}"
    return text if f"{low:.2f}" == f"{high:.2f}" else f"{text} ({low:.2f}–{high:.2f})"


def memory_cell(cell: Cell, best: bool) -> str:
    assert cell.memory_ratio is not None
    return f"**{cell.memory_ratio:.2f}**" if best else f"{cell.memory_ratio:.2f}"


def ratios(
    rows: Sequence[Row],
    notes: Notes,
    value: Callable[[Cell], float | None],
    write: Callable[[Cell, bool], str],
) -> list[list[str]]:
    """The cells of every contestant, a list for each row."""
    names, lines = present(rows), []
    for row in rows:
        sound = {name: value(cell) for name, cell in row.cells.items() if name in names and not cell.said}
        best = min((found for found in sound.values() if found is not None), default=None)
        line = []
        for name in names:
            cell = row.cells.get(name)
            if cell is None:
                line.append("–")
            elif cell.said and value(cell) is None:
                line.append(notes.refer(name, cell.said))
            elif value(cell) is None:
                line.append("–")
            else:
                said = f", {notes.refer(name, cell.said)}" if cell.said else ""
                line.append(write(cell, not cell.said and value(cell) == best) + said)
        lines.append(line)
    return lines


def time_table(rows: Sequence[Row], notes: Notes, absolute: bool) -> str:
    """Times of a plain step, whose milliseconds are given; those of gradbatch too if ``absolute``."""
    own = [OURS.name + " ms"] if absolute else []
    lines = []
    found = ratios(rows, notes, lambda cell: cell.ratio and cell.ratio[0], time_cell)
    for row, cells in zip(rows, found, strict=True):
        where = f"{row.title}, N={row.samples}"
        extra = [milliseconds(row, OURS.name)] if absolute else []
        lines.append([where, row.quantity, milliseconds(row, PLAIN.name), *extra, *cells])
    return table(["model", "quantity", "plain ms", *own, *present(rows)], lines)


def milliseconds(row: Row, name: str) -> str:
    cell = row.cells.get(name)
    return "–" if cell is None or cell.milliseconds is None else f"{cell.milliseconds[0]:.1f}"


def memory_table(rows: Sequence[Row], notes: Notes) -> str:
    """Times of what a plain step adds to the memory in use, which is given in MiB."""
    found = ratios(rows, notes, lambda cell: cell.memory_ratio, memory_cell)
    lines = []
    for row, cells in zip(rows, found, strict=True):
        plain = row.cells[PLAIN.name].mebibytes
        where = f"{row.title}, N={row.samples}"
        lines.append([where, row.quantity, "–" if plain is None else f"{plain:.0f}", *cells])
    return table(["model", "quantity", "plain MiB", *present(rows)], lines)


def sweep_table(rows: Sequence[Row], notes: Notes) -> str:
    found = ratios(rows, notes, lambda cell: cell.ratio and cell.ratio[0], time_cell)
    lines = []
    for row, cells in zip(rows, found, strict=True):
        size = f"N={row.samples}" if row.length is None else f"T={row.length}"
        lines.append([row.title.split(",")[0], row.quantity, size, milliseconds(row, PLAIN.name), *cells])
    return table(["model", "quantity", "size", "plain ms", *present(rows)], lines)


def summary_table(rows: Sequence[Row]) -> str:
    """gradbatch by quantity: its median and worst row, and how often nobody was faster, or needed less memory."""
    lines = []
    for quantity in dict.fromkeys(row.quantity for row in rows):
        ours = [row for row in rows if row.quantity == quantity and row.cells[OURS.name].ratio is not None]
        if not ours:
            continue
        times = {row.title: row.cells[OURS.name].ratio[0] for row in ours}
        worst = max(times, key=times.__getitem__)
        line = [
            quantity,
            f"{statistics.median(times.values()):.2f}",
            f"{times[worst]:.2f} ({worst})",
            _wins(ours, lambda cell: cell.ratio and cell.ratio[0]),
        ]
        memories = [m for row in ours if (m := row.cells[OURS.name].memory_ratio) is not None]
        line += [f"{statistics.median(memories):.2f}", f"{max(memories):.2f}"] if memories else ["–", "–"]
        lines.append([*line, _wins(ours, lambda cell: cell.memory_ratio)])
    head = ["quantity", "time, median", "worst", "fastest of all", "memory, median", "worst", "least of all"]
    return table(head, lines)


def _wins(rows: Sequence[Row], value: Callable[[Cell], float | None]) -> str:
    won = compared = 0
    for row in rows:
        own = value(row.cells[OURS.name])
        others = [value(row.cells[n]) for n in PEERS if n in row.cells and not row.cells[n].said]
        known = [other for other in others if other is not None]
        if own is not None and known:
            compared, won = compared + 1, won + (own <= min(known))
    return f"{won} of {compared}" if compared else "–"


def section(
    rows: Sequence[Row], sweeps: Sequence[Row], environment: Mapping[str, str], plots: Mapping[str, str]
) -> str:
    """The generated part: how it was measured, summaries, tables, plots and notes."""
    notes, parts = Notes(), [f"## Measured on {environment['device']}: `{environment['command']}`"]
    facts = ", ".join(f"{what} {value}" for what, value in environment.items() if what != "command")
    parts.append(
        f"{facts}. Times are ratios to a plain forward and backward pass in the same round: medians, and quartiles in "
        "brackets where they differ. Memory is what a step adds to the process at its peak, as a ratio likewise. Bold: "
        "the best of its row. –: not offered, or not measured. Numbers in square brackets: notes, at the end."
    )
    for threads in dict.fromkeys(row.threads for row in rows):
        own = [row for row in rows if row.threads == threads]
        title = f"{threads} thread{'s' if threads > 1 else ''}"
        parts += [f"### gradbatch in short, {title}", summary_table(own)]
        parts += [f"### Time, {title}", time_table(own, notes, absolute="cuda" in environment["device"])]
        with_memory = [row for row in own if row.cells[PLAIN.name].mebibytes is not None]
        if with_memory:
            parts += [f"### Memory, {title}", memory_table(with_memory, notes)]
    if sweeps:
        parts += ["### How the time grows", sweep_table(sweeps, notes)]
    parts += [f"![{what}]({path})" for what, path in plots.items()]
    if notes.lines():
        parts += ["### Notes", "\n".join(notes.lines())]
    return "\n\n".join(parts)
