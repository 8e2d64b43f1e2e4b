"""Probe the captured calls: take their outputs' gradients, and find where the samples lie in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradbatch.capture import graph
from gradbatch.capture.owners import Site, find_owners
from gradbatch.capture.uses import Names, Use
from gradbatch.errors import CoupledSamples, UnsupportedLayer
from gradbatch.rules import SampleLayout


def owned_gradients(
    uses: Sequence[Use],
    outputs: Sequence[Tensor],
    cotangents: Callable[[Tensor], Sequence[Tensor]],
    samples: int,
    names: Names,
) -> tuple[list[list[Tensor | None]], list[SampleLayout]]:
    """Gradients of all calls' outputs, and where the samples lie in them.

    Args:
        uses: the calls.
        outputs: tensors that depend on them, one row a sample.
        cotangents: from weights of the samples to cotangents of ``outputs``.
        samples: ``N``.
        names: the parameters.

    Raises:
        CoupledSamples: they do not lie regularly in some call.
        UnsupportedLayer: a parameter receives a gradient although the passes end at the calls' outputs.
    """
    edges = [edge for use in uses for edge in use.edges]

    def differentiate(weights: Tensor) -> list[list[Tensor | None]]:
        arrived = iter(graph.differentiate(outputs, cotangents(weights), edges))
        return [
            [
                None if g is None else anchor.of_output(g)
                for (_, anchor), g in zip(use.anchors, arrived, strict=False)
            ]
            for use in uses
        ]

    dtypes = {dtype for use in uses for _, dtype, _ in use.record.outputs}
    adjacent = [reference() for use in uses for reference in use.record.adjacent]
    with _undisturbed([*outputs, *(tensor for tensor in adjacent if tensor is not None)], names):
        found = find_owners(
            differentiate, [site_of(use) for use in uses], samples, outputs[0].detach(), dtypes
        )
    layouts: list[SampleLayout] = []
    for use, layout in zip(uses, found.layouts, strict=True):
        if layout is None:
            raise no_layout(use, samples)
        layouts.append(layout)
    return found.gradients, layouts


@contextmanager
def _undisturbed(tensors: Sequence[Tensor], names: Names) -> Iterator[None]:
    """Keep every ``.grad`` of the user's as it is: a probe is no backward of theirs.

    Args:
        tensors: intermediates, some of which the user may have asked to retain their gradient.
        names: the parameters; a probe ends before it reaches them, unless something hides them from the graph.
    """
    retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
    for tensor, _ in retained:
        tensor.grad = None  # not added to in place
    guards = [p.register_hook(_BehindTheGraph(names.parameters.get(p, "a parameter"))) for p in names.owners]
    try:
        yield
    finally:
        for guard in guards:
            guard.remove()
        for tensor, grad in retained:
            tensor.grad = grad


class _BehindTheGraph:
    """Hook on a parameter while nothing should reach it: passes that stop at layer outputs end there."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, _: Tensor) -> None:
        raise UnsupportedLayer(
            f"{self._path} receives its gradient from a backward pass inside the backward pass (a checkpointing or "
            "reversible autograd Function), which hides its uses; use a version of it that autograd can see"
        )


def site_of(use: Use) -> Site:
    """What ownership has to know about a call: on which leading axes of its outputs the samples may lie."""
    features = [feature_axes(use, anchor.shape) for _, anchor in use.anchors]
    if any(count is None for count in features):
        return Site(None)
    return Site(
        [len(anchor.shape) - (count or 0) for (_, anchor), count in zip(use.anchors, features, strict=True)]
    )


def no_layout(use: Use, samples: int) -> CoupledSamples:
    """The error for a call in whose output gradients the samples do not lie regularly."""
    shapes = ", ".join(str(tuple(anchor.shape)) for _, anchor in use.anchors)
    site = site_of(use)
    where = "axis 0" if site.lead is None else f"one of the {max(site.lead, default=0)} leading axes"
    hint = ""
    if site.lead is None:
        hint = ", declare feature_axes= in its layer_rule if samples lie on another axis"
    return CoupledSamples(
        f"{use.name} ({use.record.module_type.__name__}): the elements of its output of shape {shapes} do not belong "
        f"to one of the {samples} samples each, ordered along {where}. Either samples are coupled (a contrastive "
        "loss, statistics over the batch), or the layer's result is shared by them (a positional table), or they lie "
        f"irregularly. Keep every sample's rows apart up to the loss{hint}"
    )


def feature_axes(use: Use, shape: torch.Size) -> int | None:
    """Trailing axes of an output of this shape that belong to the layer's function, if its rule says so."""
    assert use.record.rule is not None
    return use.record.rule.count_feature_axes(use.record.module_as_called(), len(shape))
