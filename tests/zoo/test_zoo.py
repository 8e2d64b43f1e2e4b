"""Whole models of other libraries: a third of the zoo is right, and the page says so."""

import pytest

from tests.zoo.check import Outcome, as_its_library_expects, outcome
from tests.zoo.entries import PACKAGES, SOURCES, entries, third
from tests.zoo.page import PAGE, beginning, row, versions
from tests.zoo.torchvision_shim import make_torchvision_importable


def require(source: str) -> None:
    """Skip where a package of the source is not installed."""
    with as_its_library_expects():
        make_torchvision_importable()
        for package in PACKAGES[source]:
            pytest.importorskip(package)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_none_is_wrong_and_next_to_none_refused(source: str) -> None:
    require(source)
    found = [outcome(entry) for entry in third(source)]
    wrong = [o for o in found if o.kind == "wrong"]
    assert not wrong, listed(wrong)
    skipped, refused = ([o for o in found if o.kind == kind] for kind in ("skipped", "refused"))
    assert 10 * len(skipped) <= len(found), listed(skipped)
    assert 100 * len(refused) <= len(found) - len(skipped), listed(refused)
    if versions() in PAGE.read_text():
        stale = [o for o in found if row(o) not in PAGE.read_text()]
        assert not stale, f"run python -m tests.zoo.run --write; it is otherwise for\n{listed(stale)}"


def test_the_page_has_a_line_for_every_entry_and_names_are_unique() -> None:
    lines = [beginning(entry.source, entry.name) for source in SOURCES for entry in entries(source)]
    assert len(set(lines)) == len(lines)
    described = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert len(described) == len(lines)
    for line, start in zip(described, lines, strict=True):
        assert line.startswith(start), "run python -m tests.zoo.run --write"


def listed(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{o.entry}: {o.kind}: {o.why}" for o in outcomes)
