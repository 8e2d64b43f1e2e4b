"""The module-hook reader: a forward hook leaves a record of each call on the autograd graph.

The record is kept in ``node.metadata`` of the node that computes the layer's output, so it lives and dies with that
graph. Nothing is kept on the module and nothing globally: a deepcopy, an exception, a forward without a backward
leave nothing behind that could go stale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from gradbatch.capture import graph
from gradbatch.capture.anchors import anchor
from gradbatch.capture.arguments import outputs_of, tensors_in
from gradbatch.capture.records import PACKED, Record


class ForwardRecorder:
    """The forward hook of an extended layer. It holds no tensor, so modules stay picklable and copies independent.

    Args:
        batch_dim: the axis of the model's inputs and outputs that runs over samples.
        remember: whether steps may rely on what earlier ones measured.
    """

    def __init__(self, batch_dim: int, remember: bool) -> None:
        self.batch_dim, self.remember = batch_dim, remember

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Leave a record on the graph of ``output``; does nothing where no gradient is wanted."""
        # A traced or compiled graph is opaque anyway: its uses stay unexplained, and are refused by the walk.
        if graph.is_being_traced() or not torch.is_grad_enabled():
            return
        returned = tensors_in(output)
        outputs = [item for item in returned if item.grad_fn is not None]
        if not outputs or graph.is_transformed(outputs[0]):
            return
        record = Record(module, args, kwargs, output, returned, self._foreign_hooks(module))
        anchored = [anchor(index, item) for index, item in enumerate(outputs_of(output))]
        places = [place for place in anchored if place is not None]
        if record.rule is None or not places:
            # Nobody will evaluate it; it says which layers the graph holds, and with which parameters.
            for node in {graph.node_of(item): None for item in outputs}:
                graph.notes(node).append((record, None))
            return
        for node, place in places:
            # A layer that hands on its input, or changes it in place, has no place of its own in the graph.
            if node not in record.input_nodes:
                graph.notes(node).append((record, place))
        places[0][0].register_hook(_Release(record))

    def _foreign_hooks(self, module: nn.Module) -> str | None:
        """Why the record cannot stand for the call: then the nodes of the graph do."""
        if graph.packs_saved_tensors():
            return PACKED
        if next(iter(module._forward_hooks.values()), None) is not self:
            return (
                "a forward hook was put before gradbatch's; register it without prepend=True, or extend again"
            )
        if torch.nn.modules.module._global_forward_hooks:
            return "global forward hooks are registered, which may replace what the layer returned"
        return None


class _Release:
    """Post-hook of an anchor: frees the record's inputs when autograd frees what it saved."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def __call__(self, *_: Any) -> None:
        if not graph.pass_keeps_graph():
            self._record.release()


def install(module: nn.Module, batch_dim: int, remember: bool) -> None:
    """Put the recorder on one module, first of its forward hooks; once, however often it is called."""
    remove(module)
    module.register_forward_hook(ForwardRecorder(batch_dim, remember), prepend=True, with_kwargs=True)


def remove(module: nn.Module) -> None:
    """Take the recorder off one module; nothing happens where there is none."""
    for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, ForwardRecorder)]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)


def recorder_of(module: nn.Module) -> ForwardRecorder | None:
    """The recorder on one module."""
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, ForwardRecorder)), None)


def needs_recorder(module: nn.Module) -> bool:
    """Whether calls of the module matter: it has parameters of its own, will have them, or may couple samples."""
    return bool(module._parameters) or isinstance(module, (LazyModuleMixin, _BatchNorm))
