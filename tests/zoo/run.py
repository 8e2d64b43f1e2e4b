"""Run the zoo: ``python -m tests.zoo.run [--only PATTERN] [--third] [--write | --count]``."""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.zoo.check import Outcome, outcome
from tests.zoo.entries import SOURCES, entries, third
from tests.zoo.entry import Entry
from tests.zoo.page import PAGE, page
from tests.zoo.readers import readers


def main() -> int:
    """A line for each entry as it is done, and the totals; exit code 1 if one is wrong, or too many are refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="entries whose source/name matches")
    parser.add_argument("--third", action="store_true", help="the third that the tests run")
    parser.add_argument(
        "--write", action="store_true", help="write the page of the documentation: whole runs only"
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="count how often nodes are called once for each sample, and no more",
    )
    asked = parser.parse_args()
    if asked.write and (asked.only or asked.third):
        parser.error("--write is for a run of the whole zoo")
    chosen = [
        entry
        for source in SOURCES
        for entry in (third if asked.third else entries)(source)
        if re.search(asked.only, str(entry))
    ]
    if asked.count:
        count(chosen)
        return 0
    start, found = time.perf_counter(), []
    for number, entry in enumerate(chosen, 1):
        found.append(outcome(entry))
        _say(f"{number:4}/{len(chosen)} {line(found[-1])}")
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(Counter(o.kind for o in found).items()))
    _say(f"{kinds}; {time.perf_counter() - start:.0f} s")
    if asked.write:
        PAGE.write_text(page(found))
    compared = [o for o in found if o.kind != "skipped"]
    right = sum(o.kind == "right" for o in compared)
    return int(any(o.kind == "wrong" for o in compared) or 100 * right < 99 * len(compared))


def count(chosen: Sequence[Entry]) -> None:
    """A line for each entry that has node calls, with their share of its uses, and the totals."""
    totals: Counter[str] = Counter()
    for entry in chosen:
        found = readers(entry)
        totals += found.readers
        if found.why or found.called:
            called = ", ".join(f"{kind}: {times}" for kind, times in found.called.items())
            _say(
                f"{entry!s:48} {found.share:6.1%} of {found.readers.total():4} {called} {found.why}".rstrip()
            )
    _say(f"{len(chosen)} entries, uses by reader: {dict(totals)}")


def line(outcome: Outcome) -> str:
    """What came out, how many parameters have gradients, and seconds of build, reference and gradbatch."""
    parameters = f"{outcome.parameters:4}" + (
        f" (+{outcome.without_gradient})" if outcome.without_gradient else ""
    )
    seconds = " ".join(f"{s:5.1f}" for s in outcome.seconds)
    precision = str(outcome.precision).removeprefix("torch.")
    return f"{outcome.entry!s:48} {outcome.kind:8} {precision} {parameters:11} {seconds:17} {outcome.why}".rstrip()


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a report to the person at the terminal


if __name__ == "__main__":
    sys.exit(main())
