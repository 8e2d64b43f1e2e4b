"""The node reader: a node of the autograd graph, read as a call of the function that it is the backward of.

How a type of node is read stands in :mod:`gradbatch.capture.readings`. What is not described there, or what this
version of torch does not show, is evaluated by calling the node itself on each sample's part of the output gradient:
exact, local to that one operation, and slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.elements import NOBODY
from gradbatch.capture.layouts import OwnerMap, Owners, Site, element_owners
from gradbatch.capture.reach import kept_apart
from gradbatch.capture.readings import POINTWISE, READINGS, SHIFTS, Reading
from gradbatch.errors import UnsupportedLayer
from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.rules import Call
from gradbatch.rules.broadcast import summed_over_repetitions, summed_to, total_to

# In place of a rule: the node's output is one sample's alone (a table of positions that is resized for each image), so
# that its backward, as it stands, is that sample's.
CALLED_ONCE = "called once"


@dataclass(frozen=True)
class Cut:
    """A node whose output gradients are owned, and some of whose inputs are parameters or computed from them alone.

    Args:
        node: the node.
        slots: places of those inputs in ``next_functions``.
        owners: where the samples lie in the gradient of each output.
        name: of the layer that it belongs to, for messages.
    """

    node: Node
    slots: tuple[int, ...]
    owners: Mapping[int, Owners]
    name: str


def contributions(
    cut: Cut, gradients: Mapping[int, Tensor | None], samples: int
) -> Iterator[tuple[int, PerSampleGrad | Tensor, str]]:
    """What each sample's loss sends along the edges of a cut.

    Args:
        cut: the node.
        gradients: of its outputs; ``None`` or missing where none arrived.
        samples: ``N``.

    Yields:
        Slot, gradients with respect to that input, and the rule that they are due to; empty if the node was called
        for several samples, one after another.
    """
    arrived = {number: gradient for number, gradient in gradients.items() if gradient is not None}
    if not arrived:
        return
    kind, left = graph.kind(cut.node), list(cut.slots)
    if list(arrived) == [0]:
        gradient, owners = arrived[0], cut.owners[0]
        for reading in READINGS.get(kind, ()):
            slots = {slot: reading.slots[slot] for slot in left if slot in reading.slots}
            call = _call(cut, slots, reading, gradient, owners) if slots else None
            if call is not None:
                by_name = dict(reading.rule(call))
                for slot, name in slots.items():
                    yield slot, by_name[name], reading.rule.__name__
                    left.remove(slot)
        place = owners.owner if isinstance(owners, OwnerMap) else owners
        summed = summed_over_repetitions if kind == "RepeatBackward" else summed_to
        for slot in list(left):
            values = _pointwise(cut.node, slot, gradient)
            if values is not None:
                grads = summed(values, place, samples, graph.input_shape(cut.node, slot))
                yield slot, wrapped(grads, cut.node, slot), summed.__name__
                left.remove(slot)
    if left:
        found, calls = _called(cut, arrived, samples, left)
        for slot, values in found.items():
            yield slot, wrapped(values, cut.node, slot), "" if calls > 1 else CALLED_ONCE


def _call(
    cut: Cut, slots: Mapping[int, str], reading: Reading, gradient: Tensor, owners: Owners
) -> Call | None:
    """The call as a rule takes it; ``None`` if the reading does not describe it."""
    node = cut.node
    try:
        if not reading.applies(node):
            return None
        shapes = {name: SimpleNamespace(shape=graph.input_shape(node, slot)) for slot, name in slots.items()}
        settings = SimpleNamespace(**shapes, **reading.settings(node))
        features = reading.features(settings, gradient.dim())
        layout = reading.layout(owners, gradient.shape, features)
        if layout is None:
            return None
        arguments = {name: tensor.detach() for name, tensor in reading.arguments(node).items()}
    except AttributeError:
        return None  # not shown by this version of torch
    # Rules are written for real numbers.
    if not arguments or gradient.is_complex() or any(tensor.is_complex() for tensor in arguments.values()):
        return None
    return Call(
        module=settings,
        name=cut.name,
        args=tuple(arguments.values()),
        kwargs={},
        arguments=arguments,
        raw_grad_output=gradient if reading.order is None else gradient.permute(*reading.order),
        layout=layout,
        feature_axes=features,
        training=True,
        needs=frozenset(slots.values()),
    )


def _pointwise(node: Node, slot: int, gradient: Tensor) -> Tensor | None:
    """Contributions to an input, in the shape of the output; ``None`` if the node is not of that kind."""
    kind = graph.kind(node)
    if kind in ("ExpandBackward", "RepeatBackward"):
        return gradient
    if kind in SHIFTS and slot == 0:
        try:
            return gradient * float(graph.saved(node, SHIFTS[kind]))
        except AttributeError:
            return None
    if kind in POINTWISE:
        values = graph.in_a_pass_of_its_own(partial(graph.apply, node, [gradient]))[slot]
        return values if values is not None and values.shape == gradient.shape else None
    return None


def _called(
    cut: Cut, gradients: Mapping[int, Tensor], samples: int, slots: Sequence[int]
) -> tuple[dict[int, Tensor], int]:
    """Call the node on each sample's part of the output gradients.

    Returns:
        ``[N, *shape]`` by slot, and for how many samples it was called: those that own something.
    """
    if samples > 1:
        _refuse_counts_over_the_batch(cut)
    count = len(graph.outputs(cut.node))
    shapes = {slot: graph.input_shape(cut.node, slot) for slot in slots}
    result: dict[int, Tensor] = {}
    masks = {number: element_owners(cut.owners[number], g) for number, g in gradients.items()}
    present = sorted(set(torch.cat([mask.unique() for mask in masks.values()]).tolist()) - {-1})
    for sample in present:
        parts: list[Tensor | None] = [None] * count
        for number, gradient in gradients.items():
            parts[number] = torch.where(masks[number] == sample, gradient, torch.zeros_like(gradient))
        # Each call by itself: checkpointing hands out what the node saved once in a pass.
        found = _at_slots(graph.in_a_pass_of_its_own(partial(graph.apply, cut.node, parts)), shapes)
        # Zero times what is not finite in another sample is not finite either.
        if samples > 1 and _is_finite(parts) and not _is_finite(found.values()):
            own = {n: (mask == sample).long().expand_as(gradients[n]) - 1 for n, mask in masks.items()}
            found = {
                slot: v.where(kept_apart(cut.node, own, slot, v.shape) != NOBODY, 0)
                for slot, v in found.items()
            }
            if not _is_finite(found.values()):
                found = _without_others(cut, parts, found)
        for slot, values in found.items():
            if slot not in result:
                result[slot] = values.new_zeros(samples, *shapes[slot])
            result[slot][sample] = values
    return result, len(present)


def _at_slots(found: Sequence[Tensor | None], shapes: Mapping[int, torch.Size]) -> dict[int, Tensor]:
    """What a node returned for some inputs, in their shapes; nothing where it is zero."""
    return {
        slot: total_to(values.to_dense() if values.is_sparse else values, shape)
        for slot, shape in shapes.items()
        if (values := found[slot]) is not None
    }


def _is_finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


def _without_others(
    cut: Cut, parts: Sequence[Tensor | None], found: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Results of a ``Function`` for one sample, without what is not finite in others.

    It is called with two other numbers in place of each that is not finite. A result that does not depend on them is
    the sample's; one that does is not finite, as it was.
    """
    shapes = {slot: values.shape for slot, values in found.items()}
    saved = graph.saved_by_function(cut.node)
    if saved and not _is_finite(saved):
        first, second = (
            _at_slots(graph.apply_with(cut.node, parts, partial(_substituted, scale=scale)), shapes)
            for scale in (1.0, -3.0)
        )
        if _is_finite(first.values()) and _is_finite(second.values()):
            return {
                slot: values.where(first[slot] != second[slot], first[slot]) for slot, values in found.items()
            }
    raise UnsupportedLayer(
        f"{cut.name}: {graph.kind(cut.node)} is called on all samples at once, and what is not finite in one of them "
        "may have got into the gradients of the others. Leave non-finite samples out of the batch, or teach the layer "
        "with @gradbatch.layer_rule"
    )


def _substituted(tensor: Tensor, scale: float) -> Tensor:
    """Random numbers of one sign in place of what is not finite."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    numbers = scale + scale * torch.rand(tensor.shape, generator=generator, device=tensor.device)
    return tensor.detach().where(tensor.isfinite(), numbers.to(tensor.dtype))


def _refuse_counts_over_the_batch(cut: Cut) -> None:
    """Refuse embeddings that divide by how often an id occurs in the batch, not in the sample."""
    if graph.kind(cut.node) not in ("EmbeddingBackward", "EmbeddingBagBackward"):
        return
    try:
        counts = graph.saved(cut.node, "scale_grad_by_freq")
    except AttributeError as error:
        raise UnsupportedLayer(
            f"{cut.name}: this version of torch does not show scale_grad_by_freq of {graph.kind(cut.node)}, which may "
            "divide by how often an id occurs in the batch"
        ) from error
    if counts:
        raise UnsupportedLayer(
            f"{cut.name}: with scale_grad_by_freq, {graph.kind(cut.node)} divides by how often an id occurs in "
            "the batch. Use nn.Embedding or nn.EmbeddingBag, whose rules count a sample's own ids, with the samples on "
            "an axis"
        )


def site_of(node: Node, number: int) -> Site:
    """Where the samples may lie in an output of a node."""
    shape = graph.outputs(node)[number][0]
    rows = 1 if graph.kind(node) in READINGS else len(shape)
    return Site([len(shape)], min(rows, len(shape)), elements=True)


def wrapped(values: Tensor, node: Node, slot: int) -> PerSampleGrad | Tensor:
    """Values ``[N, *shape]`` as gradients of an input: those of a complex one are no per-sample gradients yet."""
    if graph.is_complex(node, slot):
        return values
    return Dense(values.real if values.is_complex() else values)
