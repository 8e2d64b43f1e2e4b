"""What torch does not document of reentrant activation checkpointing: what a node runs again, under what settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import checkpoint

from gradbatch.capture import graph


def checkpointed(node: Any) -> tuple[Callable[..., Any], list[Any], list[int]]:
    """The function that a checkpoint runs again, its arguments, and which of them are tensors.

    Raises:
        RuntimeError: a tensor was freed, or modified in place.
    """
    args, kept = list(node.inputs), node.saved_tensors
    for place, tensor, (source, _) in zip(node.tensor_indices, kept, node.next_functions, strict=True):
        leaf = None if source is None else graph.accumulated_variable(source)
        args[place] = tensor if leaf is None else leaf
    del kept, tensor
    graph.put_hooks_on_again(node)
    return node.run_function, args, node.tensor_indices


@contextmanager
def as_in_forward(node: Any) -> Iterator[bool]:
    """Autocast and random numbers as they were in the forward of a checkpoint; yields whether it kept the latter."""
    kind, preserved = node.device_type, node.preserve_rng_state
    devices = node.fwd_devices if preserved and node.had_device_in_fwd else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        if preserved:
            torch.set_rng_state(node.fwd_cpu_state)
        if devices:
            checkpoint.set_device_states(devices, node.fwd_device_states, device_type=kind)
        for device, settings in ((kind, node.device_autocast_kwargs), ("cpu", node.cpu_autocast_kwargs)):
            if settings is not None:
                # Without the cache: a cast is part of the graph that it was made for.
                stack.enter_context(torch.autocast(device, **{**settings, "cache_enabled": False}))
        yield preserved


@contextmanager
def calling(calls: Mapping[Node, Callable[..., Any]]) -> Iterator[None]:
    """Let backward passes call something else than the backward of these Python ``Function`` nodes."""
    for node, call in calls.items():
        node.apply = call  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for node in calls:
            del node.apply  # type: ignore[attr-defined]
