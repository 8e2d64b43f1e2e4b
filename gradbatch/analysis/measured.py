"""What a monitor measures: the quantities of each statistic, and the record that is made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbatch.analysis.agreement import cosines
from gradbatch.analysis.ids import ids_of
from gradbatch.analysis.log import Record
from gradbatch.analysis.noise import not_negative
from gradbatch.analysis.norms import norm_histogram, norm_quantiles
from gradbatch.analysis.quantities import BatchDotSum, EvidenceParts, FirstGram, SumL2Grad
from gradbatch.errors import UsageError
from gradbatch.quantities import BatchL2Grad, Quantity
from gradbatch.results import Results

PRESETS: Mapping[str, tuple[str, ...]] = {
    "economy": ("norms",),
    "standard": ("norms", "tests"),
    "full": ("norms", "tests", "evidence", "gram"),
}
HARDEST = 8


def quantities(statistics: Collection[str]) -> tuple[Quantity, ...]:
    """What is asked of a backward pass for some statistics; the norms always."""
    # The dot products with the sum add up to its squared norm.
    asked: list[Quantity] = [BatchL2Grad(), BatchDotSum() if "tests" in statistics else SumL2Grad()]
    if "evidence" in statistics:
        asked.append(EvidenceParts())
    if "gram" in statistics:
        asked.append(FirstGram())
    return tuple(asked)


def record_of(
    results: Results,
    statistics: Collection[str],
    step: int,
    loss: float | None,
    scale: float,
    ids: Tensor | Sequence[int] | None,
) -> Record:
    """What a step's log says.

    Args:
        results: of the quantities of these statistics.
        statistics: that were measured.
        step, loss: its number, and its loss.
        scale: what the loss was multiplied with.
        ids: of the samples, or ``None``.

    Raises:
        UsageError: there is not one id a sample, or they are no whole numbers.
    """
    # Not by the square, which may be out of range.
    squares = _stacked(results, BatchL2Grad()) / scale / scale  # [P, N]
    norms, count, dots = squares.sum(0).sqrt(), squares.shape[1], None
    if "tests" in statistics:
        products = _stacked(results, BatchDotSum()) / scale / scale  # [P, N]
        squares_of_sum = not_negative(products.sum(1))
        dots = float(products.sum(0).square().sum())
    else:
        squares_of_sum = _stacked(results, SumL2Grad()) / scale / scale
    numbers = None if ids is None else _numbers(ids, count)
    finite = norms[norms.isfinite()]
    return Record(
        step=step,
        time=time.time(),
        samples=count,
        non_finite=count - len(finite),
        loss=loss,
        mean_norm=float(finite.mean()),
        quantiles=norm_quantiles(norms).tolist(),
        histogram=norm_histogram(norms),
        sum_of_squares=squares.sum(1).tolist(),
        square_of_sum=squares_of_sum.tolist(),
        dot_squares=dots,
        hardest=None if numbers is None else _hardest(norms, numbers),
        **(_evidence(results) if "evidence" in statistics else {}),
        **(_cosines(results, numbers) if "gram" in statistics else {}),
    )


def _stacked(results: Results, quantity: Quantity) -> Tensor:
    """The quantity of all parameters, ``[P, ...]``, in float64: one transfer to the CPU, and sums without rounding."""
    tensors = list(results[quantity].values())
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).cpu().double()


def _numbers(ids: Tensor | Sequence[int], count: int) -> list[int]:
    numbers: list[int] = ids_of(ids).tolist()
    if len(numbers) != count:
        raise UsageError(f"{len(numbers)} ids for {count} samples")
    return numbers


def _hardest(norms: Tensor, ids: Sequence[int]) -> list[tuple[int, float | None]]:
    # What is not finite is the hardest of all.
    order = norms.nan_to_num(nan=math.inf, posinf=math.inf).argsort(descending=True, stable=True)[:HARDEST]
    return [(ids[i], float(norms[i])) for i in order.tolist()]


def _evidence(results: Results) -> dict[str, Any]:
    # A ratio of squares: whatever the loss was scaled with cancels.
    sums, elements = _stacked(results, EvidenceParts()).unbind(1)
    return {"evidence_sums": sums.tolist(), "evidence_elements": elements.long().tolist()}


def _cosines(results: Results, ids: Sequence[int] | None) -> dict[str, Any]:
    angles = cosines(_stacked(results, FirstGram()).sum(0))
    rows = [[round(value, 4) for value in row] for row in angles.tolist()]
    return {"cosines": rows, "ids": None if ids is None else list(ids[: len(rows)])}
