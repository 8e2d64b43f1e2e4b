"""In the training loops of other libraries a monitor measures what it measures in one's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gradbatch import UnsupportedLayer, UsageError
from gradbatch.analysis import GradientMonitor, Record, lightning_callback, read_log, transformers_callback
from gradbatch.analysis.callbacks import LIGHTNING
from tests.zoo.torchvision_shim import make_torchvision_importable

# Of other libraries; what gradbatch warns of is an error in every other test.
pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 20


def imported(name: str) -> Any:
    """The library; skips where it is not installed, and lets torchvision, which it imports, in beside any torch."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _torchvision() -> None:
    if importlib.util.find_spec("torchvision"):
        make_torchvision_importable()


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SIZE, 6, generator=generator, dtype=torch.double)
        self.y = torch.randint(3, (SIZE,), generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index], "id": torch.tensor(index)}


class Network(nn.Module):
    """Returns what models of transformers do: with labels, a loss of its own too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": F.cross_entropy(logits, labels), "logits": logits}
        )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)["logits"], y)


def expected(batch: int, every: int, steps: int, rate: float = 0.1) -> dict[int, tuple[Tensor, float]]:
    """Gradients ``[N, elements]`` of each measured step of training in order, and its loss, by plain autograd."""
    data, model, found = Samples(), Network(), {}
    parameters = list(model.parameters())
    for step, rows in enumerate((list(range(SIZE)) * 10)[k * batch : (k + 1) * batch] for k in range(steps)):
        alone = [
            torch.autograd.grad(loss_of(model, data.x[n : n + 1], data.y[n : n + 1]), parameters)
            for n in rows
        ]
        grads = torch.stack([torch.cat([g.flatten() for g in row]) for row in alone])
        if step % every == 0:
            found[step] = grads, float(loss_of(model, data.x[rows], data.y[rows]).detach())
        with torch.no_grad():
            offset = 0
            for p in parameters:
                p -= rate * grads.mean(0)[offset : offset + p.numel()].reshape(p.shape)
                offset += p.numel()
    return found


def assert_are(records: list[Record], steps: dict[int, tuple[Tensor, float]], losses: bool) -> None:
    assert [record.step for record in records] == list(steps)
    for record, (grads, loss) in zip(records, steps.values(), strict=True):
        assert record.samples == len(grads)
        assert sum(record.sum_of_squares) == pytest.approx(float(grads.square().sum()), rel=1e-9)  # type: ignore[arg-type]
        assert sum(record.square_of_sum) == pytest.approx(float(grads.sum(0).square().sum()), rel=1e-9)  # type: ignore[arg-type]
        assert record.loss == (pytest.approx(loss, rel=1e-6) if losses else None)


def averaged(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def summed(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels)


def train(
    directory: Path,
    model: nn.Module,
    loss: Any,
    callback: Any,
    parts: int,
    data: Dataset[dict[str, Tensor]] | None = None,
    steps: int = 7,
) -> None:
    data = data or Samples()
    transformers = imported("transformers")

    class InOrder(transformers.Trainer):  # type: ignore[name-defined,misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    arguments = transformers.TrainingArguments(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=4 // parts,
        gradient_accumulation_steps=parts,
        max_steps=steps,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        optim="sgd",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    InOrder(model, arguments, train_dataset=data, callbacks=[callback], compute_loss_func=loss).train()


@pytest.mark.parametrize(("parts", "loss"), [(1, averaged), (1, summed), (2, averaged), (2, summed)])
def test_the_trainer_of_transformers_logs_what_plain_training_has(
    tmp_path: Path, parts: int, loss: Any
) -> None:
    imported("transformers"), imported("accelerate")
    model = Network()
    monitor = GradientMonitor(model, tmp_path / "run.jsonl", every=2)
    callback = transformers_callback(monitor, micro_batches=None if parts == 1 else loss.__name__)
    train(tmp_path, model, loss, callback, parts)
    monitor.close()
    rate = 0.1 * (parts if loss is summed else 1)
    assert_are(read_log(tmp_path / "run.jsonl").records, expected(4, 2, 7, rate), losses=False)
    assert int(monitor.noise.batches()) == 4


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(50, (7,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(7) < 4 + index % 3).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(index % 3)}


def test_a_bert_in_the_trainer_of_transformers_has_the_gradients_of_each_sentence_alone(
    tmp_path: Path,
) -> None:
    transformers = imported("transformers")
    imported("accelerate")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    config = transformers.BertConfig(
        **sizes,
        num_attention_heads=2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config)
    alone = []
    for sentence in map(Sentences().__getitem__, range(4)):
        labels = sentence.pop("labels")[None]
        logits = model(**{name: tensor[None] for name, tensor in sentence.items()}).logits
        grads = torch.autograd.grad(F.cross_entropy(logits, labels), list(model.parameters()))
        alone.append(torch.cat([grad.flatten() for grad in grads]))
    with GradientMonitor(model, tmp_path / "run.jsonl", every=1) as monitor:
        callback = transformers_callback(monitor, micro_batches="averaged")
        train(tmp_path, model, averaged, callback, parts=2, data=Sentences(), steps=1)
    (record,) = read_log(tmp_path / "run.jsonl").records
    rows = torch.stack(alone)
    assert sum(record.sum_of_squares) == pytest.approx(float(rows.square().sum()), rel=1e-5)  # type: ignore[arg-type]
    assert sum(record.square_of_sum) == pytest.approx(float(rows.sum(0).square().sum()), rel=1e-5)  # type: ignore[arg-type]


def test_a_loss_that_the_model_computes_itself_is_refused(tmp_path: Path) -> None:
    imported("transformers"), imported("accelerate")
    model = Network()
    monitor = GradientMonitor(model)
    with pytest.raises(UnsupportedLayer, match="Compute the loss outside of the model"):
        train(tmp_path, model, None, transformers_callback(monitor), 1)


def test_the_factor_of_a_scaler_is_taken_out(tmp_path: Path) -> None:
    imported("transformers")
    model, data = Network(), Samples()
    monitor = GradientMonitor(model, tmp_path / "run.jsonl")
    callback = transformers_callback(monitor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # type: ignore[attr-defined]
    callback.on_step_begin(None, SimpleNamespace(global_step=0), None)
    scaler.scale(loss_of(model, data.x[:4], data.y[:4])).backward()
    scaler.unscale_(optimizer)
    callback.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
    monitor.close()
    assert_are(read_log(tmp_path / "run.jsonl").records, expected(4, 1, 1), losses=False)


def test_accumulation_that_is_not_explained_is_refused_before_training(tmp_path: Path) -> None:
    transformers = imported("transformers")
    imported("accelerate")
    callback = transformers_callback(GradientMonitor(Network()))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), gradient_accumulation_steps=2, use_cpu=True, report_to="none"
    )
    with pytest.raises(UsageError, match="accumulates 2 micro-batches a step; say"):
        callback.on_train_begin(arguments, None, None)
    with pytest.raises(UsageError, match="micro_batches is 'mean'"):
        transformers_callback(GradientMonitor(Network()), micro_batches="mean")  # type: ignore[arg-type]


def lightning_module(lightning: Any, whole: bool, manual: bool = False) -> Any:
    class Lit(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.network = Network()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return self.network(x)  # type: ignore[no-any-return]

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return loss_of(self if whole else self.network, batch["x"], batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Lit()


def fit(lightning: Any, lit: Any, callback: Any, directory: Path, size: int, **options: Any) -> Any:
    trainer = lightning.Trainer(
        callbacks=[callback],
        accelerator="cpu",
        max_steps=7,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **options,
    )
    trainer.fit(lit, DataLoader(Samples(), batch_size=size))
    return trainer


@pytest.mark.parametrize(
    ("name", "whole", "micro_batches"),
    [
        ("pytorch_lightning", True, 1),
        ("pytorch_lightning", False, 2),
        ("lightning.pytorch", False, 1),
        ("lightning.pytorch", True, 2),
    ],
)
def test_the_trainer_of_lightning_logs_what_plain_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool, micro_batches: int
) -> None:
    lightning = imported(name)
    for other in {*LIGHTNING} - {name}:
        monkeypatch.delitem(sys.modules, other, raising=False)  # of the two, a program uses one
    lit = lightning_module(lightning, whole)
    monitor = GradientMonitor(lit if whole else lit.network, tmp_path / "run.jsonl", every=2)
    callback = lightning_callback(monitor, ids=lambda batch: batch["id"])
    assert isinstance(callback, lightning.Callback)
    trainer = fit(
        lightning, lit, callback, tmp_path, 4 // micro_batches, accumulate_grad_batches=micro_batches
    )
    monitor.close()
    records = read_log(tmp_path / "run.jsonl").records
    steps = expected(4, 2, 7)
    assert_are(records, steps, losses=True)
    for record, (grads, _) in zip(records, steps.values(), strict=True):
        assert record.hardest
        first = (4 * record.step) % SIZE
        assert record.hardest[0][0] == first + int(grads.norm(dim=1).argmax())

    trainer.save_checkpoint(tmp_path / "some.ckpt")
    state = torch.load(tmp_path / "some.ckpt", weights_only=True)["callbacks"][callback.state_key]
    again = lightning_callback(GradientMonitor(Network() if not whole else lightning_module(lightning, True)))
    again.load_state_dict(state)
    torch.testing.assert_close(again._open.monitor.noise.value(), monitor.noise.value())


def test_the_factor_of_lightning_s_scaler_is_taken_out_of_gradients_and_loss(tmp_path: Path) -> None:
    imported("pytorch_lightning")
    model, data = Network(), Samples()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer = SimpleNamespace(
        global_step=0, accumulate_grad_batches=2, precision_plugin=SimpleNamespace(scaler=scaler)
    )
    with GradientMonitor(model, tmp_path / "run.jsonl") as monitor:
        callback = lightning_callback(monitor)
        for part in (slice(0, 2), slice(2, 4)):
            callback.on_train_batch_start(trainer, None, None, 0)
            loss = scaler.scale(loss_of(model, data.x[part], data.y[part]) / 2)
            callback.on_before_backward(trainer, None, loss)
            loss.backward()
        callback.on_before_optimizer_step(trainer, None, None)
    assert_are(read_log(tmp_path / "run.jsonl").records, expected(4, 1, 1), losses=True)


def test_a_step_that_fails_is_let_go_of_and_manual_optimization_is_refused(tmp_path: Path) -> None:
    lightning = imported("pytorch_lightning")
    lit = lightning_module(lightning, True)
    monitor = GradientMonitor(lit, every=1)
    step = lit.training_step
    lit.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(lightning, lit, lightning_callback(monitor), tmp_path, 4)
    lit.training_step = step
    fit(lightning, lit, lightning_callback(monitor), tmp_path, 4)
    assert int(monitor.noise.batches()) == 7
    manual = lightning_module(lightning, True, manual=True)
    with pytest.raises(UsageError, match="automatic optimization with one optimizer"):
        fit(lightning, manual, lightning_callback(GradientMonitor(manual)), tmp_path, 4)


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", *LIGHTNING):
        monkeypatch.setitem(sys.modules, name, None)
    monitor = GradientMonitor(Network())
    with pytest.raises(UsageError, match="pip install transformers"):
        transformers_callback(monitor)
    with pytest.raises(UsageError, match="pip install lightning"):
        lightning_callback(monitor)
