"""Gradients of a parameter that is used in parts: slices of a fused projection, experts of a stack."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradbatch.errors import RuleError
from gradbatch.factors.base import PerSampleGrad
from gradbatch.factors.dense import check_devices
from gradbatch.factors.sums import sum_tensors
from gradbatch.plans.contractions import Planner, accumulation_dtype


class Blocks(PerSampleGrad):
    """Per-sample gradients that are zero outside of some blocks, each of consecutive elements of the parameter.

    A block keeps its structure, so a weight that is cut into queries, keys and values is three outer products. The
    blocks do not overlap, so norms and inner products are sums over blocks without cross terms.

    Args:
        blocks: gradients of the same samples, at least one, by the place of their first element among the parameter's.
        shape: of the parameter.

    Raises:
        RuleError: when there are none, they differ in samples or device, overlap, or lie outside of the parameter.
    """

    def __init__(self, blocks: Mapping[int, PerSampleGrad], shape: Sequence[int]) -> None:
        flat = sorted(_flattened(blocks), key=lambda placed: placed[0])
        self.blocks = dict(flat)
        if len({block.num_samples for block in self.blocks.values()}) != 1:
            raise RuleError(f"Blocks takes gradients of the same samples; got {list(self.blocks.values())}.")
        check_devices("Blocks", [block.device for block in self.blocks.values()])
        first = next(iter(self.blocks.values()))
        super().__init__(shape, first.num_samples, [b.dtype for b in self.blocks.values()], first.device)
        self.planner = first.planner
        bounds = [bound for start, block in flat for bound in (start, start + block._numel)]
        if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > self._numel:
            raise RuleError(f"Blocks: {self!r} overlap, or lie outside of the parameter.")

    def placed(self) -> Iterator[tuple[slice, PerSampleGrad]]:
        """Which elements of the parameter each block is."""
        for start, block in self.blocks.items():
            yield slice(start, start + block._numel), block

    def _dense(self) -> Tensor:
        return self._filled((self.num_samples,), self.dtype, lambda _, block: block._dense())

    def _select(self, index: Tensor) -> "Blocks":
        return self._of_each(lambda block: block._select(index))

    def _part(self, start: int, stop: int) -> "Blocks":
        return self._of_each(lambda block: block._part(start, stop))

    def _regroup(self, k: int) -> "Blocks":
        return self._of_each(lambda block: block._regroup(k))

    def _planned(self, planner: Planner) -> "Blocks":
        self.blocks = {start: block.with_planner(planner) for start, block in self.blocks.items()}
        return super()._planned(planner)

    def _keep(self, operations: Sequence[str], room: int) -> "tuple[PerSampleGrad, int]":
        kept, growth = dict[int, PerSampleGrad](), 0
        for start, block in self.blocks.items():
            kept[start], more = block._keep(operations, room - growth)
            growth += more
        changed = any(kept[start] is not block for start, block in self.blocks.items())
        return (Blocks(kept, self.shape) if changed else self), growth

    def _noise(self) -> Tensor:
        return sum_tensors([block._noise() for block in self.blocks.values()])

    def _sum(self) -> Tensor:
        return self._filled((), self.dtype, lambda _, block: block._sum())

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        dtype = accumulation_dtype(self.dtype, weights.dtype)
        return self._filled((len(weights),), dtype, lambda _, block: block._weighted_sum(weights))

    def _squared_norm(self) -> Tensor:
        return sum_tensors([block._squared_norm() for block in self.blocks.values()])

    def _sum_of_squares(self, center: Tensor | None) -> Tensor:
        if center is None:
            return self._filled((), self.dtype, lambda _, block: block._sum_of_squares(None))
        dtype = accumulation_dtype(self.dtype, center.dtype)
        flat = center.to(dtype).flatten()
        outside = self.num_samples * flat.square() if self.num_samples else torch.zeros_like(flat)

        def squares(place: slice, block: PerSampleGrad) -> Tensor:
            return block._sum_of_squares(flat[place].reshape(block.shape))

        return self._filled((), dtype, squares, outside)

    def _moments(self) -> tuple[Tensor, Tensor]:
        each = {place.start: block._moments() for place, block in self.placed()}
        mean = self._filled((), self.dtype, lambda place, _: each[place.start][0])
        return mean, self._filled((), self.dtype, lambda place, _: each[place.start][1])

    def _project(self, directions: Tensor) -> Tensor:
        flat = directions.reshape(len(directions), self._numel)
        parts = ((flat[:, place], block) for place, block in self.placed())
        return sum_tensors([block._project(part.reshape(len(flat), *block.shape)) for part, block in parts])

    def _filled(
        self,
        leading: tuple[int, ...],
        dtype: torch.dtype,
        evaluate: Callable[[slice, PerSampleGrad], Tensor],
        outside: Tensor | None = None,
    ) -> Tensor:
        """Put what is computed of each block in its place, ``[*leading, *shape]``."""
        if outside is None:
            outside = torch.zeros(*leading, self._numel, dtype=dtype, device=self.device)
        for place, block in self.placed():
            outside[..., place] = evaluate(place, block).reshape(*leading, block._numel)
        return outside.reshape(*leading, *self.shape)

    def _of_each(self, evaluate: Callable[[PerSampleGrad], PerSampleGrad]) -> "Blocks":
        return Blocks({start: evaluate(block) for start, block in self.blocks.items()}, self.shape)

    def _details(self) -> str:
        return "".join(f", {start}: {block!r}" for start, block in self.blocks.items())


def matched(left: Blocks, right: Blocks) -> list[tuple[PerSampleGrad, PerSampleGrad]] | None:
    """The blocks that lie in the same place in both; ``None`` if two overlap in part."""
    pairs = []
    for place, block in left.placed():
        for place2, block2 in right.placed():
            if place == place2:
                pairs.append((block, block2))
            elif place.start == place2.start or (place.start < place2.stop and place2.start < place.stop):
                return None
    return pairs


def _flattened(blocks: Mapping[int, PerSampleGrad]) -> Iterator[tuple[int, PerSampleGrad]]:
    """Blocks of blocks are blocks."""
    for start, block in blocks.items():
        inner = block.blocks if isinstance(block, Blocks) else {0: block}
        yield from ((start + offset, part) for offset, part in inner.items())
