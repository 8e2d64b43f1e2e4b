"""The last pass, where gradbatch drives the backward: each gradient goes to its rule when it arrives, and is let go of.

A pass that hands out all output gradients in the end holds as much as the forward saved once more. Here a prehook on
the node of a call evaluates it while the engine is there. The engine is asked only for the gradients behind which there
is nothing further: it stops at these, without going through their nodes.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradbatch.capture.evaluate import Totals
from gradbatch.capture.explanation import Explanation
from gradbatch.capture.graph import Place
from gradbatch.capture.nodes import Cut
from gradbatch.capture.passes import Arrived, Evaluate, PrunedPass, adjacent_tensors, is_packed, strided
from gradbatch.capture.undisturbed import undisturbed
from gradbatch.capture.uses import Names, Use
from gradbatch.rules import Layout


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
    if is_packed(found.walk):
        # On the way of a pass, a region is computed again once, and for each node by itself otherwise. But where only
        # zeros arrived, nobody knows where samples lie.
        found.cut_gradients = [
            by if by is not None and any(g is None for g in by.values()) else None
            for by in found.cut_gradients
        ]
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
    # Evaluated once the pass is over, which lets go of what they took.
    held = [use.record for use in found.uses if len({node for node, _ in use.places}) > 1]
    for record in held:
        record.hold()
    try:
        if pending:
            with undisturbed(chain([losses], adjacent_tensors(found.walk)), names):
                PrunedPass(found.walk, names, pending).run([losses], [torch.ones_like(losses)], keep_graph)
    finally:
        for record in held:
            record.let_go()


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
