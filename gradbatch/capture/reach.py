"""Reach: which samples an element of a gradient can belong to, found without looking at the gradient.

Where a gradient is not finite, no measurement tells whose it is: NaN times any weight is NaN. So the samples are
followed from the losses down, node by node, for the graph and the data at hand. Operations element by element, and
those known to keep an axis apart, are followed by what they are. Any other node is called on positive random numbers in
the elements of some of the samples, and what comes out as zero does not depend on them. Not the numbers that come out
are handed on, only where they are, so that nothing non-finite gets from one node to the next. An element that is
taken to depend on more samples than it does does no harm: it is refused, or asked further up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.axes import acts_on_elements, axis_in_input
from gradbatch.capture.graph import Place
from gradbatch.capture.propagation import consumers_first
from gradbatch.capture.readings import RESHAPING, TRANSPOSING

NOBODY = -1
# Where these put an element is no matter of other numbers, so that a zero of theirs is none of a factor. The last two
# do multiply, but each factor is one element's, or what several samples share is parameters below and finite.
MOVING = TRANSPOSING | frozenset(
    f"{name}Backward"
    for name in """Index IndexSelect Gather Take MaskedSelect MaskedScatter Scatter ScatterAdd IndexPut IndexAdd
    IndexCopy IndexFill Select Slice Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Unbind Cat Stack Repeat
    RepeatInterleave Roll Flip Rot90 AsStrided Unfold Im2Col Col2Im Diagonal ConstantPadNd Sort Topk Sum Mean Cumsum
    Kthvalue Median Max Min SelectScatter SliceScatter Tril Triu PackPaddedSequence""".split()  # noqa: SIM905
)
MOVING |= {"EmbeddingBagBackward", "CopySlices"}


def owners_by_reach(
    walk: graph.Walk, roots: Mapping[Place, Tensor], places: Collection[Place], samples: int
) -> dict[Place, Tensor]:
    """The one sample whose loss reaches each element of some gradients.

    Args:
        walk: the graph.
        roots: the sample of each element of the losses or outputs.
        places: nodes' outputs.
        samples: ``N``.

    Returns:
        For each place the sample, in the gradient's shape; -1 where none reaches it, ``N`` where several may.

    A factor of zero keeps a loss from reaching an element, but not what is not finite: zero times NaN is NaN. So an
    element is a sample's only if no other's would reach it if no factor were zero. What none reaches, and one would, is
    that one's.
    """
    exact = _decoded(walk, roots, places, samples, True)
    alike = _decoded(walk, roots, places, samples, False)
    return {place: _joined(owner, alike[place], samples) for place, owner in exact.items()}


def _joined(exact: Tensor, alike: Tensor, samples: int) -> Tensor:
    single = (alike < samples) & ((exact == alike) | (exact == NOBODY))
    return torch.where(single, alike, torch.where(exact == NOBODY, exact, samples))


def _decoded(
    walk: graph.Walk,
    roots: Mapping[Place, Tensor],
    places: Collection[Place],
    samples: int,
    by_value: bool,
) -> dict[Place, Tensor]:
    """The same by value, or as if no factor were zero."""
    number: dict[Place, Tensor] = {}
    several: dict[Place, Tensor] = {}
    nobody: dict[Place, Tensor] = {}
    # The digits of the samples' numbers in base 2: whose number has the digit, and whose has not.
    for bit in range(max(1, (samples - 1).bit_length())):
        sets = {place: (owner >> bit) & 1 == 1 for place, owner in roots.items()}
        ones = _in_a_pass(walk, sets, places, by_value)
        zeros = _in_a_pass(walk, {place: ~mask for place, mask in sets.items()}, places, by_value)
        for place, one in ones.items():
            zero = zeros[place]
            empty = torch.zeros_like(one)
            number[place] = number.get(place, empty.long()) + (one.long() << bit)
            several[place] = several.get(place, empty) | one & zero
            nobody[place] = nobody.get(place, empty) | ~(one | zero)
    return {
        place: found.masked_fill(nobody[place], NOBODY).masked_fill(
            several[place] | (found >= samples), samples
        )
        for place, found in number.items()
    }


def _in_a_pass(
    walk: graph.Walk, roots: Mapping[Place, Tensor], places: Collection[Place], by_value: bool
) -> dict[Place, Tensor]:
    """What some elements of the losses reach; a checkpointed region gives out what it saved once a pass."""
    return graph.in_a_pass_of_its_own(lambda: dict(_reached(walk, roots, places, by_value)))


def _reached(
    walk: graph.Walk, roots: Mapping[Place, Tensor], places: Collection[Place], by_value: bool
) -> Iterator[tuple[Place, Tensor]]:
    """The elements that some elements of the losses reach, by place."""
    reached: dict[Node, dict[int, Tensor]] = {}
    for (node, number), mask in roots.items():
        reached.setdefault(node, {})[number] = mask
    wanted = set(places)
    for node in consumers_first(walk):
        masks = reached.pop(node, {})
        for number, mask in masks.items():
            if (node, number) in wanted:
                yield (node, number), mask
        if not masks or graph.accumulated_variable(node) is not None:
            continue
        for slot, mask in _through(node, masks, by_value).items():
            below, number = graph.below(node)[slot]
            assert below is not None
            others = reached.setdefault(below, {})
            others[number] = others[number] | mask if number in others else mask


def _through(node: Node, masks: Mapping[int, Tensor], by_value: bool) -> dict[int, Tensor]:
    """The elements of each input whose gradient depends on some elements of the outputs'."""
    slots = [slot for slot, (below, _) in enumerate(graph.below(node)) if below is not None]
    shapes = {slot: graph.input_shape(node, slot) for slot in slots}
    kind, alone = graph.kind(node), masks[0] if list(masks) == [0] else None
    if kind in RESHAPING and alone is not None:
        return {slot: alone.reshape(shape) for slot, shape in shapes.items()}
    on_elements = acts_on_elements(node) and alone is not None
    called = _called(node, masks) if by_value or kind in MOVING else None
    result = {}
    for slot, shape in shapes.items():
        apart = _any_to(masks[0], shape) if on_elements else kept_apart(node, masks, slot, shape)
        result[slot] = apart & _not_zero(called, slot, apart)
    return result


def _any_to(mask: Tensor, shape: torch.Size) -> Tensor:
    """Undo broadcasting: an element is reached if one of those that it was broadcast to is."""
    try:
        return mask.sum_to_size(shape) > 0
    except RuntimeError:  # it is broadcast in another way
        return mask.any().expand(shape)


def kept_apart(node: Node, masks: Mapping[int, Tensor], slot: int, below: torch.Size) -> Tensor:
    """An input's elements that may depend on some of the outputs', by the axes that the operation keeps apart."""
    result = next(iter(masks.values())).new_ones(below)
    sizes = {mask.dim() for mask in masks.values()}
    for axis in range(sizes.pop()) if len(sizes) == 1 else ():
        lines = [mask.movedim(axis, 0).unsqueeze(-1).flatten(1).any(1) for mask in masks.values()]
        to = {axis_in_input(node, axis, mask.shape, slot, below) for mask in masks.values()}
        place = to.pop()
        if not to and place is not None and all(len(line) == below[place] for line in lines):
            result &= _along(torch.stack(lines).any(0), place, below)
    groups = 1
    with suppress(AttributeError):  # not shown by this version of torch
        groups = graph.saved(node, "groups") if graph.kind(node) == "ConvolutionBackward" else 1
    if groups > 1:
        # Each group of channels has its own weights, which lie on the first axis.
        group = masks[0].movedim(1, 0).reshape(groups, -1).any(1)
        place = 1 if slot == 0 else 0
        result &= _along(group.repeat_interleave(below[place] // groups), place, below)
    return result


def _along(line: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """A mask of one axis, as one of a whole tensor."""
    return line.view(-1, *(1,) * (len(shape) - axis - 1))


def _called(node: Node, masks: Mapping[int, Tensor]) -> Sequence[Tensor | None] | None:
    """What a node makes of random numbers in some elements of its outputs' gradients; ``None`` if it fails."""
    gradients: list[Tensor | None] = []
    for number, (_, dtype) in enumerate(graph.outputs(node)):
        mask = masks.get(number)
        if mask is None:
            gradients.append(None)
            continue
        generator = torch.Generator(mask.device).manual_seed(number)
        numbers = 1 + torch.rand(mask.shape, generator=generator, device=mask.device)
        gradients.append(numbers.to(dtype) * mask)
    try:
        with torch.no_grad():
            return graph.apply(node, gradients)
    except Exception:  # whatever it is: the node says nothing, and is taken to mix everything
        return None


def _not_zero(called: Sequence[Tensor | None] | None, slot: int, mask: Tensor) -> Tensor:
    """The elements of an input in which something came out, or nobody knows what."""
    if called is None:
        return torch.ones_like(mask)
    found = called[slot]
    if found is None:
        return torch.zeros_like(mask)
    return _any_to((found.to_dense() if found.is_sparse else found) != 0, mask.shape)
