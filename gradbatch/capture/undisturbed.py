"""Reading somebody else's graph: a probe changes nothing of theirs, and a graph that is gone is said to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradbatch.capture.records import CHANGED, FREED
from gradbatch.capture.uses import Names
from gradbatch.errors import GradBatchError, StaleCapture, UnsupportedLayer

# How torch says that what a node saved is not what it was.
CHANGED_IN_PLACE = "modified by an inplace operation"
GONE = ("a second time", "already been freed", CHANGED_IN_PLACE)
MOST_NAMED = 4


@contextmanager
def undisturbed(tensors: Iterable[Tensor], names: Names) -> Iterator[None]:
    """Keep every ``.grad`` of the user's as it is: a probe is no backward of theirs.

    Args:
        tensors: intermediates, some of which the user may have asked to retain their gradient; an iterator, so that the
            others may go while the probe runs.
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
def readable(layer: str, changed: Callable[[], Sequence[str]] = tuple) -> Iterator[None]:
    """Say in words of ours why a node cannot be read.

    Args:
        layer: that it lies in.
        changed: names the parameters that were changed in place since the forward, as far as that is known.
    """
    try:
        yield
    except (GradBatchError, Warning, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = str(error)
        if not any(sign in message for sign in GONE):
            raise UnsupportedLayer(
                f"{layer}: a backward function failed when it was run again: {type(error).__name__}: {message}. "
                "gradbatch runs the backward several times, on other gradients; let it change and free nothing itself"
            ) from error
        freed = CHANGED_IN_PLACE not in message
        if names := changed():
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            besides = f". Besides, {FREED}" if freed else ""
            raise StaleCapture(f"{', '.join(names[:MOST_NAMED])}{more}: {CHANGED}{besides}") from error
        if freed:
            raise StaleCapture(f"{layer}: {FREED}") from error
        raise StaleCapture(
            f"{layer}: a tensor that the backward needs was changed in place after the forward "
            f"({message.partition('. ')[0]}). Clone it, or use the out-of-place operation; if it is a weight, take "
            "gradients before optimizer.step(), or run the forward again"
        ) from error
