"""The shared region: what the forward computed from parameters alone, before any sample came in.

A view or a cast of a parameter, a weight put together by ``weight_norm`` or LoRA, a positional table behind a
projection: all samples share such a value, and the gradient with respect to it does not tell them apart. So the
samples' gradients are taken where the region's values meet the samples (the cuts, see :mod:`gradbatch.capture.nodes`),
and pulled back through the region once, for all samples together. Views keep the structure of the gradients, everything
else makes them dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.nodes import wrapped
from gradbatch.capture.readings import RESHAPING, TRANSPOSING
from gradbatch.factors import Blocks, PerSampleGrad, RowScatter
from gradbatch.factors.views import permuted, reshaped
from gradbatch.rules.broadcast import total_to

# Operations on one tensor that bring no data in: what they make of a parameter is the parameter's alone.
# What these make of a tensor are parts of it.
PARTING = frozenset(f"{name}Backward" for name in "Select Slice Split SplitWithSizes Unbind".split())  # noqa: SIM905
UNARY = (
    RESHAPING
    | TRANSPOSING
    | PARTING
    | frozenset(
        f"{name}Backward"
        for name in """Diagonal Flip Roll Neg Exp Log Log1P Expm1 Softplus
    Sigmoid LogSigmoid Tanh Softmax LogSoftmax Sqrt Rsqrt Reciprocal Abs Relu Silu Gelu Elu Sum Mean LinalgVectorNorm
    Norm Var Std VarMean Tril Triu ViewAsComplex ViewAsReal AsStrided WeightNormInterface LinalgMatrixExp LinalgQr
    LinalgInvEx Sin Cos Sgn Sign""".split()  # noqa: SIM905
    )
)
# Operations on several tensors that bring in none but their operands, all of which can be seen in the graph.
COMBINING = frozenset(
    f"{name}Backward"
    for name in "Add Sub Mul Div Mm Bmm Mv Dot Addmm Cat Stack LinalgSolveEx Maximum Minimum Lerp".split()  # noqa: SIM905
)

# torch has no batched kernel for these, and warns of it.
UNBATCHED = frozenset({"WeightNormInterfaceBackward", "LinalgHouseholderProductBackward"})


def grows_by_structure(node: Node, shared: Collection[Node]) -> bool:
    """Whether a node is certain to compute its output from parameters alone.

    Args:
        node: a consumer of a parameter or of something shared.
        shared: nodes that are known to, and accumulators of parameters.
    """
    kind = graph.kind(node)
    if kind in UNARY:
        return all(below is None or below in shared for below, _ in graph.below(node))
    if kind in ("NativeBatchNormBackward", "CudnnBatchNormBackward"):
        # A normalised weight, even where one sample alone has a gradient and seems to own it.
        with suppress(AttributeError):
            inputs = [below for below, _ in graph.below(node)]
            if inputs[1] is not None or graph.saved(node, "weight") is None:
                return inputs[0] in shared and all(i is None or i in shared for i in inputs)
        return False
    # Without an operand that the graph does not show, which could be data.
    return kind in COMBINING and all(below is not None and below in shared for below, _ in graph.below(node))


def order_of(nodes: Sequence[Node]) -> list[Node]:
    """The nodes of a region, each before all that lies below it."""
    order: list[Node] = []
    region = set(nodes)
    visited: set[Node] = set()
    pending = [(node, False) for node in nodes]
    while pending:
        node, done = pending.pop()
        if done:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            pending.append((node, True))
            pending += [
                (below, False) for below, _ in graph.below(node) if below is not None and below in region
            ]
    return order[::-1]


Received = dict[int, PerSampleGrad | Tensor]
"""Gradients with respect to the outputs of a node, by output; of complex ones the values ``[N, *shape]``."""


def pull_back(
    node: Node, received: Received, wanted: Callable[[Node], bool]
) -> Iterator[tuple[int, PerSampleGrad | Tensor]]:
    """From gradients of what a shared node computed to gradients of what it computed that from.

    Args:
        node: in the shared region.
        received: with respect to its outputs; at least one.
        wanted: whether the gradients with respect to the outputs of a node below are wanted.

    Yields:
        Places in ``graph.below``, with the gradients with respect to these inputs.
    """
    slots = [slot for slot, (below, _) in enumerate(graph.below(node)) if below is not None and wanted(below)]
    kind = graph.kind(node)
    if slots == [0] and not any(isinstance(grad, Tensor) for grad in received.values()):
        structured = _structured(node, kind, cast("dict[int, PerSampleGrad]", received))
        if structured is not None:
            yield 0, structured
            return
    given = {i: grad.dense() if isinstance(grad, PerSampleGrad) else grad for i, grad in received.items()}
    samples = len(next(iter(given.values())))
    outputs = graph.outputs(node)
    gradients = [given[i].to(dtype) if i in given else None for i, (_, dtype) in enumerate(outputs)]
    for slot, values in zip(slots, _batched(node, gradients, slots, samples), strict=True):
        if values is not None:
            yield slot, wrapped(values, node, slot)


def _structured(node: Node, kind: str, received: dict[int, PerSampleGrad]) -> PerSampleGrad | None:
    """Gradients through a node that keeps their structure; ``None`` if it does not."""
    below = graph.input_shape(node, 0)
    with suppress(AttributeError):  # what this version of torch does not show takes the general way
        if kind in PARTING:
            return _joined(received, _beginnings(node, kind, below), below)
        if list(received) != [0]:
            return None
        grad = received[0]
        if kind in RESHAPING:
            return reshaped(grad, below)
        if kind == "TBackward":
            return permuted(grad, range(len(below))[::-1])
        if kind == "TransposeBackward":
            axes = list(range(len(below)))
            first, second = (_axis(graph.saved(node, name), len(below)) for name in ("dim0", "dim1"))
            axes[first], axes[second] = second, first
            return permuted(grad, axes)
        if kind == "PermuteBackward":
            order = [_axis(axis, len(below)) for axis in graph.saved(node, "dims")]
            return permuted(grad, [order.index(axis) for axis in range(len(below))])
        if kind == "EmbeddingBackward" and not graph.saved(node, "scale_grad_by_freq"):
            ids, padding = graph.saved(node, "indices").reshape(-1), graph.saved(node, "padding_idx")
            values = grad.dense().reshape(grad.num_samples, -1, below[1])
            ids = ids.long().masked_fill(ids == padding, -1) if padding < 2**62 else ids.long()
            return RowScatter(ids.expand(grad.num_samples, -1), values, below)
    return None


def _beginnings(node: Node, kind: str, below: torch.Size) -> list[int] | None:
    """Which element of the input each output begins with; ``None`` if the others do not follow one by one."""
    axis = _axis(graph.saved(node, "dim"), len(below))
    if math.prod(below[:axis]) != 1:
        return None
    row = math.prod(below[axis + 1 :])
    if kind == "SelectBackward":
        return [_axis(graph.saved(node, "index"), below[axis]) * row]
    if kind == "SliceBackward":
        start = slice(_signed(graph.saved(node, "start") or 0), None).indices(below[axis])[0]
        return [start * row] if graph.saved(node, "step") == 1 else None
    sizes = [math.prod(shape) for shape, _ in graph.outputs(node)]
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _joined(
    received: dict[int, PerSampleGrad], beginnings: Sequence[int] | None, below: torch.Size
) -> PerSampleGrad | None:
    """Gradients of parts as those of the whole, if it is known where they begin."""
    if beginnings is None:
        return None
    blocks = {beginnings[number]: grad for number, grad in received.items() if math.prod(grad.shape)}
    whole = [grad for grad in blocks.values() if math.prod(grad.shape) == math.prod(below)]
    if whole:
        return reshaped(whole[0], below)
    return Blocks(blocks, below) if blocks else None


def _axis(saved: int, dim: int) -> int:
    """An axis or an index along one as it was saved, counted from the front."""
    return _signed(saved) % dim


def _signed(saved: int) -> int:
    """A number as it was saved, negative ones wrapped around an unsigned number."""
    return saved - 2**64 if saved >= 2**63 else saved


def _batched(
    node: Node, gradients: Sequence[Tensor | None], slots: Sequence[int], samples: int
) -> Iterable[Tensor | None]:
    """Call a node on the gradients of all samples at once, or of one after another where it cannot do that."""
    shapes = [graph.input_shape(node, slot) for slot in slots]
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]

    def one(*values: Tensor) -> tuple[Tensor | None, ...]:
        filled: list[Tensor | None] = [None] * len(gradients)
        for i, value in zip(present, values, strict=True):
            filled[i] = value
        found = graph.apply(node, filled)
        return tuple(_finished(found[slot], shape) for slot, shape in zip(slots, shapes, strict=True))

    given = [gradient for gradient in gradients if gradient is not None]
    if not samples:
        return [given[0].new_zeros(0, *shape) for shape in shapes]
    try:
        if graph.kind(node) in UNBATCHED:
            raise NotImplementedError
        return torch.vmap(one)(*given)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, UserWarning):
        # Each call by itself: checkpointing hands out what the node saved once in a pass.
        of_samples = [[gradient[n].clone() for gradient in given] for n in range(samples)]
        rows = [graph.in_a_pass_of_its_own(partial(one, *gradients)) for gradients in of_samples]
        return [_stacked(column) for column in zip(*rows, strict=True)]


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return torch.stack(present) if len(present) == len(rows) else None


def _finished(values: Tensor | None, shape: torch.Size) -> Tensor | None:
    """What the engine does behind a node."""
    if values is None:
        return None
    return total_to(values.to_dense() if values.is_sparse else values, shape)
