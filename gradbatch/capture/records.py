"""Records: what is kept of one call of a layer, on the autograd graph, until its backward."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from gradbatch.capture import graph
from gradbatch.capture.arguments import is_plain, outputs_of, tensors_in
from gradbatch.errors import StaleCapture
from gradbatch.rules import rule_for

# What every module has, and torch looks after.
INTERNAL = frozenset(nn.Module().__dict__) - {"training"}

# What the caller is told of a graph whose gradients cannot be computed any more.
FREED = (
    "an earlier backward pass has freed this graph. Let gradbatch.backward do that pass too (reduction=...), pass "
    "retain_graph=True to it, or run the forward again"
)
PACKED = "its inputs are not to be kept, but computed or fetched again"
CHANGED = (
    "changed in place after the forward, as optimizer.step() does, before its gradients were computed. Step after "
    "gradbatch.backward, or behind the with block of gradbatch.compute; or run the forward again"
)


class Record:
    """One call of a layer, as its forward hook saw it.

    Args:
        module: the layer.
        args: positional arguments of its forward.
        kwargs: keyword arguments.
        output: what the forward returned.
        returned: the tensors in it.
        refusal: why the call cannot be explained by a rule, although the layer has one.

    Attributes:
        adjacent: the user's own input and output tensors, as long as they live.
        settings: the plain attributes of the layer in this call.
        module_id: tells layers apart while they live.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        returned: Sequence[Tensor],
        refusal: str | None,
    ) -> None:
        self._module, self.module_id = weakref.ref(module), id(module)
        self.module_type = type(module)
        self.training = module.training
        self.rule = rule_for(module)
        self.refusal = refusal
        self.couples_samples = couples_samples(module)
        self.parameters = {name: p for name, p in module._parameters.items() if p is not None}
        self._versions = [*map(version_of, self.parameters.values())]
        self.input_nodes: set[Node] = set()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.returns_several = isinstance(output, (tuple, list))
        self.outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.settings: dict[str, Any] = {}
        inputs = tensors_in((args, kwargs) if kwargs else args)
        self.adjacent = [*map(weakref.ref, inputs), *map(weakref.ref, returned)]
        self._inputs: list[tuple[Tensor, int]] = []
        self._outputs: list[tuple[Tensor, int]] = []
        self._watched: list[tuple[str, Tensor, int]] = []
        self._holds = 0
        self._released = False
        if self.rule is not None:
            self._read(module, args, kwargs, output, inputs)

    def _read(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        inputs: Sequence[Tensor],
    ) -> None:
        self.settings, shadowed = _settings_of(module)
        self.refusal = self.refusal or shadowed
        own = {id(parameter) for parameter in self.parameters.values()}
        for tensor in inputs:
            edge = graph.output_edge(tensor)
            if edge is not None:
                self.input_nodes.add(edge[0])
            if id(tensor) in own:
                self.refusal = "its own parameter is also its input"
        if self.refusal is None:
            self.args = tuple([self._detach(value) for value in args])
            self.kwargs = {name: self._detach(value) for name, value in kwargs.items()}
        self._watched = [(name, t, version_of(t)) for name, t in self._read_tensors(module)]
        outputs = outputs_of(output)
        if outputs:
            self.outputs = [(item.shape, item.dtype, item.device) for item in outputs]
        else:
            self.refusal = "its forward returns something else than tensors"
        if self.refusal is None and self.rule is not None and self.rule.reads_outputs:
            self._outputs = [(item.detach(), version_of(item)) for item in outputs]

    @property
    def module(self) -> nn.Module:
        """The layer; raises :class:`StaleCapture` if it was deleted since the forward."""
        module = self._module()
        if module is None:
            raise StaleCapture(
                f"a {self.module_type.__name__} was deleted between forward and backward; keep the model alive"
            )
        return module

    def module_as_called(self) -> nn.Module:
        """The layer with its attributes as they were in this call; it shares parameters, buffers and all else.

        A layer may be called several times with other settings (one weight at several dilations).
        """
        twin = object.__new__(self.module_type)
        twin.__dict__.update({**self.module.__dict__, **self.settings})
        return twin

    def release(self) -> None:
        """Let go of the inputs, as autograd does of what it saved, once a backward pass has gone through."""
        self._released = self.rule is not None
        if not self._holds:
            self._inputs, self._outputs, self.args, self.kwargs = [], [], (), {}

    def hold(self) -> None:
        """Keep the inputs through a backward pass, until :meth:`let_go`."""
        self._holds += 1

    def let_go(self) -> None:
        """Undo one :meth:`hold`."""
        self._holds -= 1
        if self._released:
            self.release()

    def check_kept(self, name: str) -> None:
        """Refuse a call on a graph that an earlier backward pass has freed (:class:`StaleCapture`)."""
        if self._released and not self._holds:
            raise StaleCapture(f"{name} ({self.module_type.__name__}): {FREED}")

    def check_fresh(self, name: str) -> None:
        """Refuse a call whose tensors changed since the forward.

        Args:
            name: path of the layer in the model.

        Raises:
            StaleCapture: an input, or a tensor that the rule reads, was modified in place or replaced; or the graph
                was freed by an earlier backward pass.
        """
        self.check_kept(name)
        layer = f"{name} ({self.module_type.__name__})"
        for tensor, version in self._inputs:
            if version_of(tensor) != version:
                raise StaleCapture(
                    f"{layer}: its input of shape {tuple(tensor.shape)} was modified in place after the forward, so "
                    "its per-sample gradient cannot be computed. Use the out-of-place operation, or clone the input"
                )
        for attribute, tensor, version in self._watched:
            current = getattr(self.module, attribute, None)
            if current is not tensor or version_of(tensor) != version:
                raise StaleCapture(f"{layer}: {attribute} was {CHANGED}")

    def changed_parameters(self) -> list[str]:
        """Names of the parameters that were changed in place since the forward."""
        return [
            name
            for (name, parameter), version in zip(self.parameters.items(), self._versions, strict=True)
            if version_of(parameter) != version
        ]

    def check_parameters(self, name: str) -> None:
        """Refuse a layer whose parameters were replaced since the forward (:class:`StaleCapture`)."""
        module = self.module
        for attribute, parameter in self.parameters.items():
            # Calls on computed tensors (functional_call) are none of the module's own.
            computed = not (parameter.is_leaf and parameter.requires_grad)
            if not computed and module._parameters.get(attribute) is not parameter:
                raise StaleCapture(
                    f"{name}.{attribute} was replaced between forward and backward: its gradient belongs to the old "
                    "parameter. Run the forward again"
                )

    def unchanged_outputs(self) -> tuple[Tensor, ...]:
        """What the forward returned, for a rule that reads it; nothing if any of it was modified in place since."""
        if any(version_of(tensor) != version for tensor, version in self._outputs):
            return ()
        return tuple(tensor for tensor, _ in self._outputs)

    def arguments(self) -> dict[str, Any]:
        """The arguments by the names of ``forward``'s parameters, defaults filled in."""
        forward = self.module_type.forward
        defaults = _defaults(forward)
        if defaults is not None:  # the call went through, so they fit
            return {**defaults, **dict(zip(defaults, self.args, strict=False)), **self.kwargs}
        bound = inspect.signature(forward).bind(None, *self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])

    def _detach(self, value: Any) -> Any:
        """A copy of nested arguments without graph: a record must not keep alive the graph that it hangs on."""
        if isinstance(value, Tensor):
            detached = value.detach()
            self._inputs.append((detached, version_of(detached)))
            return detached
        if is_plain(value):
            return value
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(self._detach(item) for item in value)
        if isinstance(value, PackedSequence):
            return PackedSequence(*(self._detach(item) for item in value))
        if type(value) is dict:
            return {key: self._detach(item) for key, item in value.items()}
        self.refusal = f"an argument is a {type(value).__name__}, in which tensors could hide; pass tensors"
        return None

    def _read_tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        assert self.rule is not None
        for name in self.rule.read_by(module):
            tensor = getattr(module, name)
            if tensor is not None:
                yield name, tensor


def _settings_of(module: nn.Module) -> tuple[dict[str, Any], str | None]:
    """Plain attributes of a layer, and why it may compute with something else than its parameters."""
    settings: dict[str, Any] = {}
    refusal = None
    for name, value in module.__dict__.items():
        if name in INTERNAL:
            continue
        if is_plain(value):
            settings[name] = value
        elif (
            isinstance(value, Tensor) and value.requires_grad and type(module).__module__.startswith("torch.")
        ):
            refusal = f"its {name} is computed from something else (weight_norm, spectral_norm, pruning, …)"
        if name in module._parameters:
            refusal = f"its attribute {name} hides its parameter {name}; remove the attribute"
    return settings, refusal


def couples_samples(module: nn.Module) -> bool:
    """Whether the module, as it stands, normalises over the batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    # Inference tensors do not count versions; autograd does not save them either.
    return 0 if tensor.is_inference() else tensor._version


@cache
def _defaults(forward: Callable[..., Any]) -> dict[str, Any] | None:
    """What every argument is by default, in order; ``None`` where any number of them is taken."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return None
    return {parameter.name: parameter.default for parameter in parameters}
