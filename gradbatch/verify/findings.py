"""What gradbatch itself finds of each parameter: gradients, how they came about, or why there are none."""

from __future__ import annotations

import glob
import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradbatch.capture import checkpoints, graph
from gradbatch.capture.direct import Captured, capture_losses
from gradbatch.errors import GradBatchError, SlowPathWarning, UsageError
from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.plans.contractions import Plan, Planner
from gradbatch.selection import select
from gradbatch.verify.report import Explained

# Each is a search of its own, some backward passes of the whole model.
MOST_ATTEMPTS = 64


@dataclass(frozen=True)
class Gradients:
    """What was found of one parameter.

    Args:
        values: ``[N, *shape]``.
        uses: how each use of the parameter was explained.
        structure: kind of :class:`~gradbatch.PerSampleGrad`; empty if no loss depends on the parameter.
        norms: how its squared norms are evaluated; ``None`` where there is nothing to decide.
        gradients: how it is materialised, likewise.
        flops: operations that its squared norms cost; ``None`` if that is not known.
        bytes: temporary memory that they need, likewise.
    """

    values: Tensor
    uses: Sequence[Explained] = ()
    structure: str = ""
    norms: Plan | None = None
    gradients: Plan | None = None
    flops: int | None = None
    bytes: int | None = None


@dataclass
class Findings:
    """What was found of all parameters.

    Attributes:
        gradients: by name of the parameter.
        refusals: why not, by name.
        node_calls: layers in which a node was called once for each sample, by its type; one entry a use.
    """

    gradients: dict[str, Gradients] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    node_calls: dict[str, list[str]] = field(default_factory=dict)


def find(model: nn.Module, losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> Findings:
    """Per-sample gradients of all parameters at once; where that is refused, of halves, quarters and so on.

    Args:
        model: an extended model.
        losses: ``[N]``, with a graph.
        parameters: what to differentiate with respect to, by name.

    Edge cases: after :data:`MOST_ATTEMPTS` what is left undivided is refused together, such as the parameters below a
    layer that couples the samples.
    """
    findings = Findings()
    groups = deque([list(parameters)])
    reached = _reached(losses, parameters.values())
    attempts = 0
    while groups:
        names = groups.popleft()
        attempts += 1
        try:
            _capture(model, losses, {name: parameters[name] for name in names}, findings)
        except GradBatchError as error:
            unused = isinstance(error, UsageError) and not any(parameters[name] in reached for name in names)
            if unused:
                # To want nothing that a loss depends on is an error of the caller's, but no reason to refuse it.
                findings.gradients.update({name: _zeros(parameters[name], len(losses)) for name in names})
            elif len(names) == 1 or attempts >= MOST_ATTEMPTS:
                findings.refusals.update(dict.fromkeys(names, str(error)))
            else:
                groups += [names[: len(names) // 2], names[len(names) // 2 :]]
    return findings


def coarsest_dtype(losses: Tensor, parameters: Collection[nn.Parameter]) -> torch.dtype:
    """The dtype of the coarsest floating point numbers that the losses are computed through, parameters included.

    Also where no gradient of these parameters passes: both sides of the comparison run the whole model.
    """
    walk = checkpoints.walk([graph.node_of(checkpoints.in_front(losses))], parameters)
    dtypes = {dtype for node in walk.order() for _, dtype in graph.outputs(node)}
    dtypes |= {parameter.dtype for parameter in parameters}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return min(floating, key=lambda dtype: torch.finfo(dtype).bits)


def _capture(
    model: nn.Module, losses: Tensor, parameters: Mapping[str, nn.Parameter], findings: Findings
) -> None:
    selection = select(model, [glob.escape(name) for name in parameters])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)  # the report says it
        captured = capture_losses(losses, selection.names, Planner())
    names = {parameter: name for name, parameter in parameters.items()}
    uses = _uses(captured)
    with torch.no_grad():
        found = {
            names[p]: _described(grad, uses.get(p, ())) for p, grad in captured.grads.items() if p in names
        }
    findings.gradients.update(found)
    for evaluation in captured.evaluations:
        if evaluation.reader == "node call":
            findings.node_calls.setdefault(evaluation.operation, []).append(evaluation.layer)


def _uses(captured: Captured) -> dict[nn.Parameter, list[Explained]]:
    uses: dict[nn.Parameter, list[Explained]] = {}
    for found in captured.evaluations:
        explained = Explained(found.layer, found.operation, found.reader, found.rule, found.layout)
        for parameter in found.parameters:
            uses.setdefault(parameter, []).append(explained)
    return uses


def _described(grad: PerSampleGrad, uses: Sequence[Explained]) -> Gradients:
    if not uses:
        return Gradients(grad.dense())
    norms = grad.plan("squared_norm")
    flops, held = (norms.flops, norms.bytes) if norms is not None else (None, None)
    if isinstance(grad, Dense):
        numbers = grad.values.numel()
        flops, held = 2 * numbers, min(numbers * grad.dtype.itemsize, grad.planner.budget)
    return Gradients(grad.dense(), uses, type(grad).__name__, norms, grad.plan("dense"), flops, held)


def _reached(losses: Tensor, parameters: Collection[nn.Parameter]) -> set[nn.Parameter]:
    return set(
        checkpoints.walk([graph.node_of(checkpoints.in_front(losses))], parameters).accumulators.values()
    )


def _zeros(parameter: nn.Parameter, samples: int) -> Gradients:
    return Gradients(parameter.detach().new_zeros(samples, *parameter.shape))
