"""Run the node reader alone, and see how each use of a parameter was read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

import gradbatch
from gradbatch import BatchGrad
from gradbatch.capture import checkpoints, graph, search
from gradbatch.capture.direct import Captured, capture_losses
from gradbatch.capture.uses import Names, Use
from gradbatch.plans.contractions import Planner
from gradbatch.selection import select
from tests.capture.reference import Losses
from tests.oracle import TOLERANCE, Gradients, assert_right


def without_recorded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recorded call is used, as if no layer had a rule."""

    def find_none(roots: Sequence[Node], names: Names) -> tuple[list[Use], graph.Walk]:
        return [], checkpoints.walk(roots, names.parameters)

    monkeypatch.setattr(search, "find_uses", find_none)


def read(model: nn.Module, losses: Tensor) -> Captured:
    """As ``gradbatch.backward`` does, with all that is measured measured anew."""
    return capture_losses(losses, select(model, None).names, Planner())


def watch(model: nn.Module, losses: Losses) -> Gradients:
    """Per-sample gradients from the user's own backward pass."""
    with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
        losses().sum().backward()
    return dict(results[BatchGrad])


def dense(model: nn.Module, captured: Captured) -> Gradients:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: grad.dense() for parameter, grad in captured.grads.items()}


def assert_captured(model: nn.Module, captured: Captured, right: Gradients) -> None:
    """Right, and every parameter with a gradient is accounted for."""
    assert_same(dense(model, captured), right)
    names = {parameter: name for name, parameter in model.named_parameters()}
    explained = {names[p] for evaluation in captured.evaluations for p in evaluation.parameters}
    assert explained >= {name for name, gradients in right.items() if gradients.any()}


def assert_same(found: Gradients, right: Gradients) -> None:
    assert found.keys() == right.keys()
    for name, gradients in right.items():
        assert_right(found[name], gradients, TOLERANCE[torch.double], name, per_sample=True)
