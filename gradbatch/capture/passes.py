"""Pruned backward passes: the gradients at the outputs of calls and nodes, and nothing below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from gradbatch.capture import graph
from gradbatch.capture.checkpoints import differentiate
from gradbatch.capture.graph import Place
from gradbatch.capture.owners import Differentiate
from gradbatch.capture.undisturbed import readable
from gradbatch.capture.uses import Names, Use


def pruned_pass(
    outputs: Sequence[Tensor],
    cotangents: Callable[[Tensor], Sequence[Tensor]],
    uses: Sequence[Use],
    places: Sequence[Place],
    walk: graph.Walk,
    names: Names,
) -> Differentiate:
    """A function that runs such a pass, from weights of the samples to the gradients.

    Args:
        outputs: where the pass starts.
        cotangents: from the weights to cotangents of ``outputs``.
        uses: calls, whose gradients come as their rules take them; these come first.
        places: outputs of nodes, whose gradients come as they are.
        walk: the graph.
        names: the layers.
    """
    edges = list(dict.fromkeys([*(place for use in uses for place in use.places), *places]))

    def run(weights: Tensor) -> list[list[Tensor | None]]:
        with readable("the model's graph", lambda: changed(walk, names)):
            found = differentiate(outputs, cotangents(weights), edges, walk)
        arrived = {edge: strided(g) for edge, g in zip(edges, found, strict=True)}
        return _as_taken(arrived, uses, places)

    return run


def roots_at(outputs: Sequence[Tensor], numbers: Tensor, axis: int) -> dict[Place, Tensor]:
    """The sample of each element of the tensors where such a pass starts.

    Args:
        outputs: the tensors.
        numbers: the samples of their rows.
        axis: of the rows.
    """
    return {
        (graph.node_of(output), output.output_nr): numbers.to(output.device)
        .view(-1, *(1,) * (output.dim() - axis - 1))
        .expand(output.shape)
        for output in outputs
    }


def maps_at(
    follow: Callable[[set[Place]], Mapping[Place, Tensor]], uses: Sequence[Use], places: Sequence[Place]
) -> list[list[Tensor | None]]:
    """Whose the elements of the gradients are that such a pass finds, by the operations alone.

    Args:
        follow: finds maps of the outputs of nodes.
        uses: calls.
        places: outputs of nodes.

    Returns:
        Maps in the shapes of the gradients; ``None`` where nothing arrives.
    """
    found = follow({place for use in uses for place in use.places}.union(places))
    # Where an arrangement fills up with zeros there is nobody.
    arranged = _as_taken({place: owner + 1.0 for place, owner in found.items()}, uses, places)
    return [[None if owner is None else owner.long() - 1 for owner in outputs] for outputs in arranged]


def _as_taken(
    arrived: Mapping[Place, Tensor | None], uses: Sequence[Use], places: Sequence[Place]
) -> list[list[Tensor | None]]:
    """Gradients at calls, as their rules take them, and at the outputs of nodes, as they are."""
    of_uses = [[use.output_gradient(i, arrived.get(p)) for i, p in enumerate(use.places)] for use in uses]
    return of_uses + [[arrived.get(place)] for place in places]


def adjacent_tensors(walk: graph.Walk) -> Iterator[Tensor]:
    """The user's own tensors that went into recorded calls or came out of them, as long as they live."""
    for record in {record: None for notes in walk.notes.values() for record, _ in notes}:
        for reference in record.adjacent:
            tensor = reference()
            if tensor is not None:
                yield tensor


def changed(walk: graph.Walk, names: Names) -> list[str]:
    """The parameters of recorded calls that were changed in place since the forward."""
    records = {record: None for notes in walk.notes.values() for record, _ in notes}
    found = [
        f"{path}.{attribute}" if (path := names.modules.get(record.module)) else attribute
        for record in records
        for attribute in record.changed_parameters()
    ]
    return list(dict.fromkeys(found))


def strided(gradient: Tensor | None) -> Tensor | None:
    """A gradient that is not sparse."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
