"""The way in where gradbatch drives the backward: from a vector of losses to per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from gradbatch.capture import checkpoints
from gradbatch.capture.delivery import deliver
from gradbatch.capture.evaluate import Evaluation, Take, Totals
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
    take: Take | None = None,
    keep_graph: bool = True,
) -> Captured:
    """Per-sample gradients of every wanted parameter.

    Args:
        losses: ``[rows]``, with a graph.
        names: the wanted parameters.
        planner: decides how the results will be evaluated.
        memory: where the samples lay in earlier steps.
        sample_ids: the sample of each loss, ``[rows]``; ``None``: each is one.
        take: called with each parameter and its gradients, as soon as they are complete; ``None``: they are returned.
        keep_graph: ``False``: what autograd saved may be freed on the way.

    Raises:
        GradBatchError: see :mod:`gradbatch.capture.search`.

    Edge cases: a parameter that no loss depends on has zero gradients.
    """
    of_rows = samples_of(len(losses), sample_ids)
    losses = checkpoints.in_front(losses)
    found = explain([losses], lambda weights: [weights], of_rows, names, memory=memory)
    if not found.walk.accumulators:
        raise UsageError(
            "no loss depends on any of the model's trainable parameters; compute them from the model"
        )
    grads: dict[nn.Parameter, PerSampleGrad] = {}
    take = take or grads.__setitem__
    totals = Totals(found, of_rows.count, planner, take)
    deliver(found, losses, names, totals, keep_graph)
    for node in found.region:
        totals.pull_back(node)
    totals.finish(names.parameters)
    return Captured(grads, totals.evaluations)
