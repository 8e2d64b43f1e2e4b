"""One forward of a watched model, and the backward passes of the user's that went through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import checkpoints, graph, paths
from gradbatch.capture.evaluate import Totals
from gradbatch.capture.explanation import Explanation, unowned
from gradbatch.capture.layouts import Owners
from gradbatch.capture.tags import PRECISION
from gradbatch.capture.undisturbed import readable
from gradbatch.capture.uses import Names
from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.plans.contractions import Planner
from gradbatch.rules import Layout, SampleLayout

Gradients = tuple[Tensor | None, ...] | dict[int, Tensor | None]
"""Gradients of the outputs of a node, by output."""

Hook = Callable[[Gradients], None]
"""What is done when the gradients of a node's outputs are there."""


# Stands for the unseen elements where the layout was known before, all of it certain.
NONE = torch.zeros((), dtype=torch.bool)


@dataclass
class Pass:
    """What one backward pass brought.

    Args:
        totals: what its nodes contributed; they are evaluated while it runs, as autograd frees what they saved.
        calls: gradients of the anchored outputs of recorded calls, by the call's number; evaluated in the end.
        nodes: numbers of the cuts that it went through.
    """

    totals: Totals
    calls: dict[int, list[Tensor | None]] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)


class Forward:
    """One forward of the model inside the context.

    Args:
        samples: ``N``.
        found: the explanation of its graph.
        names: the wanted parameters at the time.
        planner: decides how the results will be evaluated.
        scale: what the gradients of the user's loss are multiplied with to be those of a sample's own loss.

    Attributes:
        passes: by the pass's identity.
        taken: gradients that were taken, with the layer and their version.
        error: the first thing that went wrong inside a backward pass; raised behind it.
    """

    def __init__(
        self, samples: int, found: Explanation, names: Names, planner: Planner, scale: float
    ) -> None:
        self.samples, self.found, self.names = samples, found, names
        self.passes: dict[int, Pass] = {}
        self.taken: list[tuple[str, Tensor, int]] = []
        self.error: Exception | None = None
        self._planner, self._scale = planner, scale
        # Elements that the model's outputs do not depend on: nobody owns them. ``None``: all of them.
        self._unseen_calls = [
            [NONE] * len(use.anchors) if gradients is None else [_unseen(g) for g in gradients]
            for use, gradients in zip(found.uses, found.use_gradients, strict=True)
        ]
        self._unseen_nodes = [
            dict.fromkeys(cut.owners, NONE) if by is None else {n: _unseen(g) for n, g in by.items()}
            for cut, by in zip(found.cuts, found.cut_gradients, strict=True)
        ]
        found.use_gradients, found.cut_gradients = [], []

    # ---- while a backward pass runs

    def hook_of_call(self, number: int, position: int) -> Hook:
        """Prehook that takes the gradient of one output of a call."""
        use = self.found.uses[number]
        output = use.anchors[position][1].number

        def take(grads: Gradients) -> None:
            slots = self._pass().calls.setdefault(number, [None] * len(use.anchors))
            gradient = grads[output]
            if gradient is not None:
                gradient = use.output_gradient(position, gradient.detach())
                assert gradient is not None
                self.taken.append((use.name, gradient, gradient._version))
            slots[position] = gradient

        return take

    def hook_of_node(self, number: int) -> Hook:
        """Prehook that evaluates a cut."""
        cut = self.found.cuts[number]

        def take(grads: Gradients) -> None:
            current = self._pass()
            current.nodes.add(number)
            gradients = {n: None if (g := grads[n]) is None else g.detach() for n in cut.owners}
            if not any(g is not None for g in gradients.values()):
                return
            with _Deferred(self):
                unseen = self._unseen_nodes[number]
                own = {n: self._own(cut.name, unseen[n], g, cut.owners[n]) for n, g in gradients.items()}
                current.totals.add_node(cut, own)

        return take

    def hook_of_region(self, node: Node) -> Hook:
        """Prehook that sends on what a shared node has received: all above it has been through."""

        def take(_: Gradients) -> None:
            with _Deferred(self):
                self._pass().totals.pull_back(node)

        return take

    def hook_of_checkpoint(self, node: Node, hooks: Sequence[tuple[Node, Hook]]) -> Hook:
        """Prehook that does for the nodes inside a checkpoint what hooks of their own do for those outside.

        A pass of the user's goes through a graph that torch makes anew, and not through these nodes.

        Args:
            node: of the checkpoint.
            hooks: of nodes inside it, in the order in which they are to be called.
        """
        places = [(inner, n) for inner in dict(hooks) for n in range(len(graph.outputs(inner)))]

        def take(grads: Gradients) -> None:
            given = [None if (g := grads[n]) is None else g.detach() for n in range(len(grads))]
            with _Deferred(self), readable("a checkpoint"):
                arrived = checkpoints.inside(node, given, places, self.found.walk)
                for inner, hook in hooks:
                    gradients = {
                        number: arrived[inner, number] for number in range(len(graph.outputs(inner)))
                    }
                    hook(gradients)
            checkpoints.forget(self.found.walk)

        return take

    def _pass(self) -> Pass:
        return self.passes.setdefault(
            graph.current_pass(), Pass(Totals(self.found, self.samples, self._planner))
        )

    def _own(
        self, name: str, unseen: Tensor | None, gradient: Tensor | None, owners: Owners | Layout
    ) -> Tensor | None:
        """The gradient for the samples' own losses.

        Args:
            name: of the layer.
            unseen: elements that the model's outputs did not depend on when they were measured.
            gradient: what arrived.
            owners: where the samples lie in it.
        """
        if gradient is None:
            return None
        if unseen is not NONE:
            part = gradient if unseen is None else gradient.where(unseen, 0)
            # What no output depends on has no gradient, whatever becomes of zero times NaN.
            gradient = torch.where(part.isfinite(), gradient, 0)
            part = part.where(part.isfinite(), 0)
            by_chance = isinstance(owners, SampleLayout) and unseen is not None and _are_few(part)
            if not by_chance and not self._is_rounding(part, gradient, unseen is not None):
                raise unowned(name, self.samples)
        # The gradient of a mean carries 1/N; a sample's own loss does not.
        return None if unseen is None else gradient * self._scale

    def _is_rounding(self, part: Tensor, gradient: Tensor, placed: bool) -> bool:
        """Whether a part of a gradient is zero but for rounding: sums that cancel are exactly zero at times only.

        Where it is kept, as part of a gradient whose owners are known from the rest of it, an operation may have
        enlarged the rounding error, as a normalisation does; where it is left out, it may not. What it is compared
        with is seen or is refused itself.
        """
        if not part.any():
            return True
        precision = PRECISION.get(
            part.real.dtype if part.is_complex() else part.dtype, PRECISION[torch.float16]
        )
        others = [gradient, *(taken for _, taken, _ in self.taken)]
        largest = max(float(other.abs().nan_to_num(0.0, 0.0, 0.0).max()) for other in others if other.numel())
        return float(part.abs().max()) <= (precision.relative if placed else precision.absolute) * largest

    # ---- at the end

    def drop_foreign_passes(self, reached: dict[int, set[int]]) -> None:
        """Forget passes that asked for no parameter (a saliency map).

        Args:
            reached: identities of the parameters that each pass reached.

        Raises:
            UsageError: a pass asked for some of the parameters that it could have reached.
        """
        for number, current in list(self.passes.items()):
            fired = [node for i in current.calls for node, _ in self.found.uses[i].anchors]
            fired += [self.found.cuts[i].node for i in current.nodes]
            paths = self._paths(current)
            arrived = reached.get(number, set())
            if not arrived & set(paths):
                del self.passes[number]
                continue
            missing = self._skipped(current, fired) + [p for key, p in paths.items() if key not in arrived]
            if missing:
                raise UsageError(
                    f"compute: a backward pass was restricted to some parameters (inputs=...) and left out "
                    f"{missing[0]}. Run it for all of them, or select with parameters="
                )

    def _paths(self, current: Pass) -> dict[int, str]:
        """Identities and names of the parameters that a pass should have reached."""
        found: dict[int, str] = {}
        for i, arrived in current.calls.items():
            use = self.found.uses[i]
            if any(gradient is not None for gradient in arrived):
                for attribute in use.claimed:
                    found[id(use.record.parameters[attribute])] = f"{use.name}.{attribute}"
        for i in current.nodes:
            for parameter in self.found.parameters_of(self.found.cuts[i]):
                found[id(parameter)] = self.names.parameters[parameter]
        return found

    def _skipped(self, current: Pass, fired: Sequence[Node]) -> list[str]:
        """Calls and nodes that a pass went around, although they lie below some that it went through."""
        calls = [
            (use.name, node)
            for i, use in enumerate(self.found.uses)
            if i not in current.calls
            for node, _ in use.anchors
        ]
        nodes = [(cut.name, cut.node) for i, cut in enumerate(self.found.cuts) if i not in current.nodes]
        return [name for name, node in (*calls, *nodes) if paths.is_reachable(node, fired)]

    def add_to(self, total: dict[nn.Parameter, PerSampleGrad]) -> None:
        """Add up what all passes brought.

        Args:
            total: by parameter; added to.
        """
        if self.error is not None:
            raise self.error
        for current in self.passes.values() if self.samples else ():
            for number, (use, layout) in enumerate(zip(self.found.uses, self.found.layouts, strict=True)):
                arrived = current.calls.get(number, [None] * len(use.anchors))
                unseen = self._unseen_calls[number]
                own = [self._own(use.name, u, g, layout) for u, g in zip(unseen, arrived, strict=True)]
                use.record.check_fresh(use.name)
                current.totals.add_call(use, own, layout)
            current.totals.check_delivered()
            for parameter, grad in current.totals.grads.items():
                total[parameter] = total[parameter] + grad if parameter in total else grad


class _Deferred:
    """Keeps what goes wrong in a hook until the user's backward is over, which must not be cut off."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if isinstance(error, Exception):
            self._forward.error = self._forward.error or error
            return True
        return False


def _are_few(part: Tensor) -> bool:
    """Whether so few elements are not zero that those may have been exactly zero by chance when they were measured.

    Sums of terms of both signs are so in about one of ``1 / eps`` cases, somewhat more often where they are alike.
    Whose such an element is follows from the elements around it, where the samples lie regularly.
    """
    chance = 4 * torch.finfo(part.dtype).eps * part.numel() + min(8, part.numel() // 64)
    return int(part.count_nonzero()) <= chance


def _unseen(gradient: Tensor | None) -> Tensor | None:
    with torch.no_grad():
        return None if gradient is None else gradient == 0
