"""The registry of layer rules: which function teaches which layer type.

One rule a type, looked up by the exact type: a subclass may compute something else, and is never taken for its base
class. So is a class or an instance whose ``forward`` was replaced after the rule was registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.rules.call import Call

RuleFunction = Callable[[Call], Iterator[tuple[str, PerSampleGrad]]]
FeatureAxes = int | Callable[[Any, int], int] | None
Reads = tuple[str, ...] | Callable[[Any], tuple[str, ...]] | None
Arrange = Callable[[Any, Mapping[str, Any], int, Tensor], Tensor] | None
Declines = Callable[[Any], str | None] | None
_Function = TypeVar("_Function", bound=RuleFunction)


@dataclass(frozen=True)
class LayerRule:
    """A rule with what gradbatch has to know before it can call it.

    Args:
        function: from a :class:`Call` to ``(parameter name, PerSampleGrad)`` pairs.
        methods: the methods of the layer type when the rule was written for it, ``forward`` and what it may call.
        feature_axes: trailing axes of the output that belong to the layer's function, or a function of the module
            and the output's number of axes; all axes before them are interchangeable rows.
        reads: names of own parameters and buffers whose values the rule reads; ``None``: all of them.
        arrange: brings an output to the shape in which ``feature_axes`` counts; ``None``: it is in that shape.
        declines: says why the rule does not describe a module as it stands; ``None``: it always does.
        reads_outputs: whether the rule reads :attr:`Call.outputs`.
        by_row: whether calls may be joined to one that has the rows of all of them.
    """

    function: RuleFunction
    methods: Mapping[str, Any]
    feature_axes: FeatureAxes
    reads: Reads
    arrange: Arrange = None
    declines: Declines = None
    reads_outputs: bool = False
    by_row: bool = False

    def count_feature_axes(self, module: nn.Module, output_dim: int) -> int | None:
        """Number of trailing feature axes of an output with ``output_dim`` axes; ``None`` if the rule did not say."""
        if callable(self.feature_axes):
            return self.feature_axes(module, output_dim)
        return self.feature_axes

    def read_by(self, module: nn.Module) -> list[str]:
        """Names of the module's parameters and buffers that the rule reads."""
        if self.reads is None:
            return [*module._parameters, *module._buffers]
        return list(self.reads(module) if callable(self.reads) else self.reads)


_RULES: dict[type[nn.Module], LayerRule] = {}


def layer_rule(
    *types: type[nn.Module],
    feature_axes: FeatureAxes = None,
    reads: Reads = None,
    arrange: Arrange = None,
    declines: Declines = None,
    reads_outputs: bool = False,
    by_row: bool = False,
) -> Callable[[_Function], _Function]:
    """Teach gradbatch a layer: register a function from a call to the per-sample gradients of its parameters.

    The function yields ``(name, PerSampleGrad)`` for every own parameter of the layer that needs a gradient
    (``call.needs``). It serves every quantity, built in or yours.

    Args:
        types: the layer types, matched exactly. Subclasses, and calls that the rule does not describe, are read off
            the autograd graph.
        feature_axes: how many trailing axes of the output belong to the layer's function, e.g. 1 for a layer that
            acts on the last axis. All axes before them are rows that the layer treats alike, and the samples may lie
            on any of them: ``call.input`` is ``[N, *other rows, *features]``. Left out, the samples must lie on
            axis 0. A function of ``(module, output.dim())`` where it depends on the module.
        reads: names of the layer's parameters and buffers that the rule reads, so that a change of them between
            forward and backward is noticed; a function of the module where it depends on it; left out, all.
        arrange: for layers that keep their rows elsewhere than on leading axes (sequences on axis 1, packed): from the
            module, the arguments of the call, the number of an output and that output or its gradient, to the same
            numbers with the rows first. ``call.raw_grad_output`` is arranged, and so must the rule's own tensors be.
        declines: from the module to why the rule does not describe it as it stands (``None`` if it does); such a call
            is explained by the operations that it consists of.
        reads_outputs: whether the rule makes use of ``call.outputs``, which are kept in memory for it.
        by_row: whether each row of the output depends on the same row of each tensor among the arguments and on nothing
            else, so that calls in a loop may be joined to one with the rows of all of them.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        UsageError: no type, or something that is not a subclass of ``torch.nn.Module``.

    Edge cases: a second rule for a type replaces the first.

    Example:
        >>> import torch, gradbatch
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self, channels):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(channels))
        ...     def forward(self, input):
        ...         return input * self.weight
        >>> @gradbatch.layer_rule(Scale, feature_axes=1)
        ... def scale(call):
        ...     product = call.input * call.grad_output
        ...     yield "weight", gradbatch.Dense(product.flatten(1, -2).sum(1) if product.dim() > 2 else product)
        >>> model = gradbatch.extend(torch.nn.Sequential(torch.nn.Linear(3, 4), Scale(4)))
        >>> losses = model(torch.randn(2, 3)).square().sum(1)
        >>> {name: tuple(grad.shape) for name, grad in gradbatch.per_sample_grads(model, losses).items()}
        {'0.weight': (2, 4, 3), '0.bias': (2, 4), '1.weight': (2, 4)}
    """
    for kind in types:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise UsageError(
                f"layer_rule takes subclasses of torch.nn.Module, as in @layer_rule(MyLayer), not {kind!r}"
            )
    if not types:
        raise UsageError("layer_rule needs at least one layer type, as in @layer_rule(MyLayer)")

    def register(function: _Function) -> _Function:
        for kind in types:
            _RULES[kind] = LayerRule(
                function, _methods(kind), feature_axes, reads, arrange, declines, reads_outputs, by_row
            )
        return function

    return register


def rule_for(module: nn.Module) -> LayerRule | None:
    """The rule that explains this very module, or ``None``.

    Edge cases: ``None`` for a subclass of a taught layer, and for an instance or a class of which ``forward`` or
    another method (such as ``_conv_forward``) was replaced.
    """
    kind = type(module)
    rule = _RULES.get(kind)
    if rule is None or not rule.methods.keys().isdisjoint(module.__dict__):
        return None
    if any(getattr(kind, name) is not method for name, method in rule.methods.items()):
        return None
    return None if rule.declines is not None and rule.declines(module) is not None else rule


def _methods(kind: type[nn.Module]) -> dict[str, Any]:
    """Methods of a layer type that are its own or of a base class other than ``torch.nn.Module``."""
    names = {name for base in kind.__mro__ if base not in (nn.Module, object) for name in vars(base)}
    methods = {name: getattr(kind, name) for name in names if not name.startswith("__")}
    return {name: method for name, method in methods.items() if inspect.isfunction(method)} | {
        "forward": kind.forward
    }


def why_no_rule(module: nn.Module) -> str:
    """Say in words why :func:`rule_for` found nothing."""
    kind = type(module)
    declines = _RULES[kind].declines if kind in _RULES else None
    if declines is not None and (reason := declines(module)) is not None:
        return reason
    if kind in _RULES:
        name = kind.__name__
        return f"the forward of {name} was replaced, or a method that it calls; the rule of {name} is for the original"
    bases = [base.__name__ for base in kind.__mro__[1:] if base in _RULES]
    if bases:
        return f"{kind.__name__} is a subclass of {bases[0]}, whose rule may not describe it"
    return f"{kind.__name__} has no layer rule"


def taught_types() -> list[type[nn.Module]]:
    """All layer types with a rule, by name."""
    return sorted(_RULES, key=lambda kind: kind.__name__)
