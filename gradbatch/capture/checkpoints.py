"""Reentrant activation checkpointing: a region that the graph shows as one node, without the parameters inside it.

``torch.utils.checkpoint(..., use_reentrant=True)`` runs its function without a graph, and again, with one, inside the
backward pass. Here it is run again when the graph is walked, on the very tensors that it was given: it is unfolded. The
walk goes on in what that yields, where it finds layers and nodes as everywhere, and comes out again at the region's
inputs. What the nodes inside save is not kept either, but computed again when it is read, for one region at a time.

The engine does not know of it. A pass of ours that comes to the region's node is carried through what it was unfolded
to by a pass inside the pass; one of the user's is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from gradbatch.capture import graph, paths, reentrant
from gradbatch.capture.graph import Place
from gradbatch.capture.unfolding import Store, unfold
from gradbatch.errors import UnsupportedLayer


def in_front(tensor: Tensor) -> Tensor:
    """A tensor as it is, or a view of it where a checkpoint computes it: the walk starts outside of them."""
    if not graph.is_checkpoint(graph.node_of(tensor)):
        return tensor
    with torch.enable_grad():
        return tensor.view_as(tensor)


def walk(roots: Sequence[Node], parameters: Collection[nn.Parameter]) -> graph.Walk:
    """Visit every node below ``roots``, those inside checkpoints too.

    Args:
        roots: nodes that compute the losses or outputs, in front of all checkpoints.
        parameters: the wanted parameters.

    Raises:
        UnsupportedLayer: a checkpoint that cannot be unfolded.
        StaleCapture: what it was given was changed in place or freed.
    """
    found = paths.walk(roots, parameters, partial(unfold, store=Store()))
    if found.checkpoints:
        found.frames = _frames(roots, found)
    return found


def _frames(roots: Iterable[Node], found: graph.Walk) -> dict[Node, Node]:
    """The innermost checkpoint that each node lies in."""
    frames: dict[Node, Node | None] = dict.fromkeys(roots)
    pending = list(frames)
    for node in pending:
        frame, edges = frames[node], node.next_functions
        if node in found.checkpoints:
            frame, edges = node, tuple(found.checkpoints[node].edges)
        elif frame is not None and node in found.checkpoints[frame].inputs:
            frame = frames[frame]
        for source, _ in edges:
            if source is None or graph.accumulated_variable(source) is not None:
                continue
            if source not in frames:
                frames[source] = frame
                pending.append(source)
            elif frames[source] is not frame:
                raise UnsupportedLayer(
                    f"a function under activation checkpointing with use_reentrant=True uses what {graph.kind(source)} "
                    "computes outside of it, which is none of its arguments; pass it as one, or use_reentrant=False"
                )
    return {node: frame for node, frame in frames.items() if frame is not None}


# ---- passes of ours


def differentiate(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    places: Sequence[Place],
    found: graph.Walk,
    keep_graph: bool = True,
) -> list[Tensor | None]:
    """Gradients that arrive at places in a graph; nothing below them is computed.

    Args:
        outputs: where the pass starts.
        cotangents: of ``outputs``.
        places: outputs of nodes, inside checkpoints or not.
        found: the graph.
        keep_graph: whether what it saved is kept; where there are checkpoints it always is.
    """
    if not found.checkpoints:
        return list(_pass(outputs, cotangents, places, keep_graph))
    passage = _Passage(places, found)
    with reentrant.calling({node: partial(passage.call, node) for node in found.checkpoints}):
        passage.run(outputs, cotangents, None)
    forget(found)
    return [passage.arrived[place] for place in places]


def inside(
    node: Node, gradients: Sequence[Tensor | None], places: Sequence[Place], found: graph.Walk
) -> dict[Place, Tensor | None]:
    """Gradients that arrive at places inside a checkpoint, from gradients of its outputs.

    Args:
        node: of the checkpoint.
        gradients: of its outputs.
        places: outputs of nodes inside it, or inside checkpoints in it.
        found: the graph.
    """
    passage = _Passage(places, found)
    calls = {other: partial(passage.call, other) for other in found.checkpoints if other is not node}
    with reentrant.calling(calls):
        passage.enter(node, gradients)
    return passage.arrived


def recall(node: Node, found: graph.Walk) -> None:
    """Compute what the region saved that a node lies in, if any, before the node is called in other circumstances."""
    frame = found.frames.get(node)
    if frame is not None:
        found.checkpoints[frame].recall()


def forget(found: graph.Walk) -> None:
    """Let go of what regions saved; it is computed again when it is needed."""
    for region in found.checkpoints.values():
        region.forget()


class _Passage:
    """A backward pass of ours, with the passes inside it.

    Attributes:
        arrived: gradients by place; of the places asked for, and of those that lead the engine there.
    """

    def __init__(self, places: Sequence[Place], found: graph.Walk) -> None:
        self.arrived: dict[Place, Tensor | None] = dict.fromkeys(places)
        self._checkpoints, self._frames = found.checkpoints, found.frames
        self._wanted: dict[Node | None, dict[Place, None]] = {node: {} for node in (None, *found.checkpoints)}
        self._last: dict[Node | None, list[Node]] = {node: [] for node in (None, *found.checkpoints)}
        for place in self.arrived:
            self._wanted[found.frames.get(place[0])][place] = None
        for node in reversed(found.checkpoints):  # those inside first
            if self._wanted[node] or self._last[node]:
                self._lead_to(node)

    def _lead_to(self, node: Node) -> None:
        """See to it that the engine comes to a checkpoint: it passes only what something wanted lies behind."""
        frame = self._frames.get(node)
        for source, number in node.next_functions:
            if source is not None and graph.accumulated_variable(source) is None:
                self._wanted[frame][source, number] = None
                return
        # Only leaves are behind it, on which hooks may lie that are not to see this pass. It is entered in the end.
        self._last[frame].append(node)
        self._wanted[frame].update(((node, number), None) for number in range(len(graph.outputs(node))))

    def run(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], frame: Node | None, *further: Place
    ) -> tuple[Tensor | None, ...]:
        """Run the pass through the nodes outside of all checkpoints, or directly inside one.

        Returns:
            Gradients at the places ``further``.
        """
        wanted = [*self._wanted[frame], *further]
        gradients = _pass(outputs, cotangents, wanted)
        count = len(wanted) - len(further)
        self.arrived.update(zip(wanted[:count], gradients, strict=False))
        for node in self._last[frame]:
            numbers = range(len(graph.outputs(node)))
            self.enter(node, [self.arrived[node, number] for number in numbers])
        return gradients[count:]

    def enter(self, node: Node, gradients: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """Go on inside a checkpoint; returns the gradients of its inputs by their place in ``next_functions``."""
        region = self._checkpoints[node]
        given = [
            (output, gradient)
            for output, gradient in zip(region.outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        if not given:
            return {}
        outputs, cotangents = zip(*given, strict=True)
        further = [(view, 0) for view in region.inputs]
        found = self.run(outputs, cotangents, node, *further)
        return dict(zip(region.inputs.values(), found, strict=True))

    def call(self, node: Node, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """What the engine calls in place of the checkpoint's backward."""
        by_slot, region = self.enter(node, gradients), self._checkpoints[node]
        # Its forward takes two arguments before those of the function.
        result: list[Tensor | None] = [None] * (2 + region.arguments)
        for slot, gradient in by_slot.items():
            result[2 + region.places[slot]] = gradient
        return tuple(result)


def _pass(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], places: Sequence[Place], keep_graph: bool = True
) -> tuple[Tensor | None, ...]:
    if not places:
        return ()
    edges = [GradientEdge(*place) for place in places]
    return torch.autograd.grad(outputs, edges, cotangents, retain_graph=keep_graph, allow_unused=True)


# ---- passes of the user's


def outermost(node: Node, found: graph.Walk) -> Node | None:
    """The checkpoint that a node lies in and that lies in no other: the one that the user's passes go through."""
    result = None
    while (node := found.frames.get(node)) is not None:  # type: ignore[assignment]
        result = node
    return result


def in_passes_of_the_user(edges: Iterable[graph.Edge], found: graph.Walk) -> Iterator[graph.Edge]:
    """Edges as their passes take them: those inside checkpoints are none, those out of one come from its node."""
    for node, slot in edges:
        frame = found.frames.get(node)
        if frame is None and node.next_functions[slot][0] not in found.checkpoints:
            yield node, slot
        elif frame is not None and node in found.checkpoints[frame].inputs and frame not in found.frames:
            yield frame, found.checkpoints[frame].inputs[node]
