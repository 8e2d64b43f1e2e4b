"""From captured calls to per-sample gradients: hand each call to its rule, and add up what the rules yield."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import checkpoints, graph, shared
from gradbatch.capture.calls import call_of, joined, likeness, yielded_by
from gradbatch.capture.explanation import Explanation
from gradbatch.capture.layouts import Owners, words
from gradbatch.capture.nodes import Cut, contributions
from gradbatch.capture.packed import read_aside
from gradbatch.capture.undisturbed import readable
from gradbatch.capture.uses import Use
from gradbatch.errors import SlowPathWarning, UnsupportedLayer
from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.plans.contractions import Planner
from gradbatch.plans.operands import full_precision
from gradbatch.rules import Call, Layout

Take = Callable[[nn.Parameter, PerSampleGrad], None]


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No graph, and no autocast to lower precision, whatever the surroundings are."""
    with torch.no_grad(), full_precision(device):
        yield


class Evaluation(NamedTuple):
    """How one use of one or several parameters was evaluated.

    Args:
        parameters: the parameters; several where they go through the shared region.
        layer: the layer that the use lies in.
        operation: class of the layer where its record was read, or type of the node.
        reader: ``"module"``, ``"node"``, or ``"node call"`` where the node was called for several samples in turn.
        rule: name of the rule; empty for a node call.
        layouts: where the samples lay in the outputs.
    """

    parameters: tuple[nn.Parameter, ...]
    layer: str
    operation: str
    reader: str
    rule: str
    layouts: tuple[Layout | Owners, ...]

    @property
    def layout(self) -> str:
        """Where the samples lay, in words."""
        return ", ".join(dict.fromkeys(map(words, self.layouts)))


class Totals:
    """Adds up what calls, nodes and the shared region contribute to the parameters' per-sample gradients.

    Args:
        found: explains the graph.
        samples: ``N``.
        planner: decides how the results will be evaluated.
        take: called with a parameter and its gradients as soon as nothing more can come; ``None``: they are kept.

    Attributes:
        grads: by parameter, so far.
        evaluations: how they came about.
    """

    def __init__(self, found: Explanation, samples: int, planner: Planner, take: Take | None = None) -> None:
        self.grads: dict[nn.Parameter, PerSampleGrad] = {}
        self.evaluations: list[Evaluation] = []
        self._found, self._samples, self._planner = found, samples, planner
        self._accumulators = found.walk.accumulators
        self._waiting: dict[Node, shared.Received] = {}
        self._take, self._taken = take, set[nn.Parameter]()
        self._loops = Counter(use.record.module_id for use in found.uses if use.rule.by_row)
        self._held: dict[int, list[tuple[Use, Call]]] = {}
        self._expected = Counter() if take is None else Counter(_contributions_to_parameters(found))
        # Edges into the shared region that nothing came along yet, and nodes of it with none left.
        self._open = Counter(below for below, _ in _edges_of_cuts(found) if below not in self._accumulators)
        self._ready: list[Node] = []

    def add_call(self, use: Use, gradients: Sequence[Tensor | None], layout: Layout) -> None:
        """Hand a recorded call to its rule, or keep it until all calls of its layer in a loop are there.

        Args:
            use: the call.
            gradients: of its anchored outputs; ``None`` where none arrived.
            layout: where the samples lie in them.

        Raises:
            RuleError: the rule yields something that cannot be a per-sample gradient of its parameters.
        """
        if all(gradient is None for gradient in gradients):
            return
        call = call_of(use, gradients, layout)
        loop = use.record.module_id
        if self._loops[loop] < 2:
            self._evaluate([(use, call)])
            return
        self._held.setdefault(loop, []).append((use, call))
        if len(self._held[loop]) == self._loops[loop]:
            self._evaluate_held(loop)

    def _evaluate_held(self, loop: int) -> None:
        """Join what is alike of the calls of a layer."""
        alike: dict[Hashable, list[tuple[Use, Call]]] = {}
        for number, (use, call) in enumerate(self._held.pop(loop)):
            alike.setdefault(likeness(use, call) or number, []).append((use, call))
        for group in alike.values():
            self._evaluate(group)

    def _evaluate(self, group: Sequence[tuple[Use, Call]]) -> None:
        """Hand calls that are alike to their rule, as one."""
        use, first = group[0]
        kind, rule, where = use.record.module_type.__name__, use.rule.function.__name__, (first.layout,)
        with plain_arithmetic(first.device):
            for parameter, grad in yielded_by(use, joined([call for _, call in group]), self._samples):
                self._add(parameter, grad, len(group))
                self.evaluations += [
                    Evaluation((parameter,), one.name, kind, "module", rule, where) for one, _ in group
                ]

    def add_node(self, cut: Cut, gradients: Mapping[int, Tensor | None]) -> None:
        """Evaluate a node at the border of the shared region.

        Args:
            cut: the node.
            gradients: of its outputs; ``None`` where none arrived.

        Raises:
            CoupledSamples: a normalisation over the batch.
            StaleCapture: what it saved was freed, or changed in place.
        """
        first = next((gradient for gradient in gradients.values() if gradient is not None), None)
        if first is None:
            return
        borrowed = {g.untyped_storage().data_ptr() for g in gradients.values() if g is not None}

        def evaluate() -> list[tuple[int, PerSampleGrad | Tensor, str]]:
            with plain_arithmetic(first.device):
                return list(contributions(cut, gradients, self._samples))

        with readable(cut.name):
            for slot, grad, rule in read_aside(cut.node, evaluate):
                if isinstance(grad, Dense) and grad.values.untyped_storage().data_ptr() in borrowed:
                    grad = Dense(grad.values.clone())
                self._deliver(cut.node, slot, grad)
                self._note(cut, slot, rule)
        while self._ready:
            self.pull_back(self._ready.pop())

    def pull_back(self, node: Node) -> None:
        """Send on what a node of the shared region has received; all above it must have been through."""
        received = self._waiting.pop(node, None)
        if received is None:
            return
        device = next(iter(received.values())).device

        def wanted(below: Node) -> bool:
            return below in self._accumulators or graph.accumulated_variable(below) is None

        def evaluate() -> list[tuple[int, PerSampleGrad | Tensor]]:
            checkpoints.recall(node, self._found.walk)
            with plain_arithmetic(device):
                return list(shared.pull_back(node, received, wanted))

        with readable(graph.kind(node)):
            for slot, grad in graph.in_a_pass_of_its_own(evaluate):
                self._deliver(node, slot, grad)

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hand on what is left: parameters that less came for than could have, or nothing.

        Args:
            parameters: all that are wanted.
        """
        self.check_delivered()
        assert self._take is not None
        for parameter in parameters:
            if parameter not in self._taken:
                grad = self.grads.pop(parameter, None)
                self._take(
                    parameter,
                    zeros(parameter, self._samples).with_planner(self._planner) if grad is None else grad,
                )

    def check_delivered(self) -> None:
        """Evaluate what is left of loops, and refuse results from which something is missing.

        Raises:
            UnsupportedLayer: a value of the region was not sent on.
        """
        for loop in list(self._held):
            self._evaluate_held(loop)
        left = [node for node in self._found.region if node in self._waiting]
        if left:
            raise UnsupportedLayer(
                f"the gradients of what {graph.kind(left[0])} computes from parameters were not sent on to them: the "
                "backward pass did not go through it. Run it for all parameters"
            )

    def _note(self, cut: Cut, slot: int, rule: str) -> None:
        operation, reader = graph.kind(cut.node), "node" if rule else "node call"
        if not rule and self._samples > 1 and all(e.reader != reader for e in self.evaluations):
            warnings.warn(
                f"{cut.name}: {operation} has no rule and is called once for each sample, which is slow; `gradbatch "
                "check` lists all such operations. Teach the layer with @gradbatch.layer_rule to make it fast",
                SlowPathWarning,
                stacklevel=_level_of_the_user(),
            )
        parameters = tuple(self._found.parameters_of(replace(cut, slots=(slot,))))
        where = tuple(cut.owners.values())
        self.evaluations.append(Evaluation(parameters, cut.name, operation, reader, rule, where))

    def _deliver(self, node: Node, slot: int, grad: PerSampleGrad | Tensor) -> None:
        below, number = graph.below(node)[slot]
        assert below is not None
        if below in self._accumulators and isinstance(grad, PerSampleGrad):
            self._add(self._accumulators[below], grad)
            return
        waiting: dict[int, Any] = self._waiting.setdefault(below, {})
        waiting[number] = waiting[number] + grad if number in waiting else grad
        self._open[below] -= 1
        if not self._open[below]:
            self._ready.append(below)

    def _add(self, parameter: nn.Parameter, grad: PerSampleGrad, contributions: int = 1) -> None:
        grad = grad.with_planner(self._planner)
        self.grads[parameter] = self.grads[parameter] + grad if parameter in self.grads else grad
        if self._take is None:
            return
        assert parameter not in self._taken, "more contributions than edges into the parameter"
        self._expected[parameter] -= contributions
        if not self._expected[parameter]:
            self._taken.add(parameter)
            self._take(parameter, self.grads.pop(parameter))


def _contributions_to_parameters(found: Explanation) -> Iterator[nn.Parameter]:
    """The parameter of each contribution that is to be expected."""
    for use in found.uses:
        for attribute in use.claimed:
            yield use.record.parameters[attribute]
    accumulators = found.walk.accumulators
    for below, _ in _edges_of_cuts(found):
        if below in accumulators:
            yield accumulators[below]


def _edges_of_cuts(found: Explanation) -> Iterator[graph.Place]:
    """Where the contributions of cuts go, and from there those of the region."""
    edges = [graph.below(cut.node)[slot] for cut in found.cuts for slot in cut.slots]
    for below, number in edges + [edge for node in found.region for edge in graph.below(node)]:
        if below is not None:
            yield below, number


def _level_of_the_user() -> int:
    """How far up from the caller the user's code begins; 1 on a thread of the engine's own, where there is none."""
    frame, level = sys._getframe(1), 1
    while str(frame.f_globals.get("__name__")).partition(".")[0] in ("gradbatch", "torch"):
        if frame.f_back is None:
            return 1
        frame, level = frame.f_back, level + 1
    return level


def zeros(parameter: nn.Parameter, samples: int) -> Dense:
    """Per-sample gradients of a parameter that no loss depends on."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return Dense(torch.zeros((), dtype=dtype, device=parameter.device).expand(samples, *parameter.shape))
