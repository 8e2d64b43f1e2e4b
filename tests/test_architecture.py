"""The promises about the code itself: one direction of imports, small files, named for what they hold."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gradbatch"
MODULES = sorted(PACKAGE.rglob("*.py"))
BESIDE = ("tests", "examples", "benchmarks", "docs")
SOURCES = MODULES + sorted(path for top in BESIDE for path in (ROOT / top).rglob("*.py"))

# A layer may import from layers before it, never from a neighbour in its own layer nor from one after it.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "blockmap"}),
    frozenset({"plans"}),
    frozenset({"factors"}),
    frozenset({"rules", "quantities"}),
    frozenset({"capture", "results", "reduction"}),
    frozenset({"selection", "requests"}),
    frozenset({"api"}),
    frozenset({"functional", "verify", "privacy", "analysis"}),
    frozenset({"compat"}),
    frozenset({"__init__"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
THIRD_PARTY = {
    "analysis": {"torch", "matplotlib"},
    "blockmap": {"torch"},
    "cli": {"torch", "typer", "rich"},
    "compat": {"torch", "opacus"},
    "privacy": {"torch", "dp_accounting"},
    "verify": {"torch", "rich"},
}
MAX_LINES, MAX_FUNCTION_LINES = 350, 70


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def component(path: Path) -> str:
    """First name under the package: ``gradbatch/rules/convolutions.py`` belongs to ``rules``."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, at any depth of the code: deferred imports are imports too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_components(path: Path) -> Iterator[tuple[str, str]]:
    """``(component, full name)`` of every import from gradbatch; a name exported by the package is ``__init__``'s."""
    for name in imported_names(ast.parse(path.read_text())):
        top, *rest = name.split(".")
        if top == "gradbatch":
            first = rest[0] if rest else "__init__"
            is_module = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
            yield (first if is_module else "__init__"), name


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_imports_run_one_way(path: Path) -> None:
    own = component(path)
    assert own in LEVEL, f"{label(path)}: give {own!r} its place in LAYERS, after all that it imports"
    for other, name in imported_components(path):
        below = other == own or LEVEL[other] < LEVEL[own]
        assert below, f"{label(path)} imports {name}: {other} is not below {own}"


def test_rules_and_quantities_never_import_each_other() -> None:
    for path in MODULES:
        other = {"rules": "quantities", "quantities": "rules"}.get(component(path))
        assert other not in {found for found, _ in imported_components(path)}, label(path)


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_only_declared_packages_are_imported_and_blockmap_imports_torch_alone(path: Path) -> None:
    names = imported_names(ast.parse(path.read_text()))
    tops = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"gradbatch"}
    allowed = THIRD_PARTY.get(component(path), {"torch", "opt_einsum"})
    assert tops <= allowed, f"{label(path)} imports {sorted(tops - allowed)}; it may import {sorted(allowed)}"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_a_file_holds_one_concept_and_is_named_for_it(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "helper", "common", "misc"}, (
        f"{label(path)}: of what?"
    )
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{label(path)} has {lines} lines, more than {MAX_LINES}: two concepts?"


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_public_things_have_docstrings(path: Path) -> None:
    module = ast.parse(path.read_text())
    assert ast.get_docstring(module), f"{label(path)} does not say what it is for"
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{label(path)}:{node.lineno} {node.name} has no docstring"
        # A class with a base may override what the base documents; one without has nowhere else to say it.
        if isinstance(node, ast.ClassDef) and not node.bases and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    where = f"{label(path)}:{method.lineno} {node.name}.{method.name}"
                    assert ast.get_docstring(method), f"{where} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_functions_fit_a_screen(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
            lines = (node.end_lineno or start) - start + 1
            assert lines <= MAX_FUNCTION_LINES, f"{label(path)}:{node.lineno} {node.name} has {lines} lines"


def test_the_package_exports_by_explicit_name_and_says_its_version_and_does_nothing_else() -> None:
    docstring, *statements, version = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr), "a module docstring first"
    assert isinstance(version, ast.Assign), "__version__ last"
    assert ast.unparse(version.targets[0]) == "__version__"
    for statement in statements:
        assert isinstance(statement, ast.ImportFrom), f"line {statement.lineno} is no `from … import X as X`"
        for alias in statement.names:
            wanted = f"{alias.name} as {alias.name}"
            assert alias.asname == alias.name, f"line {statement.lineno}: write `{wanted}`"
