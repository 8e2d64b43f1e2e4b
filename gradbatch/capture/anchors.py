"""Anchors: where the outputs of a recorded call are in the autograd graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph


@dataclass(eq=False, slots=True)
class Anchor:
    """How the gradient of one output of a call is read off the graph, at the node that carries the record.

    A view is taken at the tensor it is a view of: operations in place on the view (an in-place ReLU behind a layer)
    give the view a new place in the graph, but leave the place of its base.

    An anchor never holds its node: the node holds the anchor, and torch does not collect such a cycle.

    Args:
        index: which output of the layer.
        number: which of the node's outputs.
        shape: shape of the layer's output.
        strides: strides of the layer's output.
        base_shape: shape of the tensor that the node computes.
        base_strides: its strides.
    """

    index: int
    number: int
    shape: torch.Size
    strides: tuple[int, ...]
    base_shape: torch.Size
    base_strides: tuple[int, ...]

    @property
    def is_reshaped(self) -> bool:
        """Whether output and base are the same numbers in row-major order."""
        return _is_contiguous(self.shape, self.strides) and _is_contiguous(self.base_shape, self.base_strides)

    @property
    def is_whole(self) -> bool:
        """Whether the output is the tensor that the node computes."""
        return (self.shape, self.strides) == (self.base_shape, self.base_strides)

    def of_output(self, gradient: Tensor) -> Tensor:
        """A gradient that arrived at the node, in the shape of the layer's output."""
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.is_whole:
            return gradient
        if self.is_reshaped:
            return gradient.reshape(self.shape)
        laid_out = torch.empty_strided(
            self.base_shape, self.base_strides, dtype=gradient.dtype, device=gradient.device
        )
        return laid_out.copy_(gradient).as_strided(self.shape, self.strides)


def anchor(index: int, output: Tensor) -> tuple[Node, Anchor] | None:
    """Where to take the gradient of a layer's output; ``None`` if no gradient flows to it."""
    source, base = output, output._base
    # A view that leaves elements of its base out, or repeats some, has no gradient of its own in the base's.
    if base is not None and _is_rearrangement(output, base):
        source = base
    edge = graph.output_edge(source)
    if edge is None:
        return None
    node, number = edge
    return node, Anchor(index, number, output.shape, output.stride(), source.shape, source.stride())


def _is_rearrangement(view: Tensor, base: Tensor) -> bool:
    """Whether a view shows each element of a gapless base exactly once."""
    return (
        view.numel() == base.numel()
        and view.dtype == base.dtype
        and view.storage_offset() == base.storage_offset()
        and (view.is_contiguous() or _is_gapless(view))
        and (base.is_contiguous() or _is_gapless(base))
        and not view.is_conj()
        and not view.is_neg()
    )


def _is_gapless(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_contiguous(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
