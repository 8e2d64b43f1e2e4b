"""What earlier steps found out about the graph at hand, where it can be relied on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradbatch.capture import graph
from gradbatch.capture.graph import Place
from gradbatch.capture.layouts import Owners
from gradbatch.capture.memory import Known, Measured, Memory
from gradbatch.capture.propagation import Run
from gradbatch.capture.uses import Use
from gradbatch.rules import Layout, SampleLayout


class Recollection:
    """The memory of one graph, with its places in the terms of this step's nodes.

    Args:
        memory: of the model.
        walk: the graph.
        samples: ``N``, at least 2.
        roots: where the samples lie in the losses or outputs.
    """

    def __init__(self, memory: Memory, walk: graph.Walk, samples: int, roots: Mapping[Place, Run]) -> None:
        self._samples = samples
        self._known: Known = memory.of(tuple(walk.structure))
        self._nodes = nodes = list(walk.order())
        self._numbers = {node: number for number, node in enumerate(nodes)}
        self._shapes = tuple([graph.shapes(node) for node in nodes])
        starts = {(self._numbers[node], number): run for (node, number), run in roots.items()}
        self._certain = self._known.propagated(nodes, self._shapes, starts, samples).certain
        self._measured: dict[Hashable, Measured] = {}
        self._is_due = self._known.is_due()
        self._relied_on_shared = False

    def of_use(self, use: Use, into: dict[Use, Layout | None]) -> None:
        """Add the layout of a call, if it is known and certain whatever the data is; ``None`` if samples share it."""
        key = self._key_of_use(use)
        if not self._is_due and self._known.trusts(key):
            layout = self._known_of_use(use)
            if layout is None or self.follows(use, layout):
                into[use] = layout
                self._relied_on_shared |= layout is None

    def of_place(self, place: Place, into: dict[Place, Owners | None]) -> None:
        """The same for the output of a node."""
        key = self._key_of_place(place)
        if not self._is_due and self._known.trusts(key):
            layout = self._known_of_place(place)
            if layout is None or self.is_certain(place, layout):
                into[place] = layout
                self._relied_on_shared |= layout is None

    @property
    def certain(self) -> dict[Place, Run]:
        """Where the samples lie whatever the data is."""
        return {(self._nodes[at], number): run for (at, number), run in self._certain.items()}

    def is_certain(self, place: Place, owners: Layout | Owners | None) -> bool:
        """Whether the samples lie so, whatever the data is."""
        at, number = self._numbers[place[0]], place[1]
        return isinstance(owners, SampleLayout) and self._certain.get((at, number)) == Run.of(
            owners, self._shapes[at][number]
        )

    def follows(self, use: Use, layout: Layout | None) -> bool:
        """Whether a layout holds for all outputs of a call, whatever the data is."""
        if not isinstance(layout, SampleLayout) or layout.axis is None:
            return False
        runs = [self._certain.get((self._numbers[node], anchor.number)) for node, anchor in use.anchors]
        if use.rule.arrange is not None:
            return all(
                run is not None and self._arranges(use, at, run, layout) for at, run in enumerate(runs)
            )
        return all(
            run == Run.of(layout, anchor.shape) and (anchor.is_whole or anchor.is_reshaped)
            for run, (_, anchor) in zip(runs, use.anchors, strict=True)
        )

    def note_use(self, use: Use, layout: Layout | None, only: bool) -> None:
        """Take down what was measured in this step."""
        known = self._known_of_use(use)
        relied, follows = self.follows(use, known), self.follows(use, layout)
        self._measured[self._key_of_use(use)] = Measured(layout, only, follows, relied, layout == known)

    def note_place(self, place: Place, owners: Owners | None, only: bool) -> None:
        """Take down what was measured in this step."""
        known = self._known_of_place(place)
        relied, follows = self.is_certain(place, known), self.is_certain(place, owners)
        self._measured[self._key_of_place(place)] = Measured(owners, only, follows, relied, owners == known)

    def forget_shared(self) -> bool:
        """Forget which elements samples share; returns whether that was relied on.

        What comes from a buffer in some batches may be data in others: then they have them for themselves.
        """
        known = self._known
        known.verdicts = {place: found for place, found in known.verdicts.items() if found[0] is not None}
        return self._relied_on_shared

    def store(self) -> None:
        """Keep what was taken down; raises :class:`StaleCapture` if it contradicts what was relied on."""
        self._known.store(self._measured)

    def _known_of_use(self, use: Use) -> SampleLayout | None:
        """What is known of a call, for the samples and shapes of this step."""
        node, anchor = use.anchors[0]
        # Where a rule arranges the output, the layout is that of what comes out.
        run = None if use.rule.arrange else self._certain.get((self._numbers[node], anchor.number))
        return self._known_for(self._key_of_use(use), run, anchor.shape)

    def _known_of_place(self, place: Place) -> SampleLayout | None:
        at, number = self._numbers[place[0]], place[1]
        return self._known_for((at, number), self._certain.get((at, number)), self._shapes[at][number])

    def _known_for(self, key: Hashable, run: Run | None, shape: Sequence[int]) -> SampleLayout | None:
        known = self._known.verdicts.get(key, (None, 0))[0]
        if known is None:
            return None
        # How many rows of a sample lie next to each other depends on the shapes; on which axis they lie does not.
        implied = None if run is None else run.layout(shape, self._samples)
        if implied is not None and implied.axis == known.axis:
            return implied
        return replace(known, samples=self._samples)

    def _arranges(self, use: Use, position: int, run: Run, layout: SampleLayout) -> bool:
        """Whether an output with the samples in a place is arranged, by the call's rule, to one with a layout."""
        anchor = use.anchors[position][1]
        before = run.layout(anchor.base_shape, layout.samples)
        if before is None:
            return False
        device = use.record.outputs[anchor.index][2]
        numbers = _numbered(before, anchor.base_shape, device)
        arranged = use.output_gradient(position, numbers)
        if arranged is None or arranged is numbers:
            return before == layout
        return not (arranged - _numbered(layout, arranged.shape, device)).any()

    def _key_of_place(self, place: Place) -> Hashable:
        return self._numbers[place[0]], place[1]

    def _key_of_use(self, use: Use) -> Hashable:
        nodes = tuple(self._numbers[node] for node, _ in use.anchors)
        return nodes, use.record.module_type, tuple(anchor.index for _, anchor in use.anchors)


def _numbered(layout: SampleLayout, shape: torch.Size, device: torch.device) -> Tensor:
    """The sample of each element of a tensor, from 1 on: an arrangement may fill up with zeros."""
    assert layout.axis is not None
    dtype = torch.uint8 if layout.samples < 255 else torch.int32
    rows = (layout.owner(shape[layout.axis]) + 1).to(device, dtype)
    return rows.view(-1, *(1,) * (len(shape) - layout.axis - 1)).expand(shape)
