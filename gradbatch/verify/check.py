"""The cross-check itself: run the model once, and compare two ways to its per-sample gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gradbatch.blockmap import block_map
from gradbatch.errors import UsageError
from gradbatch.selection import matching
from gradbatch.verify.findings import Gradients, coarsest_dtype, find
from gradbatch.verify.forward import left_as_it_was, run
from gradbatch.verify.reference import reference, relative_errors
from gradbatch.verify.report import ParameterReport, Report

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
    """Compare a model's per-sample gradients with those of ``torch.func.vmap``, parameter by parameter.

    Run it in float64 where you can: in float32 a small mistake looks like rounding. Where ``vmap`` cannot run the
    model, or something random happens in it, the reference is one backward pass a sample; the report says which it was.

    Args:
        model: extended or not; it is left as it was, training mode, gradients, hooks and buffers included.
        inputs: what to call it with: a tensor, positional arguments, or keyword arguments by name.
        loss: from the model's output to losses ``[N]``. By default every output is projected onto random numbers,
            which leaves no part of it out.
        device: where to check a copy of the model; by default the model itself is checked where it is.
        tolerance: largest error that still agrees; by default 1e-10 in float64, 1e-4 in float32, 2e-2 in half
            precision, whichever is coarsest between parameters and losses. Errors are relative to the largest entry of
            the sample's gradient of the parameter, or, if that is larger, to the fourth root of the tolerance times
            its largest entry in all parameters.
        parameters: name pattern or patterns of the parameters to check.

    Returns:
        A report with a row for each parameter; ``report.ok``, or ``report.raise_for_mismatch()``.

    Raises:
        UsageError: nothing to check, a lazy module that is not materialised, no output with a row for each sample, or
            losses that are not ``[N]``. What the model itself raises is passed on. Refusals are in the report.

    Edge cases: frozen parameters are left out; a tied parameter stands under the first of its names.

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch.verify import verify
        >>> model = torch.nn.Sequential(torch.nn.Conv1d(4, 6, 3, groups=2), torch.nn.ReLU()).double()
        >>> report = verify(model, torch.randn(5, 4, 8, dtype=torch.double))
        >>> report.ok, report.reference, [(row.name, row.rule) for row in report.parameters]
        (True, 'torch.func.vmap', [('0.weight', 'convolution'), ('0.bias', 'convolution')])
    """
    args, kwargs = _arguments(inputs)
    if device is not None:
        model = copy.deepcopy(model).to(device)
        args, kwargs = [_moved(a, device) for a in args], {k: _moved(a, device) for k, a in kwargs.items()}
    wanted = _wanted(model, parameters)
    dtype = min((parameter.dtype for parameter in wanted.values()), key=lambda dtype: torch.finfo(dtype).bits)
    with left_as_it_was(model), torch.enable_grad():
        forward = run(model, args, kwargs, loss)
        coarsest = coarsest_dtype(forward.losses, wanted.values())
        if tolerance is None:
            tolerance = _TOLERANCES.get(coarsest, _HALF_TOLERANCE)
        findings = find(model, forward.losses, wanted)
        compared = {name: wanted[name] for name in wanted if name in findings.gradients}
        expected, how, why = reference(forward, compared, tolerance) if compared else ({}, "", "")
    actual = {name: findings.gradients[name].values for name in compared}
    errors = relative_errors(actual, expected, tolerance)
    maps = {
        name: block_map(actual[name], expected[name], _groups(model, name), tolerance)
        for name, error in errors.items()
        if error > tolerance
    }
    return Report(
        model=type(model).__name__,
        parameters=[
            _compared(name, parameter.shape, findings.gradients[name], errors[name], maps.get(name, ""))
            if name in errors
            else ParameterReport(name, parameter.shape, refusal=findings.refusals[name])
            for name, parameter in wanted.items()
        ],
        samples=len(forward.losses),
        dtype=dtype,
        device=forward.losses.device,
        reference=how,
        tolerance=tolerance,
        fallback=why,
        node_calls=findings.node_calls,
        coarsest=coarsest,
    )


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


def _wanted(model: nn.Module, patterns: str | Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to check by the first of their names, after refusing what cannot even be run."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"verify takes a torch.nn.Module, not a {type(model).__name__}")
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(f"{name} is not initialized yet; call the model once before verify")
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return {own[0]: parameter for parameter, own in matching(model, names, patterns).items()}


def _groups(model: nn.Module, name: str) -> int:
    """Groups of the layer that a parameter belongs to."""
    groups = getattr(model.get_submodule(name.rpartition(".")[0]), "groups", 1)
    return groups if isinstance(groups, int) else 1


def _compared(name: str, shape: torch.Size, found: Gradients, error: float, drawn: str) -> ParameterReport:
    return ParameterReport(
        name,
        shape,
        found.uses,
        structure=found.structure,
        norms=found.norms,
        gradients=found.gradients,
        flops=found.flops,
        bytes=found.bytes,
        error=error,
        map=drawn,
    )
