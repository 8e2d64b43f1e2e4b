"""The cross-check itself: run the model once, and compare two ways to its per-sample gradients."""

from __future__ import annotations

import copy
import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gradbatch.api import backward
from gradbatch.blockmap import block_map
from gradbatch.capture import graph
from gradbatch.errors import GradBatchError, UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.plans.contractions import Plan
from gradbatch.quantities import Quantity
from gradbatch.rules import rule_for
from gradbatch.verify.forward import left_as_it_was, run
from gradbatch.verify.reference import reference, relative_errors
from gradbatch.verify.report import LayerReport, Report

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF_TOLERANCE = 2e-2


def verify(
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    device: torch.device | str | None = None,
    tolerance: float | None = None,
    parameters: str | Iterable[str] | None = None,
) -> Report:
    """Compare a model's per-sample gradients with those of ``torch.func.vmap``, layer by layer.

    Run it in float64 where you can: in float32 a small mistake looks like rounding. Where ``vmap`` cannot run the
    model, or something random happens in it, the reference is one backward pass a sample; the report says which it was.

    Args:
        model: extended or not; it is left as it was, training mode, gradients, hooks and buffers included.
        inputs: what to call it with: a tensor, positional arguments, or keyword arguments by name.
        loss: from the model's output to losses ``[N]``. By default every output is projected onto random numbers,
            which leaves no part of it out.
        device: where to check a copy of the model; by default the model itself is checked where it is.
        tolerance: largest error that still agrees; by default 1e-10 in float64, 1e-4 in float32, 2e-2 in half
            precision. Errors are relative to the largest entry of the sample's gradient of the parameter, or, if that
            is larger, to the fourth root of the tolerance times its largest entry in all parameters.
        parameters: name pattern or patterns of the parameters to check.

    Returns:
        A report with a row for each layer; ``report.ok``, or ``report.raise_for_mismatch()``.

    Raises:
        UsageError: nothing to check, a lazy module that is not materialised, no output with a row for each sample, or
            losses that are not ``[N]``. What the model itself raises is passed on. Refusals are in the report.

    Edge cases: frozen parameters are left out; a tied parameter stands with its first layer.

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch.verify import verify
        >>> model = torch.nn.Sequential(torch.nn.Conv1d(4, 6, 3, groups=2), torch.nn.ReLU()).double()
        >>> report = verify(model, torch.randn(5, 4, 8, dtype=torch.double))
        >>> report.ok, report.reference, [(layer.name, layer.rule) for layer in report.layers]
        (True, 'torch.func.vmap', [('0', 'convolution')])
    """
    args, kwargs = _arguments(inputs)
    if device is not None:
        model = copy.deepcopy(model).to(device)
        args, kwargs = [_moved(a, device) for a in args], {k: _moved(a, device) for k, a in kwargs.items()}
    layers = _layers(model, parameters)
    wanted = {name: parameter for layer in layers for name, parameter in layer.parameters.items()}
    dtype = min((parameter.dtype for parameter in wanted.values()), key=lambda dtype: torch.finfo(dtype).bits)
    if tolerance is None:
        tolerance = _TOLERANCES.get(dtype, _HALF_TOLERANCE)
    with left_as_it_was(model), torch.enable_grad():
        forward = run(model, args, kwargs, loss)
        found, refusals = _capture(model, forward.losses, layers)
        compared = {name: wanted[name] for name in found}
        expected, how, why = reference(forward, compared, tolerance) if compared else ({}, "", "")
    actual = {name: captured.grads for name, captured in found.items()}
    errors = relative_errors(actual, expected, tolerance)
    maps = {
        name: block_map(actual[name], expected[name], layer.groups, tolerance)
        for layer in layers
        for name in layer.parameters
        if errors.get(name, 0.0) > tolerance
    }
    return Report(
        model=type(model).__name__,
        layers=[_row(layer, found, refusals.get(layer.path), errors, maps) for layer in layers],
        samples=len(forward.losses),
        dtype=dtype,
        device=forward.losses.device,
        reference=how,
        tolerance=tolerance,
        fallback=why,
    )


@dataclass(frozen=True)
class _Layer:
    """A module with parameters of its own that are to be checked, by their names in the model."""

    path: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    @property
    def groups(self) -> int:
        groups = getattr(self.module, "groups", 1)
        return groups if isinstance(groups, int) else 1


@dataclass(frozen=True)
class _Captured:
    """What gradbatch has found of one parameter."""

    grads: Tensor
    structure: str
    norms: Plan | None = None
    gradients: Plan | None = None


@dataclass(frozen=True)
class _Everything(Quantity):
    """The gradients themselves, and how they and their norms are evaluated; parameters come in the results' order."""

    name: ClassVar[str] = "verified"
    seen: list[_Captured] = field(default_factory=list)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        plans = grad.plan("squared_norm"), grad.plan("dense")
        self.seen.append(_Captured(grad.dense(), type(grad).__name__, *plans))
        return self.seen[-1].grads


def _arguments(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(inputs, Tensor):
        return [inputs], {}
    if isinstance(inputs, Mapping):
        return [], inputs
    if isinstance(inputs, (tuple, list)):
        return inputs, {}
    raise UsageError(
        f"inputs is a {type(inputs).__name__}; pass a tensor, a tuple of positional arguments or a dict of keyword "
        "arguments"
    )


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _layers(model: nn.Module, patterns: str | Iterable[str] | None) -> list[_Layer]:
    """The layers with parameters to check, after refusing what cannot even be run."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"verify takes a torch.nn.Module, not a {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(f"{name} is not initialized yet; call the model once before verify")
    wanted = None if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    layers: list[_Layer] = []
    taken: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        own = {f"{path}.{name}" if path else name: p for name, p in module.named_parameters(recurse=False)}
        matching = {
            name: parameter
            for name, parameter in own.items()
            if parameter.requires_grad
            and parameter not in taken
            and (wanted is None or any(fnmatchcase(n, w) for n in names[parameter] for w in wanted))
        }
        taken.update(matching.values())
        if matching:
            layers.append(_Layer(path, module, matching))
    if not layers:
        which = "trainable parameters" if wanted is None else f"trainable parameter named like {wanted}"
        raise UsageError(f"this {type(model).__name__} has no {which}: there is nothing to verify")
    return layers


def _capture(
    model: nn.Module, losses: Tensor, layers: Sequence[_Layer]
) -> tuple[dict[str, _Captured], dict[str, str]]:
    """Gradients by parameter name, and why not by path of the layer: all at once, or else layer by layer."""
    try:
        return _gradients(model, losses, [name for layer in layers for name in layer.parameters]), {}
    except GradBatchError:
        found, refusals = {}, {}
    assert losses.grad_fn is not None
    everything = [p for layer in layers for p in layer.parameters.values()]
    reached = {id(p) for p in graph.walk([losses.grad_fn], everything).accumulators.values()}
    for layer in layers:
        used = any(id(p) in reached for p in layer.parameters.values())
        gradients = _gradients_or_refusal(model, losses, layer, used)
        if isinstance(gradients, str):
            refusals[layer.path] = gradients
        else:
            found.update(gradients)
    return found, refusals


def _gradients_or_refusal(
    model: nn.Module, losses: Tensor, layer: _Layer, used: bool
) -> dict[str, _Captured] | str:
    try:
        return _gradients(model, losses, list(layer.parameters))
    except GradBatchError as error:
        if used or not isinstance(error, UsageError):
            return str(error)
    # To select nothing that a loss depends on is an error of the user's, but no reason to refuse a layer.
    zeros = {name: p.detach().new_zeros(len(losses), *p.shape) for name, p in layer.parameters.items()}
    return {name: _Captured(grads, "unused") for name, grads in zeros.items()}


def _gradients(model: nn.Module, losses: Tensor, names: Sequence[str]) -> dict[str, _Captured]:
    everything = _Everything()
    results = backward(model, losses, everything, parameters=[glob.escape(name) for name in names])
    return dict(zip(results[everything], everything.seen, strict=True))


def _row(
    layer: _Layer,
    found: Mapping[str, _Captured],
    refusal: str | None,
    errors: Mapping[str, float],
    maps: Mapping[str, str],
) -> LayerReport:
    name, kind, rule = layer.path or "(model)", type(layer.module).__name__, rule_for(layer.module)
    rule_name = rule.function.__name__ if rule is not None else ""
    if refusal is not None:
        return LayerReport(name, kind, rule_name, refusal)
    captured = [found[parameter] for parameter in layer.parameters]
    costliest = max(captured, key=lambda c: c.norms.flops if c.norms is not None else -1)
    return LayerReport(
        name,
        kind,
        rule_name,
        structure=costliest.structure,
        norms=costliest.norms,
        gradients=costliest.gradients,
        error=max(errors[parameter] for parameter in layer.parameters),
        maps={parameter: maps[parameter] for parameter in layer.parameters if parameter in maps},
    )
