"""Other libraries' loops with batches that are smaller than others, or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbatch.analysis import GradientMonitor, lightning_callback, read_log, transformers_callback
from tests.analysis import test_callbacks as whole

pytestmark = pytest.mark.filterwarnings("ignore")
_torchvision = whole._torchvision


class Three(whole.Samples):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("loss", [whole.averaged, whole.summed])
def test_a_smaller_last_micro_batch_counts_for_its_samples(tmp_path: Path, loss: Any) -> None:
    whole.imported("transformers"), whole.imported("accelerate")
    model = whole.Network()
    with GradientMonitor(model, tmp_path / "run.jsonl", every=1, preset="full") as monitor:
        callback = transformers_callback(monitor, micro_batches=loss.__name__)
        whole.train(tmp_path, model, loss, callback, parts=2, data=Three(), steps=1)
    whole.assert_are(read_log(tmp_path / "run.jsonl").records, whole.expected(3, 1, 1), losses=False)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_batches_that_lightning_leaves_out_are_left_out(tmp_path: Path, accumulated: int) -> None:
    lightning = whole.imported("pytorch_lightning")
    lit, asked = whole.lightning_module(lightning, True), []
    step = lit.training_step
    lit.training_step = lambda batch, batch_idx: None if batch_idx == 1 else step(batch, batch_idx)

    def ids(batch: dict[str, Tensor]) -> Tensor:
        asked.append(batch)
        return batch["id"]

    with GradientMonitor(lit, tmp_path / "run.jsonl", every=2) as monitor:
        callback = lightning_callback(monitor, ids=ids)
        whole.fit(lightning, lit, callback, tmp_path, 4, accumulate_grad_batches=accumulated)
    records = read_log(tmp_path / "run.jsonl").records
    # Step 6 is the second batch of the second epoch, where none are joined.
    assert [record.step for record in records] == [0, 2, 4, 6][: 2 + accumulated]
    (grads, _) = whole.expected(4, 1, 1)[0]
    assert records[0].samples == 4 and records[0].hardest
    assert sum(records[0].sum_of_squares) == pytest.approx(float(grads.square().sum()), rel=1e-9)  # type: ignore[arg-type]
    assert sorted(sample for sample, _ in records[0].hardest) == [0, 1, 2, 3]
    assert len(asked) <= 5 * accumulated, "ids are asked for where a step is measured"
    assert all(torch.equal(batch["id"].sort().values, batch["id"]) for batch in asked)
