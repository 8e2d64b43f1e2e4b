"""Writes what a monitor measures for TensorBoard."""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

import torch

from gradbatch.analysis.log import Record, Run, total
from gradbatch.analysis.noise import NoiseScale, squared_gradient, total_variance
from gradbatch.analysis.parts import By, Partition, numbers, partition
from gradbatch.analysis.summary import evidence
from gradbatch.errors import UsageError

PARTS: tuple[By, ...] = ("layer", "group")


class TensorBoard:
    """Writes scalars for each record: of the whole model, of each layer, and of each named group.

    ``loss``, ``norm/…`` of samples' gradients, ``noise/variance`` and ``noise/squared_gradient`` of the batch (both
    unbiased), ``noise/scale`` from their running averages, ``evidence``; ``layer_norm/…`` and ``group_norm/…`` (root
    mean square over samples), ``layer_signal_to_noise/…`` and ``group_signal_to_noise/…`` of a batch like this one, by
    running averages.

    Args:
        directory: of the event files.
        decay: of the running averages, see :class:`~gradbatch.analysis.NoiseScale`.

    Raises:
        UsageError: TensorBoard is not installed, or the directory cannot be written to.

    Edge cases: what is not finite, or has no value, is left out. The pages of ``gradbatch report`` are made from
    :class:`~gradbatch.analysis.JsonLines`; a monitor takes several writers.

    Example:
        ``GradientMonitor(model, [JsonLines("run.jsonl"), TensorBoard("runs/1")])``
    """

    def __init__(self, directory: str | os.PathLike[str], decay: float = 0.95) -> None:
        try:
            events = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise UsageError("TensorBoard is not installed: pip install 'gradbatch[tensorboard]'") from error
        self._decay = decay
        try:
            self._events: Any = events.SummaryWriter(os.fspath(directory))
        except OSError as error:
            raise UsageError(f"a log cannot be written to {directory}: {error.strerror or error}") from error
        self._noise = NoiseScale((), decay)
        self._parts: dict[By, tuple[Partition, NoiseScale]] = {}

    def start(self, run: Run) -> None:
        """Take the names of the parameters, layers and groups."""
        for by in PARTS:
            parts = partition(run, by)
            self._parts[by] = parts, NoiseScale((len(parts.names),), self._decay)

    def write(self, record: Record) -> None:
        """Write the scalars of a record, and hand them to the system."""
        median, largest = record.quantiles[3], record.quantiles[6]
        scalars = {
            "loss": record.loss,
            "norm/mean": record.mean_norm,
            "norm/median": median,
            "norm/largest": largest,
            "evidence": evidence(record),
            **self._whole(record),
        }
        for by in PARTS:
            scalars |= self._part(record, by)
        for name, value in scalars.items():
            if value is not None and math.isfinite(value):
                self._events.add_scalar(name, value, record.step, record.time)
        self._events.flush()

    def close(self) -> None:
        """Close the event files."""
        self._events.close()

    def _whole(self, record: Record) -> dict[str, float | None]:
        squares, square = total(record.sum_of_squares), total(record.square_of_sum)
        if squares is None or square is None:
            return {}
        parts = record.samples, *torch.tensor([squares, square], dtype=torch.double)
        self._noise.update(*parts)
        return {
            "noise/variance": float(total_variance(*parts)),
            "noise/squared_gradient": float(squared_gradient(*parts)),
            "noise/scale": float(self._noise.value()),
        }

    def _part(self, record: Record, by: By) -> dict[str, float | None]:
        parts, noise = self._parts[by]
        squares = parts.sums(numbers(record.sum_of_squares))
        noise.update(record.samples, squares, parts.sums(numbers(record.square_of_sum)))
        norms = (squares / record.samples).sqrt() if record.samples else torch.full_like(squares, math.nan)
        found: dict[str, float | None] = {}
        rows = zip(parts.names, norms.tolist(), noise.signal_to_noise(record.samples).tolist(), strict=True)
        for name, norm, ratio in rows:
            found[f"{by}_norm/{name or '(model)'}"] = norm
            found[f"{by}_signal_to_noise/{name or '(model)'}"] = ratio
        return found
