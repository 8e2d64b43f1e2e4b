"""Reading what a node saved while a backward pass is running that needs it too.

A region under activation checkpointing is run again once a pass, and hands out each saved tensor once: whoever reads it
in somebody else's pass takes it away from the node. Torch shows what it keeps in place of a saved tensor, and there a
tensor that was handed out can be left. Where it does not (2.6 does not), and for packing of other kinds, the reader
needs a pass of its own, for which the whole region is run once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from torch.autograd.graph import Node
from torch.utils import checkpoint

from gradbatch.capture import graph

Result = TypeVar("Result")

# What stands in a saved tensor's place in a checkpointed region.
HOLDER = getattr(checkpoint, "_Holder", None)


def read_aside(node: Node, read: Callable[[], Result]) -> Result:
    """Run something that reads what a node saved, and leave it there for the pass that is running.

    The node is not to be called by it but in a pass of its own: called within a pass, it computes only what that needs.
    """
    try:
        holders = list(_holders(node)) if graph.current_pass() >= 0 else None
    except (AttributeError, RuntimeError):  # not shown by this version of torch, or freed
        holders = None
    if holders is None or any(type(holder) is not HOLDER for holder in holders):
        return graph.in_a_pass_of_its_own(read)
    before = [holder.handles for holder in holders]
    for holder in holders:
        holder.handles = _Kept(holder.handles)
    try:
        return read()
    finally:
        for holder, known in zip(holders, before, strict=True):
            # Passes that were run inside of this one will not come back for theirs.
            holder.handles = {
                key: handle
                for key, handle in holder.handles.items()
                if key in known or key == graph.current_pass() or not isinstance(key, int)
            }


def let_go(node: Node) -> None:
    """Let go of what a checkpointed region computed again for a node, in the pass that is running and has been there.

    What the node did not ask for would stay until its graph goes: a pruned pass needs no inputs for weight gradients.
    """
    with suppress(AttributeError, RuntimeError):
        for holder in _holders(node):
            if type(holder) is HOLDER:
                holder.handles.pop(graph.current_pass(), None)


class _Kept(dict[Any, Any]):
    """The handles of a saved tensor, by pass; that it was handed out is not noted."""

    def __setitem__(self, key: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(key, handle)


def _holders(node: Node) -> Iterator[Any]:
    """What stands in place of the tensors that a node saved; nothing where they are kept as they are."""
    for name in _names(type(node)):
        kept = getattr(node, name)
        for tensor in kept if isinstance(kept, (tuple, list)) else (kept,):
            if tensor.unpack_hook is not None:
                yield tensor.data


@cache
def _names(node_type: type) -> list[str]:
    return [name for name in dir(node_type) if name.startswith("_raw_saved_")]
