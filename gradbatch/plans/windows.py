"""Sliding windows of n-dimensional convolutions: the patches they read, and the adjoint that puts them back.

Everything is stated once, for one window over any number of spatial dimensions, and group by group: nothing
here knows what is multiplied with what. Tensors and shapes only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbatch.errors import UsageError


@dataclass(frozen=True)
class Window:
    """The sliding window of an n-dimensional convolution: one entry a spatial dimension.

    Args:
        kernel: extent of the window, in elements that it reads.
        stride: distance between two neighbouring windows.
        padding: zeros added on both sides; an asymmetric padding is applied by the caller, with ``F.pad``.
        dilation: distance between two neighbouring elements of a window.

    Example:
        >>> Window(kernel=(3, 3), stride=(2, 2), padding=(1, 0), dilation=(1, 2)).positions((4, 9))
        (2, 3)
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def positions(self, size: Sequence[int]) -> tuple[int, ...]:
        """Count the windows that fit into an input of spatial ``size``, per dimension; 0 where none fits."""
        room = zip(size, self.padding, self.extents((1,) * len(self.kernel)), self.stride, strict=True)
        return tuple(max(0, (s + 2 * pad - extent) // step + 1) for s, pad, extent, step in room)

    def extents(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Count the padded elements, per dimension, from the first one read to the last; for 1 window at least."""
        terms = zip(positions, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((max(p, 1) - 1) * step + (k - 1) * dilation + 1 for p, k, step, dilation in terms)


class Patches:
    """The patches a convolution reads: operand ``[N, G, D, T]`` of its weight gradient, not yet unfolded.

    Args:
        source: ``[R, C, *size]``, any strides; ``R = N * rows``, the rows of one sample next to each other.
        window: the sliding window.
        groups: ``G``; ``D = C / G * prod(window.kernel)``.
        positions: windows used in each spatial dimension, at most (and by default)
            ``window.positions(size)``; fewer leave out windows at the end. ``T = rows * prod(positions)``,
            row-major.
        rows: how many rows of ``source`` make one sample.
    """

    def __init__(
        self,
        source: Tensor,
        window: Window,
        groups: int,
        positions: tuple[int, ...] | None = None,
        rows: int = 1,
    ) -> None:
        if source.dim() != 2 + len(window.kernel) or source.shape[1] % groups or source.shape[0] % rows:
            raise UsageError(
                f"patches of a source {list(source.shape)} with a {len(window.kernel)}-dimensional window, "
                f"{groups} groups and {rows} rows a sample: the source has to be [N * {rows}, channels, *size] "
                f"with channels divisible by {groups} and {len(window.kernel)} sizes."
            )
        self.source, self.window, self.groups, self.rows = source, window, groups, rows
        self.positions = window.positions(source.shape[2:]) if positions is None else tuple(positions)

    @property
    def shape(self) -> torch.Size:
        """``(N, G, D, T)``."""
        rows, channels = self.source.shape[:2]
        inputs = channels // self.groups * math.prod(self.window.kernel)
        return torch.Size((rows // self.rows, self.groups, inputs, self.rows * math.prod(self.positions)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the source."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """The device of the source."""
        return self.source.device

    @property
    def nbytes(self) -> int:
        """Bytes of the source."""
        return self.source.nbytes

    def __repr__(self) -> str:
        source = list(self.source.shape)
        return f"Patches({list(self.shape)}, {source=}, {self.window}, positions={self.positions})"

    def unfold(self) -> Tensor:
        """Materialise the patches, ``[N, G, D, T]``."""
        n = len(self.window.kernel)
        views = _windows(self.source, self.window, self.groups, self.positions)
        views = views.reshape(
            self.shape[0], self.rows, *views.shape[1:]
        )  # [N, rows, G, C/G, *kernel, *positions]
        return views.movedim(1, 3 + n).reshape(self.shape)

    def strips(self, channels_last: bool) -> Iterator[Tensor]:
        """Cut the patches by the first dimension of the window, one strip ``[N, G, D / K, T]`` for each of its places.

        Neighbouring windows overlap, so all strips are views of one tensor in which the other dimensions alone are
        unfolded: a ``K``-th of what :meth:`unfold` copies, and still operands of matrix products.

        Args:
            channels_last: the elements of a strip are ordered by place, then by channel, and lie next to each other in
                memory; otherwise by channel, then by place, and its positions lie next to each other.
        """
        unfolded, inner = self._unfolded_but_first(channels_last), math.prod(self.positions[1:])
        for place in range(self.window.kernel[0]):
            start, phase = divmod(place * self.window.dilation[0], self.window.stride[0])
            strip = unfolded[:, :, :, phase].narrow(3, start * inner, self.positions[0] * inner)
            # Of several rows of one sample, the positions follow each other.
            split: Tensor = strip.unflatten(0, (self.shape[0], self.rows))
            yield split.movedim(1, 3).flatten(3)

    def strip_sizes(self) -> tuple[int, int]:
        """How many strips there are, and how many elements of a sample are copied for them."""
        places, *others = self.window.kernel
        lines = math.prod(self._lines())
        channels = self.source.shape[1]
        return places, self.rows * channels * math.prod(others) * lines * math.prod(self.positions[1:])

    def _lines(self) -> tuple[int, int]:
        """How often the stride fits into the padded source, from the first line read to the last; and the stride."""
        step = self.window.stride[0]
        return -(-self.window.extents(self.positions)[0] // step), step

    def _unfolded_but_first(self, channels_last: bool) -> Tensor:
        """``[R, G, D / K, stride, *]``: the lines of the padded source that one strip reads follow each other."""
        window, n = self.window, len(self.window.kernel)
        lines, step = self._lines()
        extents = lines * step, *window.extents(self.positions)[1:]
        padded = self._padded_groups(extents, channels_last)
        views: Tensor = padded.unflatten(3, (lines, step))  # [R, G, C / G, lines, step, *size]
        for i in range(1, n):
            reach = (window.kernel[i] - 1) * window.dilation[i] + 1
            views = views.unfold(4 + i, reach, window.stride[i])[..., :: window.dilation[i]]
            views = views.narrow(4 + i, 0, self.positions[i])
        # Now [R, G, C / G, lines, step, *positions, *kernel], both without their first.
        lines_first, elements = (4, 3, *range(5, 4 + n)), range(4 + n, 3 + 2 * n)
        if channels_last:
            rows = views.permute(0, 1, *lines_first, *elements, 2).flatten(3 + n).flatten(3, 2 + n)
            return rows.movedim(4, 2)
        return views.permute(0, 1, 2, *elements, *lines_first).flatten(2, 1 + n).flatten(4)

    def _padded_groups(self, extents: Sequence[int], channels_last: bool) -> Tensor:
        """The padded source, ``[R, G, C / G, *extents]``, with the channels next to each other in memory if asked."""
        rows, channels = self.source.shape[0], self.source.shape[1] // self.groups
        if not channels_last:
            views: Tensor = pad_to(self.source, self.window, extents).unflatten(1, (self.groups, channels))
            return views
        padded = self.source.new_zeros(rows, self.groups, *extents, channels).movedim(-1, 2)
        inside, source = padded, self.source.unflatten(1, (self.groups, channels))
        for i, (front, extent) in enumerate(zip(self.window.padding, extents, strict=True)):
            length = max(0, min(source.shape[3 + i], extent - front))
            inside, source = inside.narrow(3 + i, min(front, extent), length), source.narrow(3 + i, 0, length)
        inside.copy_(source)
        return padded

    def per_sample(self) -> Tensor:
        """View the source as ``[N, rows, C, *size]``."""
        return self.source.reshape(self.shape[0], self.rows, *self.source.shape[1:])

    def select(self, index: Tensor) -> "Patches":
        """Take the samples at ``index``: positions along ``N``, or a mask over it."""
        chosen = self.per_sample()[index].flatten(0, 1)
        return Patches(chosen, self.window, self.groups, self.positions, self.rows)

    def regroup(self, k: int) -> "Patches":
        """Make one sample of every ``k`` consecutive ones: ``N / k`` samples with ``k * T`` positions."""
        return Patches(self.source, self.window, self.groups, self.positions, self.rows * k)

    def to(self, dtype: torch.dtype) -> "Patches":
        """Cast the source."""
        return Patches(self.source.to(dtype), self.window, self.groups, self.positions, self.rows)


def unfold(source: Tensor, window: Window, groups: int, positions: tuple[int, ...] | None = None) -> Tensor:
    """Copy every patch that a grouped convolution reads, ``[R, G, D, prod(positions)]``.

    Args:
        source: ``[R, C, *size]``, any strides.
        window: the sliding window, of any number of dimensions.
        groups: ``G``; ``D = C / G * prod(window.kernel)``.
        positions: as in :class:`Patches`.

    Edge cases: empty batch and windows that do not fit (no positions) give empty results. Twice
    differentiable.
    """
    return Patches(source, window, groups, positions).unfold()


def fold(
    patches: Tensor, window: Window, size: Sequence[int], positions: tuple[int, ...] | None = None
) -> Tensor:
    """Add patches back to where they were read from, ``[R, C, *size]``: the adjoint of :func:`unfold`.

    One spatial dimension at a time, so that an n-dimensional kernel costs the sum of its sides in additions
    of slices and not their product.

    Args:
        patches: ``[R, G, D, prod(positions)]``.
        window: the sliding window.
        size: spatial size of the result.
        positions: as in :class:`Patches`.

    Edge cases: elements that no window reads are 0. Twice differentiable.
    """
    n = len(window.kernel)
    positions = window.positions(size) if positions is None else positions
    channels = patches.shape[1] * patches.shape[2] // math.prod(window.kernel)
    folded = patches.reshape(patches.shape[0], channels, *window.kernel, *positions)
    extents = window.extents(positions)
    for i in range(n):
        # The kernel axis of dimension i has become axis 2, and once it is gone its positions are axis n + 1.
        left, length = window.padding[i], max(extents[i], size[i] + 2 * window.padding[i])
        shape = list(folded.shape[:2] + folded.shape[3:])
        shape[n + 1] = length
        padded = folded.new_zeros(shape)
        reach = max(positions[i] - 1, 0) * window.stride[i] + (positions[i] > 0)
        for offset in range(window.kernel[i]):
            start = offset * window.dilation[i]
            where = (slice(None),) * (n + 1) + (slice(start, start + reach, window.stride[i]),)
            padded[where].add_(folded.select(2, offset))
        folded = padded.narrow(n + 1, left, size[i])
    return folded


def same_padding(kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Zeros in front and behind, per dimension, of ``padding="same"``: behind gets the odd one.

    Example:
        >>> same_padding((3, 4), (1, 1))
        ((1, 1), (1, 2))
    """
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)


def _windows(source: Tensor, window: Window, groups: int, positions: Sequence[int]) -> Tensor:
    """View the padded source as ``[R, G, C/G, *kernel, *positions]``: nothing is copied but the padding."""
    n = len(window.kernel)
    views = pad_to(source, window, window.extents(positions))
    for i, (kernel, step, dilation) in enumerate(
        zip(window.kernel, window.stride, window.dilation, strict=True)
    ):
        views = views.unfold(2 + i, (kernel - 1) * dilation + 1, step)[..., ::dilation]
        views = views.narrow(2 + i, 0, positions[i])
    order = (0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))
    views = views.permute(order)
    return views.reshape(views.shape[0], groups, views.shape[1] // groups, *views.shape[2:])


def pad_to(source: Tensor, window: Window, extents: Sequence[int]) -> Tensor:
    """Pad in front as the window says, and behind (or crop) to exactly ``extents`` in each dimension."""
    pads: list[int] = []
    for size, front, extent in zip(source.shape[2:], window.padding, extents, strict=True):
        pads = [front, max(0, extent - front - size), *pads]
    padded = F.pad(source, pads) if any(pads) else source
    for i, extent in enumerate(extents):
        padded = padded.narrow(2 + i, 0, extent)
    return padded
