"""What a layer rule is handed: one execution of a layer, with the samples brought to the front.

A rule sees tensors only. It never learns how they were captured, nor which quantity will be computed from what it
yields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradbatch.errors import RuleError


@dataclass(frozen=True)
class SampleLayout:
    """Where the samples lie in a tensor: an axis of ``blocks * N * stride`` rows, owned by ``(row // stride) % N``.

    An ordinary batch axis has ``blocks == stride == 1``. ``reshape(N * T, C)`` puts ``T`` rows of a sample next to
    each other (``stride == T``), a flattened time-major tensor keeps the samples fastest (``blocks == T``).

    Args:
        samples: ``N``.
        axis: the axis that runs over the samples; ``None`` for a single sample without any batch axis.
        stride: rows of one sample that lie next to each other.
    """

    samples: int
    axis: int | None = 0
    stride: int = 1

    def owner(self, size: int) -> Tensor:
        """Sample that each index of an axis of ``size`` rows belongs to, ``[size]``."""
        return torch.arange(size, device="cpu").div(self.stride, rounding_mode="floor") % self.samples

    def fits(self, shape: torch.Size, output: torch.Size) -> bool:
        """Whether a tensor of this shape has the samples where the output has them."""
        if self.axis is None:
            return self.samples == 1
        return self.axis < len(shape) and shape[self.axis] == output[self.axis]

    def rows_per_sample(self, output: torch.Size) -> int:
        """Rows of axis 0 that a sample has in an output of this shape."""
        return int(output[0]) // self.samples if self.samples else 1

    def sample_first(self, tensor: Tensor) -> Tensor:
        """Bring the samples to the front: ``[N, *axes before, rows of a sample (if more than one), *axes after]``."""
        if self.axis is None:
            return tensor.unsqueeze(0)
        if tensor.shape[self.axis] == self.samples:  # one row a sample
            return tensor.movedim(self.axis, 0) if self.axis else tensor
        blocks = tensor.shape[self.axis] // (self.samples * self.stride)
        tensor = tensor.unflatten(self.axis, (blocks, self.samples, self.stride)).movedim(self.axis + 1, 0)
        # Blocks and stride are adjacent again once the samples are gone from between them: one axis of positions.
        return tensor.flatten(self.axis + 1, self.axis + 2)

    def rows_first(self, tensor: Tensor) -> Tensor:
        """Order the rows of axis 0 by sample: ``[N * rows, *rest]``, the rows of a sample next to each other."""
        if self.axis != 0:
            raise RuleError(f"rows can be ordered along axis 0 only, not along axis {self.axis}")
        first = self.sample_first(tensor)
        return first if first.dim() == tensor.dim() else first.flatten(0, 1)


@dataclass(frozen=True)
class RowLayout:
    """Where the samples lie in a tensor when they lie irregularly: each row of its leading axes belongs to one.

    Args:
        index: ``[N, T]``, the rows of each sample among all rows of the leading axes, counted in row-major order;
            -1 fills up the samples that have fewer than ``T``.
        lead: number of leading axes.
    """

    index: Tensor
    lead: int = 1

    @property
    def samples(self) -> int:
        """``N``."""
        return len(self.index)

    def fits(self, shape: torch.Size, output: torch.Size) -> bool:
        """Whether a tensor of this shape has the samples where the output has them."""
        return shape[: self.lead] == output[: self.lead]

    def rows_per_sample(self, output: torch.Size) -> int:
        """Rows that each sample is given, missing ones included."""
        return self.index.shape[1]

    def sample_first(self, tensor: Tensor) -> Tensor:
        """Gather the rows of each sample: ``[N, T, *axes after]``; missing rows are 0, or -1 in integer tensors."""
        rows = tensor.flatten(0, self.lead - 1)
        if not len(rows):
            return rows.new_zeros(*self.index.shape, *rows.shape[1:])
        index = self.index.to(tensor.device)
        missing = (index < 0).view(*index.shape, *(1,) * (rows.dim() - 1))
        whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        return rows[index.clamp_min(0)].masked_fill(missing, -1 if whole else 0)

    def rows_first(self, tensor: Tensor) -> Tensor:
        """The same, ``[N * T, *axes after]``."""
        return self.sample_first(tensor).flatten(0, 1)


Layout = SampleLayout | RowLayout


@dataclass(frozen=True)
class Call:
    """One execution of a layer: its arguments, and the gradient of the summed losses with respect to its output.

    Args:
        module: the layer.
        name: its path in the model, for error messages.
        args: positional arguments of its ``forward``, detached, as they were given (samples anywhere).
        kwargs: keyword arguments of its ``forward``, likewise.
        arguments: both, by the names of ``forward``'s parameters, defaults filled in.
        raw_grad_output: gradient of the output, in the output's own shape; a tuple where ``forward`` returns several.
        layout: where the samples lie in it.
        feature_axes: how many trailing axes of the output belong to the layer's function; ``None`` where the rule
            did not say, and axis 0 must be the sample axis.
        training: the layer's training flag during the forward.
        needs: names of the layer's own parameters whose per-sample gradients are wanted.
        outputs: what ``forward`` returned, detached, in the shapes of ``raw_grad_output``. Empty unless the rule said
            that it reads them, and where the user has changed one in place since: a rule must do without.
        kept: by parameter, what the kernel that it went into keeps for its own backward, by torch's name. Mostly empty.
    """

    module: Any  # an nn.Module; typed so that a rule can read the attributes of its own layer
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    raw_grad_output: Any
    layout: Layout
    feature_axes: int | None
    training: bool
    needs: frozenset[str]
    outputs: tuple[Tensor, ...] = ()
    kept: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """``N``: what the per-sample gradients that the rule yields are indexed by, times :attr:`rows_per_sample`."""
        return self.layout.samples

    @property
    def device(self) -> torch.device:
        """Where the output is."""
        return self._first_grad_output.device

    @property
    def rows_per_sample(self) -> int:
        """Rows of axis 0 that belong to one sample; more than 1 only where the rule left ``feature_axes`` out.

        Such a rule yields one gradient a row, and gradbatch adds up the rows of each sample.
        """
        if self.feature_axes is not None:
            return 1
        return self.layout.rows_per_sample(self._first_grad_output.shape)

    @property
    def input(self) -> Tensor:
        """The first argument of ``forward``, samples first: ``[N, *positions, *features]``, or ``[rows, ...]``."""
        first: Tensor = next(iter(self.arguments.values()))
        return self.sample_first(first)

    @property
    def grad_output(self) -> Any:
        """Gradient of the output, samples first like :attr:`input`; a tuple where ``forward`` returns several."""
        if isinstance(self.raw_grad_output, tuple):
            return tuple(self.sample_first(grad) for grad in self.raw_grad_output)
        return self.sample_first(self.raw_grad_output)

    def sample_first(self, tensor: Tensor) -> Tensor:
        """Bring the samples of an argument to the front, as they are in :attr:`grad_output`.

        Args:
            tensor: an argument whose leading axes are those of the layer's output.

        Raises:
            RuleError: the tensor has no axis of that size where the samples lie.
        """
        output = self._first_grad_output.shape
        if not self.layout.fits(tensor.shape, output):
            axis = self.layout.axis if isinstance(self.layout, SampleLayout) else 0
            raise RuleError(
                f"{self.name} ({type(self.module).__name__}): an argument of shape {tuple(tensor.shape)} has no sample "
                f"axis like the one of the output {tuple(output)} (axis {axis}, {self.num_samples} samples). Give the "
                "layer an input whose leading axes are those of its output"
            )
        return (
            self.layout.rows_first(tensor) if self.feature_axes is None else self.layout.sample_first(tensor)
        )

    @property
    def _first_grad_output(self) -> Tensor:
        grad = self.raw_grad_output
        first: Tensor = grad[0] if isinstance(grad, tuple) else grad
        return first
