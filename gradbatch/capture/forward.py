"""One forward of a watched model, and the backward passes of the user's that went through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import checkpoints, graph, paths
from gradbatch.capture.evaluate import Totals
from gradbatch.capture.explanation import Explanation
from gradbatch.capture.layouts import Owners
from gradbatch.capture.roots import starts_from_vectors
from gradbatch.capture.samples import Samples
from gradbatch.capture.strays import NONE, Place, unseen_in
from gradbatch.capture.undisturbed import readable
from gradbatch.capture.uses import Names
from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.plans.contractions import Planner
from gradbatch.rules import Layout

Gradients = tuple[Tensor | None, ...] | dict[int, Tensor | None]
"""Gradients of the outputs of a node, by output."""

Hook = Callable[[Gradients], None]
"""What is done when the gradients of a node's outputs are there."""


@dataclass
class Pass:
    """What one backward pass brought.

    Args:
        totals: what its nodes contributed; they are evaluated while it runs, as autograd frees what they saved.
        calls: gradients of the anchored outputs of recorded calls, by the call's number; evaluated in the end.
        nodes: numbers of the cuts that it went through.
        broken: which samples' gradients at the model's outputs are not finite, ``[N]``; ``None``: not looked at.
        is_no_mean: whether a mean was promised, but the pass was started from a vector.
    """

    totals: Totals
    calls: dict[int, list[Tensor | None]] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    broken: Tensor | None = None
    is_no_mean: bool = False


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
        is_measured: whether any of it was measured, so that there may be elements that no output was seen to reach.
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
            [NONE] * len(use.anchors) if gradients is None else [unseen_in(g) for g in gradients]
            for use, gradients in zip(found.uses, found.use_gradients, strict=True)
        ]
        self._unseen_nodes = [
            dict.fromkeys(cut.owners, NONE) if by is None else {n: unseen_in(g) for n, g in by.items()}
            for cut, by in zip(found.cuts, found.cut_gradients, strict=True)
        ]
        self.is_measured = any(g is not None for g in (*found.use_gradients, *found.cut_gradients))
        found.use_gradients, found.cut_gradients = [], []

    # ---- while a backward pass runs

    def hook_of_output(self, number: int, axis: int, samples: Samples) -> Hook:
        """Prehook that notes which samples do not get a finite gradient from the user's loss.

        Args:
            number: of the output of the node.
            axis: of the rows.
            samples: of the rows.
        """

        def take(grads: Gradients) -> None:
            gradient = grads[number]
            if gradient is not None:
                current, rows = self._pass(), gradient.detach().movedim(axis, 0).unsqueeze(-1).flatten(1)
                # In one pass, without a temporary.
                sizes = torch.linalg.vector_norm(rows, torch.inf, 1) if rows.shape[1] else rows.sum(1)
                broken = samples.gathered(~sizes.isfinite())
                current.broken = broken if current.broken is None else current.broken | broken

        return take

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
                own = {
                    n: self._own(cut.name, unseen[n], g, cut.owners[n], current.broken)
                    for n, g in gradients.items()
                }
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
        number = graph.current_pass()
        if number not in self.passes:
            totals = Totals(self.found, self.samples, self._planner)
            self.passes[number] = Pass(totals, is_no_mean=self._scale != 1 and starts_from_vectors())
        return self.passes[number]

    def _own(
        self,
        name: str,
        unseen: Tensor | None,
        gradient: Tensor | None,
        owners: Owners | Layout,
        broken: Tensor | None,
    ) -> Tensor | None:
        """The gradient for the samples' own losses."""
        if gradient is not None and unseen is not NONE:
            place = Place(name, self.samples, unseen, owners, broken)
            gradient = place.without_strays(gradient, [taken for _, taken, _ in self.taken])
        # The gradient of a mean carries 1/N; a sample's own loss does not.
        return None if gradient is None else gradient * self._scale

    # ---- at the end

    def drop_foreign_passes(self, reached: dict[int, set[int]]) -> None:
        """Forget passes that asked for no parameter (a saliency map).

        Args:
            reached: identities of the parameters that each pass reached.

        Raises:
            UsageError: a pass asked for some of the parameters that it could have reached, or is no mean.
        """
        for number, current in list(self.passes.items()):
            fired = [node for i in current.calls for node, _ in self.found.uses[i].anchors]
            fired += [self.found.cuts[i].node for i in current.nodes]
            paths = self._paths(current)
            arrived = reached.get(number, set())
            if not arrived & set(paths):
                del self.passes[number]
                continue
            if current.is_no_mean:
                raise UsageError(
                    'compute: loss_reduction="mean" promises the mean over samples, but backward was started from a '
                    "vector with a gradient argument, which sums. Call losses.mean().backward(); or say "
                    'loss_reduction="sum", and the gradient argument weights the samples\' own losses'
                )
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
                own = [
                    self._own(use.name, u, g, layout, current.broken)
                    for u, g in zip(unseen, arrived, strict=True)
                ]
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
