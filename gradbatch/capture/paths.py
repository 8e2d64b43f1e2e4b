"""Paths in the autograd graph: all that lies below some nodes, what is reached from where, and on which edges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

from torch import nn
from torch.autograd.graph import Node

from gradbatch.capture import graph


def walk(
    roots: Iterable[Node],
    parameters: Collection[nn.Parameter],
    unfold: Callable[[Node], graph.Unfolded] | None = None,
) -> graph.Walk:
    """Visit every node below ``roots``.

    Args:
        roots: nodes that compute the losses or outputs, none of them a checkpoint that is to be unfolded.
        parameters: the wanted parameters.
        unfold: makes a region under reentrant checkpointing part of the graph; ``None``: leave it closed.
    """
    result = graph.Walk()
    wanted = {id(parameter): parameter for parameter in parameters}
    pending = list(roots)
    for root in pending:
        result.consumers.setdefault(root, [])
    visited: set[Node] = set()
    places = {node: place for place, node in enumerate(result.consumers)}
    structure = result.structure
    # Marked when taken from the stack, not when put on it: each node's edges must be recorded exactly once.
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        variable = graph.accumulated_variable(node)
        if variable is not None:
            structure.append((places[node], id(variable) in wanted))
            if id(variable) in wanted:
                result.accumulators[node] = wanted[id(variable)]
            continue
        kept = cast("dict[str, list[Any]]", node.metadata).get(graph.METADATA_KEY)
        if kept:
            result.notes[node] = kept
        edges: list[Any] = [places[node], type(node)]
        if unfold is not None:
            _unfold_below(node, unfold, result.checkpoints)
        for slot, (source, number) in enumerate(graph.below(node)):
            if source is not None:
                result.consumers.setdefault(source, []).append((node, slot))
                pending.append(source)
                edges += (slot, places.setdefault(source, len(places)), number)
        structure.append(tuple(edges))
    return result


def _unfold_below(
    node: Node, unfold: Callable[[Node], graph.Unfolded], into: dict[Node, graph.Unfolded]
) -> None:
    """Unfold the checkpoints that the edges of a node lead to, and those that compute what they return."""
    pending = [
        source for source, _ in node.next_functions if source is not None and graph.is_checkpoint(source)
    ]
    for checkpoint in pending:
        if checkpoint not in into:
            into[checkpoint] = graph.unfolded(checkpoint) or unfold(checkpoint)
            inside = [source for source, _ in into[checkpoint].edges if source is not None]
            pending += filter(graph.is_checkpoint, inside)


def region(starts: Iterable[Node], barriers: Collection[Node]) -> Iterator[tuple[Node, int, Node]]:
    """Edges ``(node, slot, node below)`` reachable from ``starts`` without passing through a barrier.

    A start that is a barrier itself (a layer that hands its input through) yields nothing.
    """
    pending = [node for node in starts if node not in barriers]
    visited: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        for slot, (source, _) in enumerate(graph.below(node)):
            if source is None or source in barriers:
                continue
            yield node, slot, source
            pending.append(source)


def leading_to(
    targets: Collection[Node], edges: Sequence[tuple[Node, int, Node]]
) -> dict[Node, list[graph.Edge]]:
    """Of some edges, those on a path to a target, by the node they lead into."""
    by_node: dict[Node, list[graph.Edge]] = {}
    for node, slot, source in edges:
        by_node.setdefault(source, []).append((node, slot))
    result: dict[Node, list[graph.Edge]] = {}
    pending = [target for target in targets if target in by_node]
    while pending:
        node = pending.pop()
        if node in result:
            continue
        result[node] = by_node.get(node, [])
        pending.extend(consumer for consumer, _ in result[node])
    return {node: found for node, found in result.items() if found}


def is_reachable(target: Node, starts: Iterable[Node]) -> bool:
    """Whether a path leads from one of the starts down to the target."""
    return any(source is target for _, _, source in region(starts, ()))


def above(nodes: Iterable[Node], walk: graph.Walk) -> set[Node]:
    """The nodes from which one of some nodes is reached, each by at least one edge."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        for consumer, _ in walk.consumers.get(pending.pop(), ()):
            if consumer not in found:
                found.add(consumer)
                pending.append(consumer)
    return found
