"""How the cost grows with the batch and with the length of a sequence."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from benchmarks.contestants import OURS
from benchmarks.rows import Plan, Row, measure_row

# Case, what is varied, and its values.
SWEEPS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("cnn", "N", (16, 64, 256, 1024)),
    ("gpt", "T", (32, 64, 128, 256)),
)
SWEPT = ("BatchGrad", "BatchL2Grad", "clipped sum")
SECONDS = 4.0  # a point


def sweep(models: Collection[str], quantities: Collection[str], plan: Plan) -> Iterator[Row]:
    """Rows of the sweeps whose model and quantity are asked for: ours, and the fastest kinds of peers.

    A point has fewer rounds than a row: it is one of several on a curve.
    """
    short = replace(plan, memory=False, repeats=min(plan.repeats, 5), budget=min(plan.budget, SECONDS))
    for case, axis, values in SWEEPS:
        for quantity in SWEPT:
            if case not in models or quantity not in quantities:
                continue
            contestants = [c for c in short.contestants(quantity) if c is OURS or quantity in c.offers]
            for value in values:
                size = {"samples": value} if axis == "N" else {"length": value}
                yield measure_row(case, quantity, short, contestants, **size)
