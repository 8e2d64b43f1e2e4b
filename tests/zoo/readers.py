"""By which reader the uses of an entry's parameters are read: how often by calling a node once for each sample."""

from collections import Counter
from dataclasses import dataclass

import torch

import gradbatch
from gradbatch.capture.direct import capture_losses
from gradbatch.plans.contractions import Planner
from gradbatch.selection import select
from tests.zoo.check import as_its_library_expects, described, losses_of
from tests.zoo.entry import Entry


@dataclass(frozen=True)
class Readers:
    """How the uses of an entry's parameters were read.

    Args:
        entry: the entry.
        readers: uses by reader: ``"module"``, ``"node"`` and ``"node call"``.
        called: uses by type of the node that was called.
        why: the error, where none could be counted.
    """

    entry: Entry
    readers: Counter[str]
    called: Counter[str]
    why: str = ""

    @property
    def share(self) -> float:
        """Of node calls in all uses; 0 where there is no use."""
        return self.readers["node call"] / max(1, self.readers.total())


def readers(entry: Entry) -> Readers:
    """Count the uses of an entry's parameters by their reader, without computing a gradient to compare with."""
    with as_its_library_expects():
        torch.manual_seed(0)
        try:
            model, call = entry.build()
            gradbatch.extend(model)
            found = capture_losses(losses_of(call), select(model, None).names, Planner()).evaluations
        except Exception as error:
            return Readers(entry, Counter(), Counter(), described(error))
    return Readers(
        entry,
        Counter(use.reader for use in found),
        Counter(use.operation for use in found if use.reader == "node call"),
    )
