"""How the gradients of a model's parameters come about: calls of layers, nodes of the graph, and the shared region."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.nodes import Cut
from gradbatch.capture.shared import UNARY
from gradbatch.capture.uses import Use
from gradbatch.errors import CoupledSamples
from gradbatch.rules import Layout


@dataclass
class Explanation:
    """How the parameters' gradients come about.

    Args:
        uses: calls of layers.
        layouts: where the samples lie in the outputs of each.
        cuts: nodes with owned outputs that parameters, or values of the region, go into.
        region: the shared region, each node before all that lies below it.
        use_gradients: of the summed losses at the outputs of each call, as its rule takes them; ``None`` if
            nothing had to be measured there.
        cut_gradients: at the outputs of each cut, by output, likewise.
        walk: the graph.
    """

    uses: list[Use]
    layouts: list[Layout]
    cuts: list[Cut]
    region: list[Node]
    use_gradients: list[list[Tensor | None] | None]
    cut_gradients: list[dict[int, Tensor | None] | None]
    walk: graph.Walk = field(repr=False)

    @property
    def edges(self) -> set[graph.Edge]:
        """All edges that calls and cuts account for.

        Not those behind views and casts of a parameter, which a later forward may use too (autocast keeps its casts).
        """
        found = {(cut.node, slot) for cut in self.cuts for slot in cut.slots}
        return found | {edge for use in self.uses for edge in use.edges if graph.kind(edge[0]) not in UNARY}

    def parameters_of(self, cut: Cut) -> list[nn.Parameter]:
        """The parameters that a cut's gradients flow into, through the region or not."""
        region, found = set(self.region), dict[nn.Parameter, None]()
        pending = [below for slot in cut.slots if (below := graph.below(cut.node)[slot][0]) is not None]
        visited = set(pending)
        for node in pending:
            if node in self.walk.accumulators:
                found[self.walk.accumulators[node]] = None
            elif node in region:
                further = {other for other, _ in graph.below(node) if other is not None} - visited
                visited |= further
                pending += further
        return list(found)

    @property
    def inner(self) -> set[Node]:
        """Nodes between calls and parameters, but for views and casts."""
        found: set[Node] = set().union(*(use.paths for use in self.uses))
        return {node for node in found - self.walk.accumulators.keys() if graph.kind(node) not in UNARY}


def unowned(name: str, samples: int) -> CoupledSamples:
    """The error for gradients of which nobody knows whose they are."""
    return CoupledSamples(
        f"{name}: a gradient arrived where none does by way of the model's outputs, so nobody knows which of the "
        f"{samples} samples it belongs to. Return what the loss depends on from the model's forward, or use "
        "gradbatch.backward(model, losses, ...) with one loss a sample"
    )
