"""The way in where gradbatch drives the backward: from a vector of losses to per-sample gradients."""

from __future__ import annotations

from torch import Tensor, nn

from gradbatch.capture.evaluate import evaluate, zeros
from gradbatch.capture.probe import owned_gradients
from gradbatch.capture.uses import Names, find_uses
from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.plans.contractions import Planner


def capture_losses(losses: Tensor, names: Names, planner: Planner) -> dict[nn.Parameter, PerSampleGrad]:
    """Per-sample gradients of every wanted parameter, ``N = len(losses)``.

    Args:
        losses: ``[N]``, with a graph.
        names: the wanted parameters.
        planner: decides how the results will be evaluated.

    Raises:
        GradBatchError: see :mod:`gradbatch.capture.uses` and :mod:`gradbatch.capture.owners`.

    Edge cases: a parameter that no loss depends on has zero gradients; the graph is kept.
    """
    assert losses.grad_fn is not None
    uses, walk = find_uses([losses.grad_fn], names)
    if not walk.accumulators:
        raise UsageError(
            "no loss depends on any of the model's trainable parameters; compute them from the model"
        )
    samples = len(losses)
    result: dict[nn.Parameter, PerSampleGrad] = {}
    if samples:
        found = owned_gradients(uses, [losses], lambda weights: [weights], samples, names)
        result = evaluate(uses, *found, samples, planner)
    return {
        p: result[p] if p in result else zeros(p, samples).with_planner(planner) for p in names.parameters
    }
