"""Pruned backward passes: the gradients at the outputs of calls and nodes, and nothing below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradbatch.capture import graph
from gradbatch.capture.owners import Differentiate
from gradbatch.capture.undisturbed import readable
from gradbatch.capture.uses import Use

Place = tuple[Node, int]
"""A node and the number of one of its outputs."""


def pruned_pass(
    outputs: Sequence[Tensor],
    cotangents: Callable[[Tensor], Sequence[Tensor]],
    uses: Sequence[Use],
    places: Sequence[Place],
) -> Differentiate:
    """A function that runs such a pass, from weights of the samples to the gradients.

    Args:
        outputs: where the pass starts.
        cotangents: from the weights to cotangents of ``outputs``.
        uses: calls, whose gradients come as their rules take them; these come first.
        places: outputs of nodes, whose gradients come as they are.
    """
    edges = list(dict.fromkeys([*(place for use in uses for place in use.places), *places]))

    def differentiate(weights: Tensor) -> list[list[Tensor | None]]:
        ends = [GradientEdge(*edge) for edge in edges]
        with readable("the model's graph"):
            found = graph.differentiate(outputs, cotangents(weights), ends)
        arrived = {edge: _strided(g) for edge, g in zip(edges, found, strict=True)}
        of_uses = [[use.output_gradient(i, arrived[p]) for i, p in enumerate(use.places)] for use in uses]
        return of_uses + [[arrived[place]] for place in places]

    return differentiate


def adjacent_tensors(walk: graph.Walk) -> Iterator[Tensor]:
    """The user's own tensors that went into recorded calls or came out of them, as long as they live."""
    for record in {record: None for notes in walk.notes.values() for record, _ in notes}:
        for reference in record.adjacent:
            tensor = reference()
            if tensor is not None:
                yield tensor


def _strided(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
