"""The zoo's page in the documentation."""

import re
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.zoo.check import Outcome
from tests.zoo.entries import SOURCES

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

INTRODUCTION = """---
orphan: true
---

# Whole models of other libraries

What comes out for models of torchvision, timm, transformers and peft at small sizes, with random weights, in eval mode
and on three samples. A sample's loss is a random projection of its own rows of the outputs. *Right* means equal to
three backward passes of one loss each, to a relative error of 1e-8 for every parameter and sample; where the model
itself computes in float32 on the way, to 1e-3. *Refused* means an error of gradbatch's. {counts}.

Written by `python -m tests.zoo.run --write` with {versions}.

| source | model | outcome | computed in | why |
| --- | --- | --- | --- | --- |
"""


def page(found: Iterable[Outcome]) -> str:
    """The page in Markdown."""
    outcomes = list(found)
    kinds = Counter(outcome.kind for outcome in outcomes)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("right", "refused", "wrong", "skipped"))
    introduction = INTRODUCTION.format(versions=versions(), counts=f"Of {len(outcomes)} models: {counts}")
    return introduction + "\n".join(map(row, outcomes)) + "\n"


def row(outcome: Outcome) -> str:
    """One line of the page's table."""
    why = re.sub(r"([|<>\\*_])", r"\\\1", outcome.why)
    precision = "" if outcome.kind == "skipped" else str(outcome.precision).removeprefix("torch.")
    return f"{beginning(outcome.entry.source, outcome.entry.name)} {outcome.kind} | {precision} | {why} |"


def beginning(source: str, name: str) -> str:
    """Of the line of an entry, what does not depend on its outcome."""
    return f"| {source} | `{name}` |"


def versions() -> str:
    """Versions of torch and of the libraries, without their builds."""
    return ", ".join(f"{package} {_version(package)}" for package in ("torch", *SOURCES))


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "missing"
