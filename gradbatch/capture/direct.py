"""The way in where gradbatch drives the backward: from a vector of losses to per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from gradbatch.capture.evaluate import Evaluation, Totals, zeros
from gradbatch.capture.memory import Memory
from gradbatch.capture.samples import samples_of
from gradbatch.capture.search import explain
from gradbatch.capture.uses import Names
from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.plans.contractions import Planner


@dataclass
class Captured:
    """Per-sample gradients of the wanted parameters, and how they came about."""

    grads: dict[nn.Parameter, PerSampleGrad]
    evaluations: list[Evaluation]


def capture_losses(
    losses: Tensor,
    names: Names,
    planner: Planner,
    memory: Memory | None = None,
    sample_ids: Tensor | None = None,
) -> Captured:
    """Per-sample gradients of every wanted parameter.

    Args:
        losses: ``[rows]``, with a graph.
        names: the wanted parameters.
        planner: decides how the results will be evaluated.
        memory: where the samples lay in earlier steps.
        sample_ids: the sample of each loss, ``[rows]``; ``None``: each is one.

    Raises:
        GradBatchError: see :mod:`gradbatch.capture.search`.

    Edge cases: a parameter that no loss depends on has zero gradients; the graph is kept.
    """
    of_rows = samples_of(len(losses), sample_ids)
    found = explain([losses], lambda weights: [weights], of_rows, names, memory=memory)
    samples = of_rows.count
    if not found.walk.accumulators:
        raise UsageError(
            "no loss depends on any of the model's trainable parameters; compute them from the model"
        )
    totals = Totals(found, samples, planner)
    for use, gradients, layout in zip(found.uses, found.use_gradients, found.layouts, strict=True):
        totals.add_call(use, gradients or [], layout)
    for cut, arrived in zip(found.cuts, found.cut_gradients, strict=True):
        totals.add_node(cut, arrived or {})
    for node in found.region:
        totals.pull_back(node)
    totals.check_delivered()
    grads = {
        p: totals.grads[p] if p in totals.grads else zeros(p, samples).with_planner(planner)
        for p in names.parameters
    }
    return Captured(grads, totals.evaluations)
