"""Remember where the samples lie, so that a training loop need not measure it in every step.

What was measured is kept by the structure of the graph. It is trusted once two batches agree, and only where the
operations alone say the same for the shapes at hand (see :mod:`gradbatch.capture.propagation`), since a layout may be
regular by chance. Now and then all is measured again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.graph import Node

from gradbatch.capture.axes import Shapes
from gradbatch.capture.layouts import OwnerMap
from gradbatch.capture.propagation import Propagated, Run, propagate
from gradbatch.errors import StaleCapture
from gradbatch.rules import RowLayout, SampleLayout

Verdict = SampleLayout | RowLayout | OwnerMap | None
"""Where the samples lie; ``None`` if some element belongs to several."""

BATCHES = 2
STEPS = 64
GRAPHS = 16


@dataclass(frozen=True)
class Measured:
    """What was measured at a place.

    Args:
        verdict: where the samples lie.
        only: whether nothing else explains the gradients.
        follows: whether it follows from the operations alone.
        relied: whether what was known before does, so that it would have been relied on.
        agrees: whether both are the same.
    """

    verdict: Verdict
    only: bool
    follows: bool
    relied: bool
    agrees: bool


@dataclass
class Known:
    """What is known of graphs of one structure.

    Args:
        verdicts: regular layouts of the last batch, or ``None`` for shared by several, by place, with how many
            batches have agreed.
        steps: how often it was relied on since all was measured.
    """

    verdicts: dict[Hashable, tuple[SampleLayout | None, int]] = field(default_factory=dict)
    steps: int = 0
    _propagated: OrderedDict[Hashable, Propagated] = field(default_factory=OrderedDict)

    def propagated(
        self,
        nodes: Sequence[Node],
        shapes: tuple[Shapes, ...],
        roots: Mapping[tuple[int, int], Run],
        samples: int,
    ) -> Propagated:
        """Where the samples must lie: derived once for the same shapes and settings of nodes, which are compared.

        The arguments are those of :func:`~gradbatch.capture.propagation.propagate`.
        """
        key = shapes, tuple(roots.items())
        found = self._propagated.get(key)
        if found is None or not found.holds_for(nodes):
            found = self._propagated[key] = propagate(nodes, shapes, roots, samples)
        _forget_oldest(self._propagated, key)
        return found

    def is_due(self) -> bool:
        """Count a step, and say whether it is time to measure again."""
        self.steps = (self.steps + 1) % STEPS
        return self.steps == 0

    def trusts(self, place: Hashable) -> bool:
        """Whether enough batches agree on a place."""
        return place in self.verdicts and self.verdicts[place][1] >= BATCHES

    def store(self, measured: Mapping[Hashable, Measured]) -> None:
        """Note what was measured in this step.

        Args:
            measured: by place.

        Raises:
            StaleCapture: something else was relied on before.
        """
        for place, found in measured.items():
            known, count = self.verdicts.get(place, (None, 0))
            differs = found.only or not isinstance(found.verdict, SampleLayout)
            if count and not found.agrees and differs:
                del self.verdicts[place]
                if found.relied and known is not None and count >= BATCHES:
                    self._contradict()
                count = 0
            if found.verdict is None or (
                isinstance(found.verdict, SampleLayout) and found.only and found.follows
            ):
                self.verdicts[place] = found.verdict, count + 1

    def _contradict(self) -> None:
        self.verdicts.clear()
        raise StaleCapture(
            "the samples lie elsewhere than in earlier batches, and than the operations of the model imply; results "
            f"since the last check (at most {STEPS} steps ago) may be wrong. Extend the model with remember=False, "
            "which measures in every step"
        )


class Memory:
    """What is known of the graphs of one model."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, Known] = OrderedDict()

    def of(self, structure: Hashable) -> Known:
        """What is known of graphs of a structure; the least recently used ones are forgotten."""
        known = self._graphs.setdefault(structure, Known())
        _forget_oldest(self._graphs, structure)
        return known


def _forget_oldest(entries: OrderedDict[Hashable, Any], used: Hashable) -> None:
    """Keep the entries that were used last, with the one that is being used."""
    entries.move_to_end(used)
    while len(entries) > GRAPHS:
        entries.popitem(last=False)


_memories: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()


def memory_of(model: nn.Module) -> Memory:
    """The memory of a model, which goes with it."""
    return _memories.setdefault(model, Memory())


def forget(model: nn.Module) -> None:
    """Forget everything about a model."""
    _memories.pop(model, None)
