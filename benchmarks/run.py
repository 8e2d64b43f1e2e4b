"""Time and memory of gradbatch and its peers, as ratios to a plain step: ``python -m benchmarks.run --help``.

A complete run writes its tables into benchmarks/RESULTS.md (between two markers, nothing else is touched), the numbers
to benchmarks/results-DEVICE.json and plots to docs/. Any smaller one prints, and writes only where --output says.
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import distributions
from os.path import relpath
from pathlib import Path

import torch

from benchmarks.cases import CASES
from benchmarks.contestants import PEERS
from benchmarks.phases import profile
from benchmarks.plots import draw
from benchmarks.quantities import QUANTITIES
from benchmarks.report import put_between, section
from benchmarks.rows import Plan, Row, measure_row
from benchmarks.sweeps import sweep

ROOT = Path(__file__).parent.parent
QUICK_QUANTITIES = ("BatchGrad", "BatchL2Grad", "clipped sum")
PACKAGES = ("opacus", "backpack-for-pytorch")


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", type=torch.device)
    add("--threads", nargs="+", default=[1], type=int, help="a table for each number; default 1")
    for name, values in (("models", CASES), ("quantities", QUANTITIES), ("peers", PEERS)):
        told = f"some of: {', '.join(values)}"
        add(f"--{name}", nargs="*", default=list(values), choices=values, metavar="NAME", help=told)
    add("--derived", action="store_true", help="peers also in what follows from their per-sample gradients")
    add("--repeats", default=15, type=int, help="rounds at most; default 15")
    add("--budget", default=8.0, type=float, help="seconds of timing a row, three rounds at least; default 8")
    add("--no-memory", dest="memory", action="store_false")
    add("--no-sweeps", dest="sweeps", action="store_false")
    add(
        "--quick",
        action="store_true",
        help="an eighth of each batch, three quantities, three rounds, times only",
    )
    add("--output", type=Path, help="folder to write to")
    add("--profile", action="store_true", help="instead: where the time goes, of --models and --quantities")
    chosen = parser.parse_args(arguments)
    everything = (chosen.models, chosen.quantities, chosen.peers) == (
        list(CASES),
        list(QUANTITIES),
        list(PEERS),
    )
    chosen.complete = everything and chosen.memory and chosen.sweeps and not chosen.quick
    if chosen.quick:
        chosen.memory = chosen.sweeps = False
        if chosen.quantities == list(QUANTITIES):
            chosen.quantities = list(QUICK_QUANTITIES)
    return chosen


def plan_of(chosen: argparse.Namespace) -> Plan:
    plan = Plan(
        chosen.device, chosen.peers, chosen.derived, chosen.repeats, chosen.budget, memory=chosen.memory
    )
    return replace(plan, repeats=3, budget=1.0, shrink=8) if chosen.quick else plan


def measure(chosen: argparse.Namespace, plan: Plan, rows: list[Row], sweeps: list[Row]) -> None:
    """Add all rows, and those of the sweeps; memory and sweeps with the first number of threads only."""
    for threads in chosen.threads:
        torch.set_num_threads(threads)
        first = threads == chosen.threads[0]
        current = replace(plan, memory=plan.memory and first)
        for case in chosen.models:
            for quantity in chosen.quantities:
                rows.append(measure_row(case, quantity, current))
                print(brief(rows[-1]), flush=True)
        if first and chosen.sweeps:
            for row in sweep(chosen.models, chosen.quantities, current):
                sweeps.append(row)
                print(brief(row), flush=True)


def brief(row: Row) -> str:
    """A row in a line, for whoever waits."""
    told = []
    for name, cell in row.cells.items():
        said = [cell.said.split(":")[0]] if cell.said else []
        if cell.ratio is not None:
            said.append(f"{cell.ratio[0]:.2f}")
        if cell.memory_ratio is not None:
            said.append(f"memory {cell.memory_ratio:.2f}")
        told.append(f"{name} {', '.join(said)}")
    size = f"N={row.samples}" + ("" if row.length is None else f" T={row.length}")
    return f"{row.case} {size} {row.quantity}, {row.threads} threads: {'; '.join(told)}"


def environment(chosen: argparse.Namespace, command: str, seconds: float) -> dict[str, str]:
    """What the numbers hang on."""
    device = str(chosen.device)
    if chosen.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(chosen.device)})"
    found = {"device": device, "command": command, "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    installed = {distribution.name: distribution.version for distribution in distributions()}
    found |= {package: installed.get(package, "not installed") for package in PACKAGES}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found["commit"] = commit.stdout.strip() or "unknown"
    found["float"] = str(torch.get_default_dtype()).removeprefix("torch.")
    found["minutes"] = f"{seconds / 60:.0f}"
    return found


def write(
    rows: Sequence[Row], sweeps: Sequence[Row], facts: Mapping[str, str], device: str, output: Path | None
) -> None:
    """Tables, numbers and plots, into the checkout or a folder of the user's."""
    tables, pictures = (output, output) if output else (ROOT / "benchmarks", ROOT / "docs")
    tables.mkdir(parents=True, exist_ok=True)
    numbers = {
        "environment": facts,
        "rows": [r.as_json() for r in rows],
        "sweeps": [r.as_json() for r in sweeps],
    }
    (tables / f"results-{device}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    try:
        files = draw(rows, sweeps, pictures, device)
    except ImportError as error:
        print(f"no plots: {error}")
        files = {}
    plots = {what: relpath(file, tables) for what, file in files.items()}
    results = tables / "RESULTS.md"
    text = results.read_text() if results.exists() else ""
    results.write_text(put_between(text, device, section(rows, sweeps, facts, plots)))
    print(f"written: {results} and its neighbours")


def main() -> None:
    chosen = options(sys.argv[1:])
    if chosen.profile:
        torch.set_num_threads(chosen.threads[0])
        for case in chosen.models:
            for quantity in chosen.quantities:
                print(profile(case, quantity, chosen.device, min(chosen.repeats, 10)), flush=True)
        return
    started = time.perf_counter()
    rows: list[Row] = []
    sweeps: list[Row] = []
    try:
        measure(chosen, plan_of(chosen), rows, sweeps)
    finally:
        # What an interrupted run has found is shown, but not written down.
        command = " ".join(["python -m benchmarks.run", *map(shlex.quote, sys.argv[1:])])
        facts = environment(chosen, command, time.perf_counter() - started)
        print(section(rows, sweeps, facts, {}))
    if chosen.output or chosen.complete:
        write(rows, sweeps, facts, chosen.device.type, chosen.output)


if __name__ == "__main__":
    with warnings.catch_warnings():
        # Peers warn of versions of torch and of hooks on every call; what matters of it comes out as a refusal.
        warnings.simplefilter("ignore")
        main()
