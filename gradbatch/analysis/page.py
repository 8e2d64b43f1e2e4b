"""The frame of a report: one page of HTML that needs nothing but itself."""

from __future__ import annotations

import base64
import importlib
import io
import warnings
from collections.abc import Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: #1b1f24; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.7rem; margin: 0; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
p, li { max-width: 72ch; overflow-wrap: anywhere; }
.about { color: #4b5563; margin: .25rem 0 1.2rem; }
.numbers { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.card, figure, table { background: #fff; border: 1px solid #e1e4e8; border-radius: 8px; }
.card { padding: 12px 14px; }
.card b { display: block; font-size: 1.5rem; line-height: 1.3; }
.card span { color: #4b5563; font-size: .9rem; }
.warnings { background: #fff6e5; border: 1px solid #f0cf8b; border-radius: 8px; padding: 4px 16px; }
.warnings ul { padding-left: 1.1rem; margin: .5rem 0; }
.pictures { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; padding: 12px; }
figure img { display: block; width: 100%; max-width: 540px; height: auto; margin: 0 auto; }
figcaption { color: #4b5563; font-size: .9rem; margin-top: 6px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; border-top: 1px solid #eceef1; }
thead th { border-top: 0; font-size: .9rem; color: #4b5563; font-weight: 600; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
summary { font-size: 1.15rem; font-weight: 700; margin: 2rem 0 .6rem; cursor: pointer; }
@media (max-width: 700px) {
  thead { display: none; }
  tr { display: grid; grid-template-columns: 1fr auto; padding: 8px 0; border-top: 1px solid #e1e4e8; }
  tr:first-child { border-top: 0; }
  td { display: contents; border: 0; }
  td:first-child { display: block; grid-column: 1 / -1; font-weight: 600; padding: 2px 12px; border: 0; }
  td:not(:first-child)::before { content: attr(data-of); color: #4b5563; padding: 1px 12px; text-align: left; }
  td span { padding: 1px 12px; text-align: right; }
  td:first-child span { padding: 0; }
}
"""

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="about">$about</p>
$body
</main>
</body>
</html>
""")


def page(title: str, about: str, sections: Sequence[str]) -> str:
    """The whole page.

    Args:
        title, about: plain text.
        sections: HTML, in order.
    """
    return PAGE.substitute(
        title=escape(title), about=escape(about), style=STYLE, body="\n".join(filter(None, sections))
    )


def numbers(cards: Sequence[tuple[str, str]]) -> str:
    """Numbers that are read first, each with what it is. Plain text."""
    cells = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in cards
    )
    return f'<div class="numbers">{"".join(cells)}</div>'


def words(heading: str, paragraphs: Sequence[str]) -> str:
    """A section of plain text; nothing without paragraphs."""
    if not paragraphs:
        return ""
    return f"<h2>{escape(heading)}</h2>" + "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)


def warned(messages: Sequence[str]) -> str:
    """A box of plain text; nothing without messages."""
    if not messages:
        return ""
    items = "".join(f"<li>{escape(message)}</li>" for message in messages)
    return f'<h2>Warnings</h2><div class="warnings"><ul>{items}</ul></div>'


def pictures(figures: Sequence[tuple[str, Figure]]) -> str:
    """Figures with their captions, as vector graphics inside the page."""
    cells = (
        f'<figure><img alt="{escape(caption)}" src="data:image/svg+xml;base64,{_svg(figure)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, figure in figures
    )
    return f'<h2>Pictures</h2><div class="pictures">{"".join(cells)}</div>'


def table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], folded: bool = False) -> str:
    """A table of plain text; nothing without rows. Folded, it is shown when its heading is clicked on.

    On a narrow screen each row becomes a list of its cells with the columns' names.
    """
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-of="{escape(column)}"><span>{escape(cell)}</span></td>'
            for column, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    cells = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    if folded:
        return f"<details><summary>{escape(heading)}</summary>{cells}</details>"
    return f"<h2>{escape(heading)}</h2>{cells}"


def _svg(figure: Figure) -> str:
    buffer = io.BytesIO()
    # Without a date and random names, the same log gives the same page.
    salted = importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "gradbatch"})
    with salted, warnings.catch_warnings():
        # A name in letters that the font does not have is a row of boxes; the tables have it as it is.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode()
