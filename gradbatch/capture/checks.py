"""What is refused once everything is explained: coupled samples, hidden calls, hooks and tensors that changed."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch.autograd.graph import Node

from gradbatch.capture import graph, provenance
from gradbatch.capture.uses import Names, Use, refuse_foreign_hooks
from gradbatch.errors import CoupledSamples, UnsupportedLayer


def check_nodes(nodes: Sequence[Node], walk: graph.Walk, names: Names) -> None:
    """Refuse nodes that cannot be read as what they are.

    Args:
        nodes: of the shared region and at its border.
        walk: the graph.
        names: the parameters and layers.

    Raises:
        UnsupportedLayer: compiled code, or hooks that may change gradients.
    """
    for node in nodes:
        if graph.is_compiled(node):
            below = [walk.accumulators[f] for f, _ in node.next_functions if f in walk.accumulators]
            raise UnsupportedLayer(
                f"{', '.join(names.parameters[p] for p in below)}: used in a part of the model that torch.compile has "
                "compiled, which hides its calls. Extend and use the model uncompiled, or compile parts without "
                "parameters"
            )
        refuse_foreign_hooks([node], layer_of(node, walk, names))


def check_calls(uses: Sequence[Use]) -> None:
    """Refuse calls that were tampered with since the forward.

    Raises:
        UnsupportedLayer: hooks that may change gradients.
        StaleCapture: a tensor that a rule reads was changed.
    """
    for use in uses:
        use.check_hooks()
        use.record.check_fresh(use.name)


def check_earlier(inner: Set[Node], edges: Set[graph.Edge], walk: graph.Walk, names: Names) -> None:
    """Refuse uses of what an earlier forward computed from parameters alone.

    Args:
        inner: what it computed.
        edges: into these nodes, as far as they are explained.
        walk: the graph.
        names: the layers.

    Raises:
        UnsupportedLayer: there is another one.
    """
    for node in inner & walk.consumers.keys():
        for edge in walk.consumers[node]:
            if edge not in edges:
                raise UnsupportedLayer(
                    f"{layer_of(edge[0], walk, names)} uses something that an earlier forward computed from parameters "
                    "alone. Compute it anew in each forward"
                )


def check_region(region: Sequence[Node], samples: int, walk: graph.Walk, names: Names) -> None:
    """Refuse a shared region that may depend on the samples.

    Args:
        region: its nodes, each before all that lies below it.
        samples: ``N``.
        walk: the graph.
        names: the layers, with the parameters and buffers that are certain to be the model's own.

    Raises:
        CoupledSamples: it reads something that may be their data.
    """
    if samples == 1 or not region:
        return
    own = [
        tensor
        for module in names.modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    found = provenance.suspect(region, own, samples)
    if found is not None:
        node, reads = found
        raise CoupledSamples(
            f"{layer_of(node, walk, names)}: the gradient of what {graph.kind(node)} computes does not belong to one "
            f"of the {samples} samples each, and it reads {reads}, which may be data of theirs. Either samples are "
            "coupled (a contrastive loss, statistics over the batch): keep every sample's rows apart up to the loss. "
            "Or it is a constant: make it a buffer of the model"
        )


def layer_of(node: Node, walk: graph.Walk, names: Names) -> str:
    """The layer that a node lies in: that of the next record above it."""
    pending, visited = [node], {node}
    for current in pending:
        for record, _ in walk.notes.get(current, ()):
            return f"{names.layer(record.module)} ({record.module_type.__name__})"
        for consumer, _ in walk.consumers[current]:
            if consumer not in visited:
                visited.add(consumer)
                pending.append(consumer)
    return "behind the model"
