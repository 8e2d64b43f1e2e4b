"""What TensorBoard shows is what the log says."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradbatch import UsageError
from gradbatch.analysis import GradientMonitor, JsonLines, NoiseScale, Record, TensorBoard, read_log

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Value by step of each tag, as TensorBoard itself reads them."""
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def test_scalars_are_those_of_the_records(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    writers = [JsonLines(tmp_path / "run.jsonl"), TensorBoard(tmp_path / "events", decay=0.9)]
    with GradientMonitor(model, writers, every=2, preset="full", groups={"biases": "*.bias"}) as monitor:
        for k in range(12):
            losses = F.cross_entropy(model(torch.randn(8, 5)), torch.randint(3, (8,)), reduction="none")
            monitor.backward(losses, k)
    found, noise = scalars(tmp_path / "events"), NoiseScale((), 0.9)
    records = read_log(tmp_path / "run.jsonl").records
    for record in records:
        squares, square = sum(record.sum_of_squares), sum(record.square_of_sum)  # type: ignore[arg-type]
        noise.update(8, torch.tensor(squares), torch.tensor(square))
        first, biases = sum(record.sum_of_squares[:2]), sum(record.sum_of_squares[1::2])  # type: ignore[arg-type]
        evidence = 1 - 8 * sum(record.evidence_sums) / sum(record.evidence_elements)  # type: ignore[arg-type]
        expected = {
            "loss": record.loss,
            "norm/mean": record.mean_norm,
            "norm/median": record.quantiles[3],
            "norm/largest": record.quantiles[6],
            "noise/variance": (squares - square / 8) / 7,
            "noise/squared_gradient": (square - squares) / 56,
            "evidence": evidence,
            "layer_norm/0": math.sqrt(first / 8),
            "group_norm/biases": math.sqrt(biases / 8),
        }
        for tag, value in expected.items():
            assert found[tag][record.step] == pytest.approx(value, rel=1e-5), tag
        if math.isfinite(noise.value()):
            assert found["noise/scale"][record.step] == pytest.approx(float(noise.value()), rel=1e-4)
    assert [*found["layer_norm/2"]] == [0, 2, 4, 6, 8, 10]
    assert "layer_signal_to_noise/0" in found and "group_signal_to_noise/biases" in found


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    monitor = GradientMonitor(nn.Linear(3, 1), board := TensorBoard(tmp_path))
    entry = Record(0, 0.0, 4, 1, None, None, [None] * 7, [math.inf, 1.0], [math.nan, 0.5])
    board.write(entry)
    board.write(replace(entry, step=1, samples=0, sum_of_squares=[0.0, 0.0], square_of_sum=[0.0, 0.0]))
    monitor.close()
    assert scalars(tmp_path) == {}


def test_without_tensorboard_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'gradbatch\[tensorboard\]'"):
        TensorBoard(tmp_path)
