"""What is refused once everything is explained: coupled samples, hidden calls, hooks and tensors that changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from torch.autograd.graph import Node

from gradbatch.capture import graph, provenance
from gradbatch.capture.layouts import Owners
from gradbatch.capture.nodes import Cut
from gradbatch.capture.readings import POINTWISE
from gradbatch.capture.uses import Names, Use, hook_message
from gradbatch.errors import CoupledSamples, UnsupportedLayer
from gradbatch.rules import SampleLayout


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
            below = [walk.accumulators[f] for f, _ in graph.below(node) if f in walk.accumulators]
            raise UnsupportedLayer(
                f"{', '.join(names.parameters[p] for p in below)}: used in a part of the model that torch.compile has "
                "compiled, which hides its calls. Extend and use the model uncompiled, or compile parts without "
                "parameters"
            )
        if graph.has_foreign_hooks(node):
            raise UnsupportedLayer(hook_message(layer_of(node, walk, names)))


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


def normalises_samples(node: Node, owners: Owners | None, walk: graph.Walk, names: Names) -> bool:
    """Whether a node is a normalisation in training mode, but not of each channel over one sample (InstanceNorm).

    Args:
        node: the node.
        owners: where the samples lie in its first output.
        walk: the graph.
        names: the layers.

    Raises:
        UnsupportedLayer: this version of torch does not tell.
    """
    if graph.kind(node) not in ("NativeBatchNormBackward", "CudnnBatchNormBackward"):
        return False
    if isinstance(owners, SampleLayout) and (owners.axis in (None, 1) or owners.samples == 1):
        return False
    try:
        return bool(graph.saved(node, "training"))
    except AttributeError as error:
        raise UnsupportedLayer(
            f"{layer_of(node, walk, names)}: this version of torch does not show `training` of {graph.kind(node)}, "
            "which may normalise over the batch"
        ) from error


def check_statistics(cuts: Sequence[Cut], walk: graph.Walk, names: Names) -> None:
    """Refuse a normalisation over several samples.

    Raises:
        CoupledSamples: there is one.
        UnsupportedLayer: this version of torch does not tell.
    """
    for cut in cuts:
        if normalises_samples(cut.node, cut.owners.get(0), walk, names):
            raise CoupledSamples(
                f"{cut.name}: batch_norm normalises over the batch, so a sample's gradient depends on the other "
                "samples. Use running statistics (training=False, layer.eval()), or group_norm instead"
            )


def check_region(
    region: Sequence[Node],
    cuts: Collection[Node],
    samples: int,
    walk: graph.Walk,
    names: Names,
    finite: bool = True,
    absent: bool = False,
) -> None:
    """Refuse a shared region that may depend on the samples.

    Args:
        region: its nodes, each before all that lies below it.
        cuts: the nodes at its border.
        samples: ``N``.
        walk: the graph.
        names: the layers, with the parameters and buffers that are certain to be the model's own.
        finite: whether all gradients were that the region was found by.
        absent: whether samples share it as far as can be told, although some of them have no gradient there.

    Raises:
        CoupledSamples: it reads something that may be their data.
    """
    if not region:
        return
    own = [
        tensor
        for module in names.modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    for found in provenance.suspicions(region, own, samples, walk.consumers):
        # Rows that are added or multiplied to each sample are a table of positions, whatever their number; rows that
        # are compared with the samples may be those of other samples.
        if found.counts and _is_broadcast(found.node, region, cuts, samples, walk):
            continue
        if not finite:
            raise UnsupportedLayer(
                f"{layer_of(found.node, walk, names)}: the gradient of what {graph.kind(found.node)} computes is not "
                "finite, so that nobody can tell which of the samples it belongs to. Leave samples with non-finite "
                "losses out of the batch"
            )
        belong = "can belong" if absent else "belong"
        without = " (some of which have none in this batch)" if absent else ""
        raise CoupledSamples(
            f"{layer_of(found.node, walk, names)}: the gradients that arrive at its {graph.kind(found.node)} {belong} "
            f"to several of the {samples} samples at once{without}, and it reads {found.reads}, which may be data of "
            "theirs. "
            "Something between it and the losses couples the samples (a contrastive loss, statistics over the batch): "
            "keep every sample's rows apart up to its loss; where a sample has several losses, pass sample_ids=; to "
            'take the gradient of each loss as it stands, samples_coupled="allow". If what it reads is a constant, '
            "make it a buffer"
        )


def _is_broadcast(
    node: Node, region: Sequence[Node], cuts: Collection[Node], samples: int, walk: graph.Walk
) -> bool:
    """Whether what a node computes meets the samples element by element only, or has not one row a sample."""
    if all(size != samples for size in graph.outputs(node)[0][0]):
        return True
    inside = set(region)
    pending, visited = [node], {node}
    for current in pending:
        for consumer, _ in walk.consumers.get(current, ()):
            if consumer in cuts and graph.kind(consumer) not in POINTWISE | {"ExpandBackward"}:
                return False
            if consumer in inside and consumer not in visited:
                visited.add(consumer)
                pending.append(consumer)
    return True


def layer_of(node: Node, walk: graph.Walk, names: Names) -> str:
    """The layer that a node lies in, that of the next record above it; words where there is none."""
    pending, visited = [node], {node}
    for current in pending:
        for record, _ in walk.notes.get(current, ()):
            return f"{names.layer(record.module)} ({record.module_type.__name__})"
        for consumer, _ in walk.consumers.get(current, ()):
            if consumer not in visited:
                visited.add(consumer)
                pending.append(consumer)
    return "the computation between the model's outputs and the losses"
