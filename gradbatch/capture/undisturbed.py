"""Reading somebody else's graph: a probe changes nothing of theirs, and a graph that is gone is said to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from gradbatch.capture.uses import Names
from gradbatch.errors import GradBatchError, StaleCapture, UnsupportedLayer

# How torch says that what a node saved is not what it was.
GONE = ("a second time", "already been freed", "modified by an inplace operation")


@contextmanager
def undisturbed(tensors: Sequence[Tensor], names: Names) -> Iterator[None]:
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


@contextmanager
def readable(layer: str) -> Iterator[None]:
    """Say in words of ours why a node cannot be read."""
    try:
        yield
    except (GradBatchError, Warning):
        raise
    except Exception as error:
        message = str(error)
        if not any(sign in message for sign in GONE):
            raise UnsupportedLayer(
                f"{layer}: a backward function failed when it was run again: {type(error).__name__}: {message}. "
                "gradbatch runs the backward several times, on other gradients; let it change and free nothing itself"
            ) from error
        raise StaleCapture(
            f"{layer}: what autograd saved for the backward cannot be read any more ({message.partition('. ')[0]}). "
            "It was changed in place after the forward, or an earlier backward pass freed the graph: clone it, pass "
            "retain_graph=True, or run the forward again"
        ) from error
