"""A small network that is monitored, and the record that its materialised gradients make."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbatch.analysis import Record, norm_quantiles


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = (
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    return nn.Sequential(*layers).double()


def batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4, 5, 5, dtype=torch.double), torch.randint(3, (count,))


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Gradients of each sample's own loss, ``[N, elements]`` for each parameter: a backward pass a sample."""
    rows = [
        torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), list(model.parameters()))
        for n in range(len(x))
    ]
    return [torch.stack(column).flatten(1) for column in zip(*rows, strict=True)]


def assert_is_of(record: Record | None, grads: list[Tensor]) -> None:
    assert record is not None
    whole = torch.cat(grads, 1)
    norms = whole.norm(dim=1)
    assert record.samples == len(whole) and record.non_finite == 0
    assert record.sum_of_squares == pytest.approx([float(g.square().sum()) for g in grads], rel=1e-9)
    assert record.square_of_sum == pytest.approx([float(g.sum(0).square().sum()) for g in grads], rel=1e-9)
    assert record.quantiles == pytest.approx(norm_quantiles(norms).tolist(), rel=1e-9)
    assert record.mean_norm == pytest.approx(float(norms.mean()), rel=1e-9)
    if record.dot_squares is not None:
        assert record.dot_squares == pytest.approx(float((whole @ whole.sum(0)).square().sum()), rel=1e-9)
    if record.evidence_sums is not None:
        means = [g.mean(0) for g in grads]
        variances = [(g - m).square().sum(0) / (len(g) - 1) for g, m in zip(grads, means, strict=True)]
        alive = [(m != 0) | (v != 0) for m, v in zip(means, variances, strict=True)]
        ratios = [
            float((m[a].square() / v[a]).sum()) for m, v, a in zip(means, variances, alive, strict=True)
        ]
        assert record.evidence_sums == pytest.approx(ratios, rel=1e-9)
        assert record.evidence_elements == [int(a.sum()) for a in alive]
    if record.cosines is not None:
        angles = F.cosine_similarity(whole[:, None], whole[None], dim=2)
        assert torch.tensor(record.cosines).sub(angles).abs().max() < 0.501e-4, "four digits are logged"
