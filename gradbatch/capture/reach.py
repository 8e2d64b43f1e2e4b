"""Reach: which sample's loss an element of a gradient can depend on, found without looking at the gradient.

Where a gradient is not finite, no measurement tells whose it is, and where a sample has none, none tells what could be
its own. So the samples are followed from the losses down, node by node, for the graph and the data at hand. Operations
element by element, and those known to keep an axis apart, are followed by what they are. Any other node is called on
positive random numbers in the elements of some of the samples, and what comes out as zero does not depend on them. Not
the numbers that come out are handed on, only where they are, so that neither a zero nor what is not finite gets from
one node to the next. An element that is taken to depend on more samples than it does does no harm: it is refused, or
asked further up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph, paths
from gradbatch.capture.axes import acts_on_elements, axis_in_input, is_followed
from gradbatch.capture.elements import (
    NOBODY,
    SEVERAL,
    Masks,
    along,
    intersection,
    of_all,
    of_lines,
    of_operand,
    owners_in,
    place_in,
    traced,
    union,
)
from gradbatch.capture.graph import Place
from gradbatch.capture.propagation import Run, consumers_first
from gradbatch.capture.readings import RESHAPING, TRANSPOSING


def _named(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward" for name in names.split())


# Where these put an element is no matter of other numbers, so that a zero of theirs is none of a factor. The last two
# do multiply, but each factor is one element's, or what several samples share is parameters below and finite.
MOVING = TRANSPOSING | _named(
    """Index IndexSelect Gather Take MaskedSelect MaskedScatter Scatter ScatterAdd IndexPut IndexAdd
    IndexCopy IndexFill Select Slice Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind Cat Stack Repeat
    RepeatInterleave Roll Flip Rot90 AsStrided Unfold Im2Col Col2Im Diagonal ConstantPadNd Sort Topk Sum Mean Cumsum
    Kthvalue Median Max Min SelectScatter SliceScatter Tril Triu PackPaddedSequence EmbeddingBag"""
)
MOVING |= {"CopySlices"}
# Of these, those that take sums of numbers as they are.
PLACING = MOVING - _named("Mean EmbeddingBag")
# These put others in the place of some elements of their first operand.
OVERWRITING = {"CopySlices"} | _named(
    "IndexPut IndexCopy IndexFill Scatter MaskedScatter SelectScatter SliceScatter"
)
# A zero of these keeps samples apart (a mask of other samples' rows, an adjacency matrix); one of any other operation
# may be a sample's own, or the weight of its loss.
SEPARATING = _named(
    """Mm Addmm Bmm Baddbmm Mv Addmv Dot Trilinear Convolution MkldnnConvolution CudnnConvolution Softmax SafeSoftmax
    ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
    ScaledDotProductCudnnAttention"""
)
# A zero of these is an element's own: nobody masks others out with them.
ACTIVATING = _named(
    """Relu Threshold LeakyRelu Elu Gelu Silu Mish Hardtanh Hardswish Hardsigmoid Softshrink Hardshrink Sigmoid
    LogSigmoid Softplus Tanh Clamp ClampMin ClampMax Abs Sin Cos Erf LogSoftmax NllLoss NllLoss2D MseLoss HuberLoss
    SmoothL1Loss BinaryCrossEntropy BinaryCrossEntropyWithLogits"""
)


@dataclass(frozen=True)
class Reach:
    """How the samples are followed through a graph.

    Args:
        walk: the graph.
        samples: ``N``.
        implied: where they are known to lie.
        by_value: whether a factor of zero ends a sample's way. If none does, some may be followed to where they never
            come.
        revives: where a node puts an end to all that there is of a sample, or an activation to any of it, that is
            followed as if no factor were zero. What nothing is known of is called.
    """

    walk: graph.Walk
    samples: int
    implied: Mapping[Place, Run] = field(default_factory=dict)
    by_value: bool = False
    revives: bool = False

    def owners(self, roots: Mapping[Place, Tensor], places: Collection[Place]) -> dict[Place, Tensor]:
        """Which sample each element of some gradients depends on.

        Args:
            roots: the sample of each element of the losses or outputs.
            places: nodes' outputs; what comes to none of their elements is left out of the result.
        """
        # A checkpointed region gives out what it saved once a pass.
        return graph.in_a_pass_of_its_own(lambda: dict(self._followed(roots, set(places))))

    def _followed(self, roots: Mapping[Place, Tensor], places: set[Place]) -> Iterator[tuple[Place, Tensor]]:
        arrived: dict[Node, dict[int, Tensor]] = {}
        for (node, number), owner in roots.items():
            arrived.setdefault(node, {})[number] = owner
        wanted = {node for node, _ in places}
        above = wanted | paths.above(wanted, self.walk)
        for node in consumers_first(self.walk):
            if node not in above:
                continue
            owners, shapes = arrived.pop(node, {}), graph.shapes(node)
            slots = [
                slot
                for slot, place in enumerate(graph.below(node))
                if place[0] in above and place not in self.implied
            ]
            for number, shape in enumerate(shapes):
                run = self.implied.get((node, number))
                if run is not None and (slots or (node, number) in places):
                    owners[number] = run.owners(shape, self.samples, graph.device(node, number))
            yield from (((node, n), owner) for n, owner in owners.items() if (node, n) in places)
            if not slots or not owners:
                continue
            for slot, owner in self._through(node, owners, slots).items():
                below, number = graph.below(node)[slot]
                assert below is not None
                others = arrived.setdefault(below, {})
                others[number] = union(others[number], owner) if number in others else owner

    def _through(self, node: Node, owners: Mapping[int, Tensor], slots: Sequence[int]) -> dict[int, Tensor]:
        """Whose the elements of some inputs are; left out where they are nobody's."""
        kind = graph.kind(node)
        if kind in PLACING and (placed := _placed(node, owners, slots)) is not None:
            if self.revives:
                _revive(node, owners, placed)
            return placed
        found = _by_axes(node, owners, slots)
        by_value = self.by_value and not (self.revives and kind in ACTIVATING)
        called = by_value or kind in MOVING or (self.revives and not is_followed(node))
        if kind in RESHAPING or not called:
            return found
        reached = partial(_reached, node, slots)
        if any(bool((owner == SEVERAL).any()) for owner in found.values()):
            told = traced(owners, reached)
        else:
            some = reached({n: owner != NOBODY for n, owner in owners.items()})
            told = {slot: torch.where(mask, SEVERAL, NOBODY) for slot, mask in some.items()}
        found = {slot: intersection(owner, told[slot]) for slot, owner in found.items() if slot in told}
        if self.revives and found:
            _revive(node, owners, found)
        return found


def owners_by_reach(
    walk: graph.Walk,
    samples: int,
    implied: Mapping[Place, Run],
    roots: Mapping[Place, Tensor],
    places: Collection[Place],
) -> dict[Place, Tensor]:
    """The one sample whose loss reaches each element of some gradients, where they need not be finite.

    The arguments are those of :class:`Reach` and :meth:`Reach.owners`.

    A factor of zero keeps a loss from reaching an element, but not what is not finite: zero times NaN is NaN. So an
    element is a sample's only if no other's would reach it if no factor were zero, and nobody's if none reaches it.
    """
    alike = Reach(walk, samples, implied).owners(roots, places)
    if not any(bool((owner == SEVERAL).any()) for owner in alike.values()):
        return alike
    everybody = {place: torch.zeros_like(owner) for place, owner in roots.items()}
    some = Reach(walk, samples, by_value=True).owners(everybody, places)
    nobody = {place: owner == NOBODY for place, owner in some.items()}
    return {
        place: owner.masked_fill((owner == SEVERAL) & nobody.get(place, True), NOBODY)
        for place, owner in alike.items()
    }


def _revive(node: Node, owners: Mapping[int, Tensor], found: dict[int, Tensor]) -> None:
    """Add those of whom a node leaves nothing, as if no factor were zero and nothing overwritten."""
    kind, shape = graph.kind(node), graph.shapes(node)[0]
    if kind in SEPARATING or (kind in MOVING and kind not in OVERWRITING):
        return
    before, after = owners_in(owners.values()), owners_in(found.values())
    lost = before[~torch.isin(before, after)]
    if not len(lost):
        return
    ended = {n: owner.where(torch.isin(owner, lost), NOBODY) for n, owner in owners.items()}
    if is_followed(node) and kind not in OVERWRITING:
        revived = _by_axes(node, ended, list(found))
    else:
        # An element overwritten is in its place. And where nothing is known of a node that keeps the shape, it most
        # likely acts on elements.
        slots = [slot for slot in found if slot == 0 or kind not in OVERWRITING]
        revived = {slot: ended[0] for slot in slots if 0 in ended and graph.input_shape(node, slot) == shape}
    found.update((slot, union(found[slot], owner)) for slot, owner in revived.items())


def _by_axes(node: Node, owners: Mapping[int, Tensor], slots: Sequence[int]) -> dict[int, Tensor]:
    """Whose the elements of some inputs can be by what the operation is, as if no factor were zero."""
    shapes = {slot: graph.input_shape(node, slot) for slot in slots}
    if list(owners) == [0] and (graph.kind(node) in RESHAPING or acts_on_elements(node)):
        return {slot: of_operand(owners[0], shape) for slot, shape in shapes.items()}
    return {slot: kept_apart(node, owners, slot, shape) for slot, shape in shapes.items()}


def kept_apart(node: Node, owners: Mapping[int, Tensor], slot: int, below: torch.Size) -> Tensor:
    """Whose an input's elements can be, by the axes that the operation keeps apart.

    Args:
        node: the operation.
        owners: maps of its outputs, by number; what is missing is nobody's.
        slot: of the input.
        below: shape of the input.
    """
    alone = of_all(owners.values())
    result = alone.expand(below)
    if alone != SEVERAL and all(bool((owner == alone).all()) for owner in owners.values()):
        return result
    sizes = {owner.dim() for owner in owners.values()}
    for axis in range(sizes.pop()) if len(sizes) == 1 else ():
        to = {axis_in_input(node, axis, owner.shape, slot, below) for owner in owners.values()}
        place = to.pop()
        if not to and place is not None and all(o.shape[axis] == below[place] for o in owners.values()):
            line = reduce(union, [of_lines(owner, axis) for owner in owners.values()])
            if not bool((line == SEVERAL).all()):
                result = intersection(result, along(line, place, below))
    groups = 1
    with suppress(AttributeError):  # not shown by this version of torch
        groups = graph.saved(node, "groups") if graph.kind(node) == "ConvolutionBackward" else 1
    if groups > 1:
        # Each group of channels has its own weights, which lie on the first axis.
        group = of_lines(owners[0].movedim(1, 0).reshape(groups, -1), 0)
        place = 1 if slot == 0 else 0
        line = group.repeat_interleave(below[place] // groups)
        result = intersection(result, along(line, place, below))
    return result


def _placed(node: Node, owners: Mapping[int, Tensor], slots: Sequence[int]) -> dict[int, Tensor] | None:
    """Whose the elements of some inputs are, by calling a node on the samples' numbers; ``None`` if it adds some up."""
    samples = owners_in(owners.values())
    samples = samples[samples != SEVERAL]
    # From 1 in order, since not every dtype has large numbers; what is several samples' comes last.
    known = torch.cat([samples, samples.new_tensor([SEVERAL])])
    numbers = {n: (place_in(known, owner) + 1) % (len(known) + 1) for n, owner in owners.items()}
    dtypes = [graph.outputs(node)[n][1] for n in owners]
    if not all(d.is_floating_point and len(known) * torch.finfo(d).eps < 1 for d in dtypes):
        return None
    count = _called(node, {n: number > 0 for n, number in numbers.items()})
    found = _called(node, numbers)
    if count is None or found is None:
        return None
    result = {}
    for slot in slots:
        times, number = count[slot], found[slot]
        if times is None or number is None:
            continue
        if times.is_sparse or times.shape != graph.input_shape(node, slot) or not _are_flags(times):
            return None
        place = number.long() - 1
        result[slot] = known[place.clamp_min(0)].masked_fill(place < 0, NOBODY)
    return result


def _are_flags(numbers: Tensor) -> bool:
    return bool(((numbers == 0) | (numbers == 1)).all())


def _reached(node: Node, slots: Sequence[int], masks: Masks) -> Masks:
    """Elements of some inputs whose gradient depends on some elements of the outputs', by calling the node."""
    values = {}
    for number, mask in masks.items():
        generator = torch.Generator(mask.device).manual_seed(number)
        values[number] = (1 + torch.rand(mask.shape, generator=generator, device=mask.device)) * mask
    found = _called(node, values)
    like = next(iter(masks.values()))
    return {slot: _not_zero(found, slot, graph.input_shape(node, slot), like) for slot in slots}


def _called(node: Node, values: Mapping[int, Tensor]) -> Sequence[Tensor | None] | None:
    """What a node makes of gradients of some outputs; ``None`` if it fails."""
    gradients = [
        values[number].to(dtype) if number in values else None
        for number, (_, dtype) in enumerate(graph.outputs(node))
    ]
    call = partial(graph.apply, node, gradients)
    with torch.no_grad(), suppress(Exception):
        return call()
    # What is checkpointed is given out once in a pass; whatever else it is, the node is taken to mix everything.
    with torch.no_grad(), suppress(Exception):
        return graph.in_a_pass_of_its_own(call)
    return None


def _not_zero(called: Sequence[Tensor | None] | None, slot: int, shape: torch.Size, like: Tensor) -> Tensor:
    """The elements of an input in which something came out, or nobody knows what."""
    if called is None:
        return like.new_ones(shape)
    found = called[slot]
    if found is None:
        return like.new_zeros(shape)
    mask = (found.to_dense() if found.is_sparse else found) != 0
    return of_operand(mask.long() - 1, shape) != NOBODY
