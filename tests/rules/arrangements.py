"""Where a layer finds the samples of its batch: on any axis, in rows, in bags.

Cases are drawn with the samples first. A model puts its inputs into the arrangement, runs the layer, and brings the
samples of the output to the front again, so that every oracle can be used on every arrangement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Arrangement:
    """How tensors ``[N, ...]`` are handed to a layer.

    Args:
        name: for test ids.
        place: from all inputs to the positional arguments of the layer.
        first: from the layer's output and ``N`` to ``[N, ...]``.
    """

    name: str
    place: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    first: Callable[[Tensor, int], Tensor]


def each(move: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    return lambda inputs: [move(x) for x in inputs]


def rows(tensor: Tensor, n: int, axis: int = 0) -> int:
    """Rows of a sample on an axis; of an empty batch there is no telling, nor any need to."""
    return tensor.shape[axis] // n if n else 1


BATCH = Arrangement("batch", each(lambda x: x), lambda y, n: y)
AXIS_1 = Arrangement("samples on axis 1", each(lambda x: x.movedim(0, 1)), lambda y, n: y.movedim(1, 0))
AXIS_2 = Arrangement("samples on axis 2", each(lambda x: x.movedim(0, 2)), lambda y, n: y.movedim(2, 0))
COPIED = Arrangement(
    "samples copied to axis 1", each(lambda x: x.movedim(0, 1).contiguous()), lambda y, n: y.movedim(1, 0)
)
ROWS = Arrangement(
    "rows of a sample together",
    each(lambda x: x.flatten(0, 1)),
    lambda y, n: y.unflatten(0, (n, rows(y, n))),
)
INTERLEAVED = Arrangement(
    "samples fastest in rows",
    each(lambda x: x.movedim(0, 1).flatten(0, 1)),
    lambda y, n: y.unflatten(0, (rows(y, n), n)).movedim(1, 0),
)
ROWS_ON_AXIS_1 = Arrangement(
    "rows on axis 1",
    each(lambda x: x.movedim(2, 0).flatten(1, 2)),
    lambda y, n: y.unflatten(1, (n, rows(y, n, 1))).movedim(0, 2),
)


def _bags(last_offset: bool) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    def place(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        ids, lengths, *weights = inputs
        inside = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        ends = lengths.cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends]) if last_offset else ends - lengths
        return [ids[inside], offsets.to(ids.dtype), *(w[inside] for w in weights)]

    return place


# Inputs: ids [N, longest], how many of them are in each bag [N], and maybe weights [N, longest].
BAGS = Arrangement("offsets", _bags(last_offset=False), lambda y, n: y)
BAGS_WITH_END = Arrangement("offsets with the last one", _bags(last_offset=True), lambda y, n: y)


class Arranged(nn.Module):
    """A layer that is called in some arrangement, by position or by keyword.

    Args:
        layer: the layer under test.
        arrangement: where it finds the samples.
        keywords: names for the arguments; the others are positional.
        options: further keyword arguments, the same for all samples.
    """

    def __init__(
        self,
        layer: nn.Module,
        arrangement: Arrangement = BATCH,
        keywords: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.arrangement, self.keywords = layer, arrangement, keywords
        self.options = dict(options or {})

    def forward(self, *inputs: Tensor) -> Tensor:
        """Take and return the samples first."""
        placed = self.arrangement.place(inputs)
        positional = len(placed) - len(self.keywords)
        named = dict(zip(self.keywords, placed[positional:], strict=True))
        return self.arrangement.first(
            self.layer(*placed[:positional], **named, **self.options), len(inputs[0])
        )
