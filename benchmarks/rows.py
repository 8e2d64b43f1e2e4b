"""One row of the table: a model, a quantity, and every contestant that offers it."""

import copy
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.cases import CASES
from benchmarks.contestants import OURS, PEERS, PLAIN
from benchmarks.contestants.base import Contestant, Step
from benchmarks.measure import describe, start, time_steps
from benchmarks.memory import peak_bytes, plain_bytes
from benchmarks.quantities import Answer


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        device: where.
        peers: names of those that take part.
        derived: also those that hand out per-sample gradients, for quantities that they do not offer by themselves.
        repeats: rounds at most.
        budget: seconds of a row; see :func:`benchmarks.measure.time_steps`.
        memory: measure it too.
        shrink: divide every batch by this.
    """

    device: torch.device
    peers: Collection[str]
    derived: bool
    repeats: int
    budget: float
    memory: bool
    shrink: int = 1

    def contestants(self, quantity: str) -> list[Contestant]:
        """Ours first, which the others are compared with."""
        peers = [PEERS[name] for name in PEERS if name in self.peers]
        return [OURS, *(peer for peer in peers if quantity in peer.offers or (self.derived and peer.derives))]


@dataclass
class Cell:
    """What was found of one contestant.

    Args:
        said: why there are no numbers, or what is wrong with them; empty if nothing is.
        milliseconds, ratio: median and quartiles; the ratio is to the plain step of the same round.
        rounds: that it was timed in.
        mebibytes: that a step adds at its peak.
        memory_ratio: to what a plain step adds.
        error: of its answer against ours, relative to the norm, the largest over parameters.
    """

    said: str = ""
    milliseconds: tuple[float, float, float] | None = None
    ratio: tuple[float, float, float] | None = None
    rounds: int = 0
    mebibytes: float | None = None
    memory_ratio: float | None = None
    error: float | None = None


@dataclass
class Row:
    """A model, a quantity and a number of threads."""

    case: str
    title: str
    quantity: str
    samples: int
    threads: int
    length: int | None = None
    cells: dict[str, Cell] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure_row(
    case: str,
    quantity: str,
    plan: Plan,
    contestants: list[Contestant] | None = None,
    samples: int | None = None,
    length: int | None = None,
) -> Row:
    """Time every contestant of a row, check its answer against ours, and measure its memory.

    Args:
        case: key in ``CASES``.
        quantity: what is computed.
        plan: how much is measured.
        contestants: instead of all that the plan has for the quantity.
        samples, length: instead of the case's own; memory is not measured then.
    """
    model, batch = CASES[case].build(
        plan.device, samples or max(CASES[case].samples // plan.shrink, 2), length
    )

    def prepare(contestant: Contestant) -> Step:
        return contestant.prepare(copy.deepcopy(model), batch, quantity)

    title = str(CASES[case].title)
    row = Row(case, title, quantity, len(batch), torch.get_num_threads(), length)
    steps: dict[str, Step] = {}
    reference: Answer | None = None
    for contestant in [PLAIN, *(plan.contestants(quantity) if contestants is None else contestants)]:
        step, answer, said, error = start(contestant, prepare, reference)
        if contestant is OURS:
            reference = answer
        row.cells[contestant.name] = Cell(said, error=error)
        if step is not None:
            steps[contestant.name] = step
    del reference, answer
    for name, timing in time_steps(steps, plan.device, plan.repeats, plan.budget).items():
        cell = row.cells[name]
        cell.milliseconds = describe(tuple(1e3 * t for t in timing.seconds))
        cell.ratio, cell.rounds = describe(timing.ratios), len(timing.seconds)
    steps.clear()
    if plan.memory and samples is None and length is None:
        _measure_memory(row, plan)
    return row


def _measure_memory(row: Row, plan: Plan) -> None:
    """Fill in the memory of everybody who could run."""
    for name, cell in row.cells.items():
        if cell.ratio is None:
            continue
        try:
            plain = plain_bytes(row.case, plan.device, row.samples)
            found = plain
            if name != PLAIN.name:
                found = peak_bytes(row.case, row.quantity, name, plan.device, row.samples)
        except (
            RuntimeError
        ) as error:  # more than there is, which ends the process; times are there all the same
            print(error, file=sys.stderr)
            continue
        cell.mebibytes, cell.memory_ratio = found / 2**20, found / plain
