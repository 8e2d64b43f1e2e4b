"""Unfolding: the function of a reentrant checkpoint, run again as a part of the graph.

Unlike in torch's own second run, which is forgotten with the backward pass, what it yields is there to be walked, and
passed through as often as needed. What its nodes save is not kept, but computed again when it is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import get_device_states

from gradbatch.capture import graph, reentrant
from gradbatch.errors import StaleCapture, UnsupportedLayer


def unfold(node: Node, store: Store) -> graph.Unfolded:
    """Run the function of a checkpoint again, as a part of the graph.

    Args:
        node: of the checkpoint.
        store: holds what its nodes save, as long as it is read.

    Raises:
        StaleCapture: a tensor that the checkpoint keeps was changed in place or freed.
        UnsupportedLayer: the function fails, or draws random numbers that nobody has kept.
    """
    try:
        function, args, places = reentrant.checkpointed(node)
    except (RuntimeError, AttributeError) as error:
        kind = StaleCapture if isinstance(error, RuntimeError) else UnsupportedLayer
        raise kind(
            f"activation checkpointing with use_reentrant=True: what it keeps of its forward cannot be read ({error}). "
            "Take gradients before an input of it is changed or the graph freed, or pass use_reentrant=False"
        ) from error
    inputs: dict[Node, int] = {}
    for slot, place in enumerate(places):
        tensor: Tensor = args[place].detach()
        if node.next_functions[slot][0] is not None:
            with torch.enable_grad():
                # With a place of its own in the graph: what arrives there comes from this region, not from elsewhere.
                tensor = args[place].view_as(args[place])
            inputs[graph.node_of(tensor)] = slot
            assert graph.node_of(tensor).next_functions[0] == node.next_functions[slot]
        args[place] = tensor
    run = _Run(node, function, args, [args[place] for place in places], store)
    region = graph.Unfolded(run.unfold(), inputs, len(args), places, lambda: store.read(run), store.forget)
    cast("dict[str, Any]", node.metadata)[graph.UNFOLDED_KEY] = weakref.ref(region)
    return region


class _Run:
    """The function of a checkpoint with its arguments, to be run as often as needed.

    Random numbers and autocast are as in torch's own second run, and afterwards as they were before.

    Args:
        node: of the checkpoint.
        function: what it runs.
        args: of the function.
        tensors: those among them.
        store: holds what the region saves, as long as it is read.
    """

    def __init__(
        self,
        node: Node,
        function: Callable[..., Any],
        args: Sequence[Any],
        tensors: Sequence[Tensor],
        store: Store,
    ) -> None:
        self._node, self._function, self._args = node, function, args
        self._tensors, self._store = tensors, store
        self._saved: list[tuple[torch.Size, torch.dtype]] = []

    def unfold(self) -> list[Tensor | None]:
        """Run it for its graph: what it returns, with ``None`` for what has no gradient."""
        saved = self._saved

        def pack(tensor: Tensor) -> int:
            saved.append((tensor.shape, tensor.dtype))
            return len(saved) - 1

        returned = self._call(pack, self._read)
        with torch.enable_grad():
            return [_with_node(x) if isinstance(x, Tensor) and x.requires_grad else None for x in returned]

    def save(self) -> list[tuple[Tensor, int]]:
        """Run it for what its nodes save, with the versions that they save."""
        tensors: list[tuple[Tensor, int]] = []
        self._call(lambda tensor: tensors.append((tensor.detach(), tensor._version)), lambda _: None)
        if [(tensor.shape, tensor.dtype) for tensor, _ in tensors] != self._saved:
            raise UnsupportedLayer(
                f"{_name(self._function)}, under activation checkpointing, computes something else each time it is run"
            )
        return tensors

    def _read(self, number: int) -> Tensor:
        tensor, version = self._store.read(self)[number]
        if tensor._version != version:
            raise StaleCapture(
                f"{_name(self._function)}, under activation checkpointing, changes a tensor of shape "
                f"{tuple(tensor.shape)} in place that the backward needs as it was"
            )
        return tensor

    def _call(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Any]) -> tuple[Any, ...]:
        name = f"{_name(self._function)}, under activation checkpointing with use_reentrant=True,"
        with reentrant.as_in_forward(self._node) as keeps_random_numbers, torch.enable_grad():
            before = _random_state(self._tensors)
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    returned = self._function(*self._args)
            except Exception as error:
                failure = f"{name} failed when it was run again: {type(error).__name__}: {error}"
                raise UnsupportedLayer(failure) from error
            if not keeps_random_numbers and not all(map(torch.equal, before, _random_state(self._tensors))):
                raise UnsupportedLayer(
                    f"{name} draws random numbers with preserve_rng_state=False, so that torch's backward is that of "
                    "another forward; pass preserve_rng_state=True, or use_reentrant=False"
                )
        return returned if isinstance(returned, tuple) else (returned,)


class Store:
    """What the nodes of a region save, computed again when it is read; of one region at a time."""

    def __init__(self) -> None:
        self._run: weakref.ref[_Run] | None = None
        self._tensors: list[tuple[Tensor, int]] = []

    def read(self, run: _Run) -> list[tuple[Tensor, int]]:
        """What one region saves; what is held of another one is let go."""
        if self._run is None or run is not self._run():
            self.forget()
            self._tensors, self._run = run.save(), weakref.ref(run)
        return self._tensors

    def forget(self) -> None:
        """Let go of what is held."""
        self._run, self._tensors = None, []


def _with_node(output: Tensor) -> Tensor:
    return output if output.grad_fn is not None else output.view_as(output)  # a parameter, handed through


def _random_state(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.get_rng_state(), *get_device_states(*tensors)[1]]


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))
