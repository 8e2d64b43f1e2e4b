"""The last pass, where gradbatch drives the backward: each gradient goes to its rule when it arrives, and is let go of.

A pass that hands out all output gradients in the end holds as much as the forward saved once more. Here a prehook on
the node of a call evaluates it while the engine is there. The engine is asked only for the gradients behind which there
is nothing further: it stops at these, without going through their nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import checkpoints, graph, paths
from gradbatch.capture.evaluate import Totals
from gradbatch.capture.explanation import Explanation
from gradbatch.capture.graph import Place
from gradbatch.capture.nodes import Cut
from gradbatch.capture.passes import adjacent_tensors, changed, strided
from gradbatch.capture.undisturbed import readable, undisturbed
from gradbatch.capture.uses import Names, Use
from gradbatch.rules import Layout

Arrived = Mapping[Place, Tensor | None]
Evaluate = Callable[[Arrived], None]
"""Evaluates a call or a cut, from the gradients at its places."""


def deliver(found: Explanation, losses: Tensor, names: Names, totals: Totals, keep_graph: bool) -> None:
    """Evaluate all calls and cuts: those whose gradients were measured, and the others during a pass.

    Args:
        found: explains the graph; it gives up the gradients that it has.
        losses: ``[rows]``, where the pass starts.
        names: the wanted parameters.
        totals: adds up what the calls and cuts contribute.
        keep_graph: ``False``: what autograd saved is freed where the pass went, as by any backward.
    """
    pending: list[tuple[list[Place], Evaluate]] = []
    for use, layout, gradients in zip(found.uses, found.layouts, _emptied(found.use_gradients), strict=True):
        if gradients is None:
            pending.append((use.places, _of_use(use, layout, totals)))
        else:
            totals.add_call(use, gradients, layout)
    for cut, by_output in zip(found.cuts, _emptied(found.cut_gradients), strict=True):
        if by_output is None:
            pending.append(([(cut.node, number) for number in cut.owners], _of_cut(cut, totals)))
        else:
            totals.add_node(cut, by_output)
    if pending:
        with undisturbed(chain([losses], adjacent_tensors(found.walk)), names):
            _Pass(found.walk, names, pending).run(losses, keep_graph)


def _emptied(gradients: list[Any]) -> Any:
    """What is in a list, which lets go of it."""
    for number in range(len(gradients)):
        yield gradients[number]
        gradients[number] = None


def _of_use(use: Use, layout: Layout, totals: Totals) -> Evaluate:
    def evaluate(arrived: Arrived) -> None:
        gradients = [use.output_gradient(i, arrived[place]) for i, place in enumerate(use.places)]
        totals.add_call(use, gradients, layout)

    return evaluate


def _of_cut(cut: Cut, totals: Totals) -> Evaluate:
    def evaluate(arrived: Arrived) -> None:
        totals.add_node(cut, {number: strided(arrived[cut.node, number]) for number in cut.owners})

    return evaluate


class _Pass:
    """A backward pass that evaluates calls and cuts on its way.

    Args:
        walk: the graph.
        names: the layers.
        pending: what is to be evaluated, with the places whose gradients it needs.
    """

    def __init__(
        self, walk: graph.Walk, names: Names, pending: Sequence[tuple[list[Place], Evaluate]]
    ) -> None:
        self._walk, self._names = walk, names
        self._passed: list[tuple[Node, list[Place], Evaluate]] = []
        self._collected: list[tuple[list[Place], Evaluate]] = []
        self._error: Exception | None = None
        # Through a checkpoint the engine does not come by itself.
        nodes = {node for places, _ in pending for node, _ in places}
        above = set() if walk.checkpoints else paths.above(nodes, walk)
        for places, evaluate in pending:
            node, *others = {node for node, _ in places}
            if not others and node in above:
                self._passed.append((node, places, evaluate))
            else:
                self._collected.append((places, evaluate))

    def run(self, losses: Tensor, keep_graph: bool) -> None:
        """Run the pass, and evaluate everything."""
        edges = list(dict.fromkeys(place for places, _ in self._collected for place in places))
        handles = [
            node.register_prehook(self._hook(places, evaluate)) for node, places, evaluate in self._passed
        ]
        failure = None
        try:
            with readable("the model's graph", lambda: changed(self._walk, self._names)):
                weights = torch.ones_like(losses)
                found = checkpoints.differentiate([losses], [weights], edges, self._walk, keep_graph)
        except Exception as error:
            # What went wrong in a hook, rather than what the engine makes of it.
            failure = self._error or error
        finally:
            for handle in handles:
                handle.remove()
        if failure is not None:
            raise failure
        arrived = dict(zip(edges, found, strict=True))
        del found
        # From the first to the last use of each gradient, which goes then.
        last = {place: i for i, (places, _) in enumerate(self._collected) for place in places}
        for i, (places, evaluate) in enumerate(self._collected):
            evaluate({place: arrived[place] for place in places})
            for place in places:
                if last[place] == i:
                    arrived.pop(place, None)

    def _hook(self, places: Sequence[Place], evaluate: Evaluate) -> Callable[[Sequence[Tensor | None]], None]:
        def take(gradients: Sequence[Tensor | None]) -> None:
            try:
                evaluate({(node, number): gradients[number] for node, number in places})
            except Exception as error:
                self._error = self._error or error
                raise

        return take
