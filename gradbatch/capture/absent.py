"""Samples without a gradient: would the samples lie where they were found, if all had one?

A sample may have none, at a call or anywhere: dead activations, ignored labels, a loss of weight zero. It then shows
neither where it lies nor what it has to do with the others. If they depend on each other through its rows, these seem
to be the others' alone. What the operations imply holds for all samples; where they do not imply what was measured, the
samples are followed through the graph as if the missing ones had a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from gradbatch.capture import graph
from gradbatch.capture.graph import Place
from gradbatch.capture.layouts import OwnerMap, element_owners
from gradbatch.capture.owners import Ownership
from gradbatch.capture.passes import maps_at
from gradbatch.capture.reach import Reach
from gradbatch.capture.recollection import Recollection
from gradbatch.capture.uses import Use
from gradbatch.rules import SampleLayout


def take_back_doubtful(
    found: Ownership,
    uses: Sequence[Use],
    places: Sequence[Place],
    walk: graph.Walk,
    roots: Mapping[Place, Tensor],
    numbers: Tensor,
    implied: Callable[[], Recollection | None],
) -> bool:
    """Take back where samples were found, if some have no gradient there and may share elements with others.

    Args:
        found: what was measured at calls and nodes; changed.
        uses: the calls.
        places: outputs of nodes.
        walk: the graph.
        roots: the sample of each element of the losses or outputs.
        numbers: the sample of each of their rows.
        implied: derives where the operations say that the samples lie.

    Returns:
        Whether something was taken back.
    """
    samples = numbers.unique().cpu()
    doubtful = (~found.present[:, samples].all(1)).nonzero().flatten().tolist()
    if not doubtful:
        return False
    recollection = implied()
    if recollection is not None:
        doubtful = [i for i in doubtful if not _is_implied(i, found, uses, places, recollection)]
    certain = {} if recollection is None else recollection.certain
    # As if no factor were zero is quick. But zeros may be what keeps samples apart, and then the others have to do.
    for reach in (
        Reach(walk, found.present.shape[1], certain, revives=True),
        Reach(walk, found.present.shape[1], revives=True, by_value=True),
    ):
        if not doubtful:
            return False
        asked_uses = [uses[i] for i in doubtful if i < len(uses)]
        asked = [places[i - len(uses)] for i in doubtful if i >= len(uses)]
        maps = dict(zip(doubtful, maps_at(partial(reach.owners, roots), asked_uses, asked), strict=True))
        doubtful = [i for i in doubtful if not _agree(found, i, maps[i])]
        for i in maps.keys() - set(doubtful):
            _prefer(found, i, maps[i])
    for i in doubtful:
        found.owners[i], found.lasting[i] = None, False
    return bool(doubtful)


def _is_implied(
    i: int, found: Ownership, uses: Sequence[Use], places: Sequence[Place], implied: Recollection
) -> bool:
    """Whether the samples must lie where they were found, by the operations alone."""
    owners = found.owners[i]
    if not isinstance(owners, SampleLayout):
        return False  # at a call, to look for its rows takes time
    if i >= len(uses):
        return implied.is_certain(places[i - len(uses)], owners)
    return implied.follows(uses[i], uses[i].layout(owners))


def _agree(found: Ownership, i: int, reached: Sequence[Tensor | None]) -> bool:
    """Whether each element of a site depends on one sample at most, and that is the one it was found to belong to."""
    owners = found.owners[i]
    assert owners is not None
    for gradient, owner in zip(found.gradients[i], reached, strict=True):
        if owner is None:
            continue
        if bool((owner > found.present.shape[1]).any()):
            return False
        if gradient is not None and bool(
            ((gradient != 0) & (owner != element_owners(owners, gradient))).any()
        ):
            return False
    return True


def _prefer(found: Ownership, i: int, reached: Sequence[Tensor | None]) -> None:
    """Take the owners from the operations where they say something else than a regular layout that was measured.

    Both differ in zeros alone, but zero times what is not finite in another sample is not zero.
    """
    owners, gradients = found.owners[i], found.gradients[i]
    if not isinstance(owners, SampleLayout) or len(gradients) != 1:
        return
    gradient, owner = gradients[0], reached[0]
    if gradient is not None and owner is not None and bool((owner != element_owners(owners, gradient)).any()):
        found.owners[i], found.lasting[i] = OwnerMap(owner, found.present.shape[1]), False
