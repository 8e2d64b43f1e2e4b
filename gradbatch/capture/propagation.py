"""Propagation: where the samples must lie in a gradient, by the operations between it and the losses alone.

A layout that was measured is a property of one batch: a mask, an index or a factor of zero may make samples look apart
that are not apart in the next one. Here it is followed through the graph without looking at data: an elementwise
operation keeps the sample axis, a permutation moves it, a product of matrices keeps that of its rows, a reshape keeps
its place in memory order. Operations that may move rows about or mix them are not followed. Where this and the
measurement say the same, it need not be measured again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.axes import Shapes, Step, axis_of_step, setting
from gradbatch.capture.readings import RESHAPING
from gradbatch.rules import SampleLayout


@dataclass(frozen=True)
class Run:
    """Where the samples lie in the memory order of a tensor: ``outer * N * inner`` elements, ``(i // inner) % N``."""

    outer: int
    inner: int

    @classmethod
    def of(cls, layout: SampleLayout, shape: Sequence[int]) -> Run | None:
        """The place of a layout in a tensor's memory order."""
        if layout.axis is None or layout.axis >= len(shape) or not layout.samples:
            return None
        blocks = shape[layout.axis] // (layout.samples * layout.stride)
        before, after = math.prod(shape[: layout.axis]), math.prod(shape[layout.axis + 1 :])
        return cls(before * blocks, layout.stride * after)

    def owners(self, shape: Sequence[int], samples: int, device: torch.device) -> Tensor:
        """The sample of each element of a tensor."""
        numbers = torch.arange(samples, device=device).view(1, samples, 1)
        return numbers.expand(self.outer, samples, self.inner).reshape(*shape)

    def axis(self, shape: Sequence[int], samples: int) -> int | None:
        """The axis of a tensor on which the samples lie; ``None`` if they straddle several."""
        for axis, size in enumerate(shape):
            before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
            if not before or not after or self.outer % before or self.inner % after:
                continue
            if self.outer // before * samples * (self.inner // after) == size:
                return axis
        return None

    def layout(self, shape: Sequence[int], samples: int) -> SampleLayout | None:
        """The layout of a tensor with the samples in this place; ``None`` if they straddle several axes."""
        axis = self.axis(shape, samples)
        return (
            None if axis is None else SampleLayout(samples, axis, self.inner // math.prod(shape[axis + 1 :]))
        )

    def moved(self, axis: int, shape: Sequence[int], to: int, new: Sequence[int]) -> Run | None:
        """The same rows on another axis of another tensor; ``None`` if that has another number of rows."""
        if shape[axis] != new[to]:
            return None
        blocks = self.outer // math.prod(shape[:axis])
        stride = self.inner // math.prod(shape[axis + 1 :])
        return Run(math.prod(new[:to]) * blocks, stride * math.prod(new[to + 1 :]))


@dataclass(frozen=True)
class Propagated:
    """Where the samples lie in the gradients of a graph, and what of the graph that was derived from.

    Args:
        certain: by the number of a node in the walk's order and of its output; missing where nothing is certain.
        settings: what was read of nodes besides their types, edges and shapes, by number and name.
    """

    certain: Mapping[tuple[int, int], Run]
    settings: Mapping[tuple[int, str], Any]

    def holds_for(self, nodes: Sequence[Node]) -> bool:
        """Whether it is as true of another graph with the same types, edges and shapes."""
        return all(setting(nodes[at], name) == value for (at, name), value in self.settings.items())


def propagate(
    nodes: Sequence[Node], shapes: Sequence[Shapes], roots: Mapping[tuple[int, int], Run], samples: int
) -> Propagated:
    """Follow the samples down the graph.

    Args:
        nodes: of the graph, all of them.
        shapes: of what each computes.
        roots: where the samples lie in the losses or outputs, by number of node and output.
        samples: ``N``, at least 2.
    """
    numbers = {node: at for at, node in enumerate(nodes)}
    arrived: dict[int, dict[int, list[Run | None]]] = {at: {} for at in range(len(nodes))}
    for (at, number), run in roots.items():
        arrived[at][number] = [run]
    certain: dict[tuple[int, int], Run] = {}
    settings: dict[tuple[int, str], Any] = {}
    for at in _consumers_first(nodes, numbers):
        node = nodes[at]
        runs = {number: _agreed(found) for number, found in arrived[at].items()}
        known = {number: run for number, run in runs.items() if run is not None}
        certain.update({(at, number): run for number, run in known.items()})
        below = [None if b is None else (numbers[b], number) for b, number in graph.below(node)]
        step = Step(
            node, at, shapes[at], [None if b is None else shapes[b[0]][b[1]] for b in below], settings
        )
        # What arrives uncertain at one output is uncertain in all inputs.
        inputs = _inputs(step, known, samples) if 0 < len(known) == len(runs) else {}
        for slot, place in enumerate(below):
            if place is not None:
                arrived[place[0]].setdefault(place[1], []).append(inputs.get(slot))
    return Propagated(certain, settings)


def _agreed(runs: Sequence[Run | None]) -> Run | None:
    """Where the samples lie in a sum of gradients."""
    return runs[0] if all(run == runs[0] for run in runs) else None


def _consumers_first(nodes: Sequence[Node], numbers: Mapping[Node, int]) -> Iterable[int]:
    below = [[numbers[b] for b, _ in graph.below(node) if b is not None] for node in nodes]
    waiting = [0] * len(nodes)
    for inputs in below:
        for at in inputs:
            waiting[at] += 1
    pending = [at for at, count in enumerate(waiting) if not count]
    for at in pending:
        yield at
        for further in below[at]:
            waiting[further] -= 1
            if not waiting[further]:
                pending.append(further)


def consumers_first(walk: graph.Walk) -> Iterator[Node]:
    """The nodes of a graph, each behind all that consume it."""
    nodes = list(walk.order())
    for at in _consumers_first(nodes, {node: at for at, node in enumerate(nodes)}):
        yield nodes[at]


def _inputs(step: Step, known: Mapping[int, Run], samples: int) -> dict[int, Run | None]:
    """Where the samples lie in the gradients of a node's inputs, as far as that is certain."""
    number, run = next(iter(known.items()))
    shape = step.outputs[number]
    slots = {slot: below for slot, below in enumerate(step.inputs) if below is not None}
    if step.kind in RESHAPING:
        return dict.fromkeys(slots, run)
    axis = run.axis(shape, samples)
    if axis is None:
        return {}
    # Outputs of one node (the parts of a split) are cut from one tensor: it has the samples where they all have them.
    for other, others_run in known.items():
        if run.moved(axis, shape, axis, step.outputs[other]) != others_run:
            return {}
    found: dict[int, Run | None] = {}
    for slot, below in slots.items():
        to = axis_of_step(step, axis, shape, slot, below)
        if to is not None:
            found[slot] = run.moved(axis, shape, to, below)
    return found
