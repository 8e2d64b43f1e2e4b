"""What verify makes of layers without a rule, and of layers that are refused."""

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbatch.verify import ParameterReport, Report, verify
from tests.test_verify import by_name, doubles


class Attention(nn.Module):
    """What has a rule, what has none, and what is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids) * self.scale
        logits: Tensor = self.head(self.attention(h, h, h)[0])
        return logits


class Mixing(nn.Module):
    """Two parameters whose uses mix the samples, a layer behind them, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(20, 4), nn.Parameter(torch.ones(4))
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(4, 2)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        looked_up, scaled = self.embedding(ids), weights * self.scale
        logits: Tensor = self.head((looked_up - looked_up.mean(0)) * (scaled - scaled.mean(0)))
        return logits


class Checkpointed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, input.requires_grad_(), use_reentrant=True)
        return output


class CheckpointFunction(torch.autograd.Function):
    """As other libraries have it."""

    @staticmethod
    def forward(ctx, run, input):
        ctx.run, ctx.input = run, input
        return run(input)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            input = ctx.input.detach().requires_grad_()
            torch.autograd.backward(ctx.run(input), gradient)
        return None, input.grad


class Hidden(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = CheckpointFunction.apply(super().forward, input.requires_grad_())
        return output


def test_layers_without_a_rule_are_checked_like_the_others() -> None:
    report = verify(Attention().double(), torch.randint(20, (3, 5)))
    report.raise_for_mismatch()
    assert report.ok and not report.refusals and report.reference == "torch.func.vmap"
    rows = by_name(report)
    by_node = {name: row.rule for name, row in rows.items() if row.reader == "node"}
    assert by_node == {
        "scale": "Mul: summed_to",
        "attention.in_proj_weight": "Mm: product",
        "attention.in_proj_bias": "Add: summed_to",
        "attention.out_proj.weight": "Addmm: product",
        "attention.out_proj.bias": "Addmm: summed_to",
    }
    assert all(row.error == pytest.approx(0, abs=1e-12) for row in rows.values())
    unused = rows["unused.weight"]
    assert (unused.rule, unused.structure, unused.flops, unused.error) == ("", "", None, 0)
    assert ["unused.weight", "3x3", *"–––", "unused", *"–––", "exact"] in [
        line.split() for line in str(report).splitlines()
    ]
    assert "10 parameters agree" in report.headline() and not report.notes()


class Distances(nn.Module):
    """From points to its own, by a function that no rule describes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, input: Tensor) -> Tensor:
        return torch.cdist(input, self.weight)


def test_operations_that_are_evaluated_sample_by_sample_are_listed_with_their_layers() -> None:
    shared = Distances()
    model = nn.Sequential(Distances(), nn.Linear(4, 4), shared, shared).double()
    report = verify(model, doubles(3, 5, 4))
    assert report.ok
    rows = by_name(report)
    assert (rows["0.weight"].reader, rows["0.weight"].rule) == ("node call", "Cdist")
    assert (rows["2.weight"].reader, rows["2.weight"].rule) == ("node call", "Cdist x2")
    (note,) = report.notes()
    assert note.startswith("CdistBackward has no rule: 3 uses evaluated by a call for each of 3 samples")
    assert "2 (Distances) x2" in note and "0 (Distances)" in note


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_refused_is_named_and_everything_else_is_checked_all_the_same(count: int) -> None:
    model = nn.ModuleDict({str(i): Mixing() for i in range(count)}).double()

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
            return sum((part(ids, weights) for part in self.parts.values()), torch.zeros(()))

    report = verify(All(), (torch.randint(20, (3, 5)), doubles(3, 5, 1)))
    report.raise_for_mismatch()
    rows = by_name(report)
    refused = {
        name.rpartition(".")[0] if "embedding" in name else name for name, row in rows.items() if row.refusal
    }
    assert not report.ok
    assert refused == {f"parts.{i}.{name}" for i in range(count) for name in ("scale", "embedding")}
    assert len([name for names in report.refusals.values() for name in names]) == 2 * count
    assert "(Embedding): the gradients that arrive at its EmbeddingBackward" in str(report)
    assert f"{2 * count} refused" in report.headline()
    assert rows["parts.0.head.weight"].error == pytest.approx(0, abs=1e-12)
    assert rows["parts.0.unused.weight"].error == 0 and not rows["parts.0.unused.weight"].uses


def test_one_reason_for_all_parameters_is_told_once() -> None:
    report = verify(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), doubles(4, 3))
    assert not report.ok and not report.mismatches
    ((reason, names),) = report.refusals.items()
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert "1 (BatchNorm1d) normalises over the batch" in reason
    assert str(report).count(reason) == 1 and "nothing could be compared; 4 refused" in str(report)


def test_parameters_that_cannot_be_told_apart_in_time_are_refused_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_module("gradbatch.verify.findings"), "MOST_ATTEMPTS", 12)
    layers = [nn.Linear(2, 2, bias=False) for _ in range(12)]
    report = verify(nn.Sequential(*layers, MeanRemoved()).double(), doubles(3, 2))
    ((_, names),) = report.refusals.items()
    assert len(names) == 12


class MeanRemoved(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean(0)


def test_what_hides_from_the_graph_is_refused_and_not_taken_for_unused() -> None:
    report = verify(nn.Sequential(nn.Tanh(), Hidden(3, 2)).double(), doubles(4, 3))
    assert not report.ok and "use torch.utils.checkpoint" in str(report)


def test_reentrant_checkpoints_are_compared_with_plain_backward_passes() -> None:
    model, x = nn.Sequential(nn.Tanh(), Checkpointed(3, 2), nn.Linear(2, 2)).double(), doubles(4, 3)
    model[2].weight.grad = torch.ones(2, 2).double()
    report = verify(model, x)
    report.raise_for_mismatch()
    assert report.ok and report.reference == "one backward pass a sample" and len(report.parameters) == 4
    assert model[2].weight.grad.eq(1).all() and model[1].weight.grad is None


def test_an_error_of_nothing_is_called_exact() -> None:
    def report(*errors: float) -> Report:
        rows = [ParameterReport(f"p{i}", torch.Size([2]), error=error) for i, error in enumerate(errors)]
        return Report("Model", rows, 3, torch.float64, torch.device("cpu"), "torch.func.vmap", 1e-10)

    assert report(0.0, 0.0).headline().endswith("2 parameters agree with torch.func.vmap exactly.")
    assert [row[-1] for row in report(0.0, 3e-16).rows()] == ["exact", "3.0e-16"]
    assert "within 1e-10, largest error 3.0e-16." in report(0.0, 3e-16).headline()
