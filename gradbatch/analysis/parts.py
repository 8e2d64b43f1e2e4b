"""The parts of a model that statistics are added up over: parameters, layers, groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from gradbatch.analysis.log import Log, Record, Run
from gradbatch.analysis.noise import NoiseScale
from gradbatch.errors import UsageError

By = Literal["parameter", "layer", "group"]
BLOCK = 4096  # records at a time


@dataclass(frozen=True)
class Partition:
    """Which parameters are in which part; a parameter may be in several, or in none.

    Args:
        names: of the parts.
        part, parameter: pairs of places, ``[E]`` each: this part has that parameter.
    """

    names: list[str]
    part: Tensor
    parameter: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the parameters of each part, ``[..., parts]``.

        Args:
            values: one a parameter, ``[..., P]``.
        """
        zeros = values.new_zeros(*values.shape[:-1], len(self.names))
        return zeros.index_add(-1, self.part, values[..., self.parameter])


def partition(run: Run, by: By) -> Partition:
    """The parts of a run's model.

    Args:
        run: says which parameters there are, and in which groups.
        by: a part for each parameter, for each module with parameters of its own, or for each named group.
    """
    names = list(run.parameters)
    members: dict[str, list[str]] = {}
    if by == "group":
        members = run.groups
    else:
        for name in names:
            members.setdefault(layer_of(name) if by == "layer" else name, []).append(name)
    places = {name: place for place, name in enumerate(names)}
    pairs = [(part, places[name]) for part, inside in enumerate(members.values()) for name in inside]
    found = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    return Partition(list(members), found[:, 0], found[:, 1])


def layer_of(parameter: str) -> str:
    """Path of the module that a parameter is in; ``""`` is the model itself."""
    return parameter.rpartition(".")[0]


def named_groups(
    groups: Mapping[str, str | Iterable[str]], aliases: Iterable[Sequence[str]]
) -> dict[str, list[str]]:
    """First names of the parameters in each group.

    Args:
        groups: name pattern or patterns of each.
        aliases: all names of each parameter; a tied one has several.

    Raises:
        UsageError: a pattern matches no parameter, a group has none, or its name is no string.
    """
    if not isinstance(groups, Mapping):
        raise UsageError(f'groups is {groups!r}; it has patterns by name, as in {{"head": "head.*"}}')
    known, found = list(aliases), {}
    for group, patterns in groups.items():
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        if not isinstance(group, str) or not wanted:
            raise UsageError(f"groups: {group!r} has {wanted}; a group has a name, and one pattern or more")
        for pattern in wanted:
            if not any(fnmatchcase(name, pattern) for names in known for name in names):
                raise UsageError(
                    f"groups: {pattern!r} of group {group!r} matches none of {', '.join(n[0] for n in known)}"
                )
        found[group] = [
            names[0]
            for names in known
            if any(fnmatchcase(name, pattern) for name in names for pattern in wanted)
        ]
    return found


def part_noise(log: Log, records: Sequence[Record], by: By = "layer") -> tuple[list[str], NoiseScale]:
    """Names of the parts, and their noise scales, ``[parts]``.

    Args:
        log: that the records are of.
        records: some of its records.
        by: what the parts are, see :func:`partition`.
    """
    parts = partition(log.run, by)
    noise = NoiseScale((len(parts.names),))
    for counts, squares, square in stacked(records):
        noise.update_all(counts, parts.sums(squares), parts.sums(square))
    return parts.names, noise


def rms_norms(log: Log, records: Sequence[Record], by: By = "layer") -> list[float]:
    """Root of the mean squared norm of a sample's gradient, for each part; NaN where no record is finite."""
    parts = partition(log.run, by)
    sums, samples = torch.zeros(2, len(parts.names), dtype=torch.double)
    for counts, squares, _ in stacked(records):
        of_parts = parts.sums(squares)
        finite = of_parts.isfinite()
        sums += torch.where(finite, of_parts, 0).sum(0)
        samples += counts.double() @ finite.double()
    norms: list[float] = (sums / samples).sqrt().tolist()
    return norms


def step_sizes(log: Log) -> dict[int, int]:
    """Samples of each measured step, of all ranks together."""
    sizes: dict[int, int] = {}
    for record in log.records:
        sizes[record.step] = sizes.get(record.step, 0) + record.samples
    return sizes


def batch_size(log: Log, records: Sequence[Record]) -> float:
    """Samples of a step on average, of all ranks together, over the steps that these records are of."""
    sizes, steps = step_sizes(log), {record.step for record in records}
    return sum(sizes[step] for step in steps) / len(steps)


def stacked(records: Sequence[Record]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Samples ``[R]``, sums of squares and squares of sums ``[R, P]`` in float64, of some records at a time."""
    for start in range(0, len(records), BLOCK):
        block = records[start : start + BLOCK]
        yield (
            torch.tensor([record.samples for record in block]),
            numbers([part for record in block for part in record.sum_of_squares]).view(len(block), -1),
            numbers([part for record in block for part in record.square_of_sum]).view(len(block), -1),
        )


@dataclass(frozen=True)
class Part:
    """The gradients of a part of the model at the end of a run.

    Args:
        name: of the parameter or group, or path of the module; ``""`` is the model itself.
        elements: of its parameters together.
        norm: root of the mean squared norm of a sample's gradient; NaN without finite records.
        noise: its noise scale; NaN for a part without gradients.
        interval: of the noise scale.
        signal_to_noise: of the mean gradient over a batch, of all ranks together.
        share: of the noise of all parameters together.
    """

    name: str
    elements: int
    norm: float
    noise: float
    interval: tuple[float, float]
    signal_to_noise: float
    share: float


def parts_of(log: Log, records: Sequence[Record], by: By = "layer") -> list[Part]:
    """The gradients of each part.

    Args:
        log: that the records are of.
        records: some of its records, one at least.
        by: what the parts are, see :func:`partition`.
    """
    names, noise = part_noise(log, records, by)
    elements = partition(log.run, by).sums(torch.tensor(list(log.run.parameters.values())))
    batch = batch_size(log, records)
    low, high = noise.interval()
    everything = part_noise(log, records, "parameter")[1].variance().nansum()
    found = zip(
        names,
        elements.tolist(),
        rms_norms(log, records, by),
        noise.value().tolist(),
        low.tolist(),
        high.tolist(),
        noise.signal_to_noise(batch).tolist(),
        (noise.variance() / everything).tolist(),
        strict=True,
    )
    return [
        Part(name, n, norm, value, (lo, hi), snr, share) for name, n, norm, value, lo, hi, snr, share in found
    ]


def numbers(parts: Sequence[float | None]) -> Tensor:
    """As a tensor, ``[P]`` in float64, with NaN for ``None``."""
    return torch.tensor([torch.nan if part is None else part for part in parts], dtype=torch.double)
