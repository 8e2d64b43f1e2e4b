"""From captured calls to per-sample gradients: hand each call to its rule, and add up what the rules yield."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from gradbatch.capture.probe import feature_axes
from gradbatch.capture.records import tensors_in
from gradbatch.capture.uses import Use
from gradbatch.errors import GradBatchError, RuleError
from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.plans.contractions import Planner
from gradbatch.rules import Call, RuleFunction, SampleLayout


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No graph, and no autocast to lower precision, whatever the surroundings are."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def evaluate(
    uses: Sequence[Use],
    gradients: Sequence[Sequence[Tensor | None]],
    layouts: Sequence[SampleLayout],
    samples: int,
    planner: Planner,
) -> dict[nn.Parameter, PerSampleGrad]:
    """Per-sample gradients of every parameter that a call contributes to.

    Args:
        uses: the calls.
        gradients: of each call's anchored outputs; ``None`` where none arrived.
        layouts: where the samples lie in them.
        samples: ``N``.
        planner: decides how the results will be evaluated.

    Raises:
        RuleError: a rule yields something that cannot be a per-sample gradient of its parameters.
    """
    result: dict[nn.Parameter, PerSampleGrad] = {}
    for use, arrived, layout in zip(uses, gradients, layouts, strict=True):
        if all(gradient is None for gradient in arrived):
            continue
        with plain_arithmetic(next(g for g in arrived if g is not None).device):
            for parameter, grad in _apply_rule(use, arrived, layout, samples):
                grad = grad.with_planner(planner)
                result[parameter] = result[parameter] + grad if parameter in result else grad
    return result


def zeros(parameter: nn.Parameter, samples: int) -> Dense:
    """Per-sample gradients of a parameter that no loss depends on."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return Dense(torch.zeros((), dtype=dtype, device=parameter.device).expand(samples, *parameter.shape))


def _apply_rule(
    use: Use, gradients: Sequence[Tensor | None], layout: SampleLayout, samples: int
) -> Iterator[tuple[nn.Parameter, PerSampleGrad]]:
    call = _call(use, gradients, layout)
    rule = use.record.rule
    assert rule is not None
    layer = f"the layer rule of {use.record.module_type.__name__} (at {use.name})"
    yielded = set()
    tensors = [*tensors_in((call.args, dict(call.kwargs))), *(g for g in gradients if g is not None)]
    borrowed = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for name, grad in _yielded(rule.function, call, layer):
        if name not in use.record.parameters:
            raise RuleError(
                f"{layer} yields {name!r}, which is no parameter of the layer: {[*use.record.parameters]}"
            )
        if name not in use.claimed:
            # Frozen, not selected, or without influence on the output: a rule need not ask.
            continue
        parameter = use.record.parameters[name]
        if not isinstance(grad, PerSampleGrad):
            raise RuleError(
                f"{layer} yields a {type(grad).__name__} for {name!r}; wrap a tensor [N, *shape] as gradbatch.Dense"
            )
        rows = samples * call.rows_per_sample
        if grad.shape != parameter.shape or grad.num_samples != rows:
            raise RuleError(
                f"{layer} yields per-sample gradients of shape {(grad.num_samples, *grad.shape)} for {name!r}; "
                f"expected {(rows, *parameter.shape)}"
            )
        if name in yielded:
            raise RuleError(f"{layer} yields {name!r} twice; add the two with + and yield their sum")
        yielded.add(name)
        if isinstance(grad, Dense) and grad.values.untyped_storage().data_ptr() in borrowed:
            grad = Dense(
                grad.values.clone()
            )  # results must not change with each other, or with the user's tensors
        yield parameter, grad.regroup(call.rows_per_sample) if call.rows_per_sample > 1 else grad
    missing = set(use.claimed) - yielded
    if missing:
        raise RuleError(f"{layer} yields nothing for {sorted(missing)}, which the layer's output depends on")


def _yielded(function: RuleFunction, call: Call, layer: str) -> Iterator[tuple[str, PerSampleGrad]]:
    """Run a rule, and say which rule it was if it fails."""
    try:
        yield from function(call)
    except GradBatchError as error:
        raise type(error)(f"{layer}: {error}") from error
    except Exception as error:
        shape = tuple(call.grad_output.shape) if isinstance(call.grad_output, Tensor) else "several outputs"
        raise RuleError(f"{layer} failed on an output gradient of shape {shape}: {error}") from error


def _call(use: Use, gradients: Sequence[Tensor | None], layout: SampleLayout) -> Call:
    record = use.record
    arrived = {
        anchor.index: g for (_, anchor), g in zip(use.anchors, gradients, strict=True) if g is not None
    }
    outputs = tuple(
        arrived[i] if i in arrived else torch.zeros(shape, dtype=dtype, device=device)
        for i, (shape, dtype, device) in enumerate(record.outputs)
    )
    return Call(
        module=record.module_as_called(),
        name=use.name,
        args=record.args,
        kwargs=record.kwargs,
        arguments=record.arguments(),
        raw_grad_output=outputs if record.returns_several else outputs[0],
        layout=layout,
        feature_axes=feature_axes(use, outputs[0].shape),
        training=record.training,
        needs=frozenset(use.claimed),
    )
