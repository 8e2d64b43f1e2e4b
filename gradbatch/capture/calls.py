"""Calls as rules are handed them, and what the rules yield; calls of one layer in a loop are joined to one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradbatch.capture.arguments import is_plain, tensors_in
from gradbatch.capture.records import version_of
from gradbatch.capture.uses import Use
from gradbatch.errors import GradBatchError, RuleError
from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.rules import Call, Layout, RuleFunction, SampleLayout


def call_of(use: Use, gradients: Sequence[Tensor | None], layout: Layout) -> Call:
    """A recorded call as its rule takes it.

    Args:
        use: the call.
        gradients: of its anchored outputs; ``None`` where none arrived.
        layout: where the samples lie in them.
    """
    record = use.record
    arrived = {
        anchor.index: g for (_, anchor), g in zip(use.anchors, gradients, strict=True) if g is not None
    }
    outputs = tuple(
        arrived[i] if i in arrived else use.arranged(i, torch.zeros(shape, dtype=dtype, device=device))
        for i, (shape, dtype, device) in enumerate(record.outputs)
    )
    return Call(
        module=use.module,
        name=use.name,
        args=record.args,
        kwargs=record.kwargs,
        arguments=use.arguments,
        raw_grad_output=outputs if record.returns_several else outputs[0],
        layout=layout,
        feature_axes=use.feature_axes(outputs[0].dim()),
        training=record.training,
        needs=frozenset(use.claimed),
        outputs=tuple(use.arranged(i, output) for i, output in enumerate(record.unchanged_outputs())),
        kept=use.kept(),
    )


def joined(calls: Sequence[Call]) -> Call:
    """Several calls that :func:`likeness` does not tell apart, as one with the rows of all of them."""
    first, *others = calls
    if not others:
        return first

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(list(values))
        if isinstance(values[0], tuple):
            return tuple(join(parts) for parts in zip(*values, strict=True))
        return values[0]

    return replace(
        first,
        args=join([call.args for call in calls]),
        kwargs={name: join([call.kwargs[name] for call in calls]) for name in first.kwargs},
        arguments={name: join([call.arguments[name] for call in calls]) for name in first.arguments},
        raw_grad_output=join([call.raw_grad_output for call in calls]),
        outputs=join([call.outputs for call in calls]),
    )


def likeness(use: Use, call: Call) -> Hashable | None:
    """What calls have in common that may be joined, row by row; ``None`` if this one cannot be joined with any.

    Each row of what such a layer returns depends on the same row of each tensor that it is given, and samples that lie
    on an axis of rows lie there as well when more rows follow.
    """
    layout, output, features = call.layout, call.raw_grad_output, call.feature_axes
    if not (isinstance(layout, SampleLayout) and isinstance(output, Tensor)):
        return None
    if layout.axis is None or features is None:
        return None
    rows = output.shape[: output.dim() - features]
    looks: list[Hashable] = []
    for name, value in (("", output), *call.arguments.items(), *(("", each) for each in call.outputs)):
        if isinstance(value, Tensor) and rows and value.shape[: len(rows)] == rows:
            looks.append((name, value.shape[1:], value.dtype, value.device))
        elif is_plain(value):
            looks.append((name, value))
        else:
            return None
    settings = tuple(use.record.settings.items())
    return (
        use.record.module_id,
        settings,
        call.training,
        call.needs,
        layout,
        tuple(call.kwargs),
        tuple(looks),
    )


def yielded_by(use: Use, call: Call, samples: int) -> Iterator[tuple[nn.Parameter, PerSampleGrad]]:
    """Hand a call to its rule.

    Args:
        use: the call, or one of those that it was joined of.
        call: as the rule takes it.
        samples: ``N``.

    Raises:
        RuleError: the rule yields something that cannot be a per-sample gradient of its parameters.
    """
    rule = use.record.rule
    assert rule is not None
    layer = f"the layer rule of {use.record.module_type.__name__} (at {use.name})"
    yielded = set()
    rows_each = call.rows_per_sample
    rows = samples * rows_each
    tensors = tensors_in((call.args, dict(call.kwargs), call.raw_grad_output, call.outputs, dict(call.kept)))
    borrowed: set[int] = set()
    versions = [*map(version_of, tensors)]
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
        if grad.shape != parameter.shape or grad.num_samples != rows:
            raise RuleError(
                f"{layer} yields per-sample gradients of shape {(grad.num_samples, *grad.shape)} for {name!r}; "
                f"expected {(rows, *parameter.shape)}"
            )
        if name in yielded:
            raise RuleError(f"{layer} yields {name!r} twice; add the two with + and yield their sum")
        yielded.add(name)
        if isinstance(grad, Dense):  # results must not change with each other, or with the user's tensors
            borrowed = borrowed or {tensor.untyped_storage().data_ptr() for tensor in tensors}
            if grad.values.untyped_storage().data_ptr() in borrowed:
                grad = Dense(grad.values.clone())
        yield parameter, grad.regroup(rows_each) if rows_each > 1 else grad
    if [*map(version_of, tensors)] != versions:
        raise RuleError(
            f"{layer} changes an argument or an output gradient in place, which others read too; use the out-of-place "
            "operation"
        )
    missing = set(use.claimed) - yielded
    if missing:
        raise RuleError(f"{layer} yields nothing for {sorted(missing)}, which the layer's output depends on")


def _yielded(function: RuleFunction, call: Call, layer: str) -> Iterator[tuple[str, PerSampleGrad]]:
    """Run a rule, and say which rule it was if it fails."""
    try:
        yielded: object = function(call)
        if not isinstance(yielded, Iterable):
            returned = "nothing" if yielded is None else f"a {type(yielded).__name__}"
            raise RuleError(
                f"it returns {returned}; let it yield pairs of a parameter's name and its PerSampleGrad"
            )
        for item in yielded:
            if not isinstance(item, tuple) or len(item) != 2:
                raise RuleError(f"it yields {item!r}, not pairs of a parameter's name and its PerSampleGrad")
            yield item
    except GradBatchError as error:
        raise type(error)(f"{layer}: {error}") from error
    except torch.OutOfMemoryError:
        raise  # whoever catches it tries smaller batches, whatever it was raised in
    except Exception as error:
        shape = tuple(call.grad_output.shape) if isinstance(call.grad_output, Tensor) else "several outputs"
        raise RuleError(f"{layer} failed on an output gradient of shape {shape}: {error}") from error
