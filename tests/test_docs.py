"""The examples in the README and in the documentation run as they are printed."""

import ast
import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    if BLOCK.search(path.read_text())
]


def run(page: Path) -> None:
    """Run the page's ``python`` blocks in order, in one namespace; those with prompts as doctests."""
    # A real module name: dataclasses look their module up, which fails for an empty namespace.
    text, namespace = page.read_text(), {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        source, line = block[1], text[: block.start(1)].count("\n")
        if source.lstrip().startswith(">>>"):
            run_doctest(source, namespace, page, line)
        else:
            # Blank lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * line + source, page, "exec"), namespace)


def run_doctest(source: str, namespace: dict[str, Any], page: Path, line: int) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    example = doctest.DocTestParser().get_doctest(source, namespace, page.name, str(page), line)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags)
    runner.run(example, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)
    namespace.update(example.globs)  # the parser works on a copy


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_the_page_run(page: Path) -> None:
    run(page)


def test_the_readme_names_only_commands_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        commands = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / name).read_text(), re.MULTILINE))
        assert commands and commands <= targets, f"{name}: no such target: {sorted(commands - targets)}"


@pytest.mark.parametrize(
    ("page", "kind"), [("adding-a-layer.md", "@gradbatch.layer_rule"), ("adding-a-quantity.md", "class ")]
)
def test_a_layer_and_a_quantity_take_five_lines_at_most(page: str, kind: str) -> None:
    """The first block of each page with the definition holds it in at most five lines."""
    blocks = [block[1] for block in BLOCK.finditer((ROOT / "docs" / page).read_text())]
    source = next(block for block in blocks if re.search(rf"^(@dataclass.*\n)?{kind}", block, re.MULTILINE))
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 5, source


def test_every_export_is_in_the_reference() -> None:
    exported = {
        alias.asname
        for statement in ast.parse((ROOT / "gradbatch" / "__init__.py").read_text()).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    page = (ROOT / "docs" / "reference.md").read_text()
    listed = set(re.findall(r"auto(?:class|function):: (?:[\w.]+\.)?(\w+)", page))
    for module in re.findall(r"automodule:: (gradbatch\.\w+)", page):
        listed |= set(dir(importlib.import_module(module)))
    assert exported <= listed, f"docs/reference.md lacks {sorted(exported - listed)}"
