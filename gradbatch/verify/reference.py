"""The reference: the same per-sample gradients, from torch alone.

``torch.func.vmap`` of ``grad`` runs the model on one sample at a time and knows nothing of rules and captures. Where it
cannot run, or runs something else than the batch did (dropout), one backward pass of the batch a sample replaces it.
Never a loop over batches of one sample: some kernels are wrong there (BatchNorm's backward on the CPU, torch 2.13).
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradbatch.capture import graph, paths
from gradbatch.capture.arguments import tensors_in
from gradbatch.errors import UsageError
from gradbatch.verify.forward import Forward, real

VMAP = "torch.func.vmap"
ONE_BY_ONE = "one backward pass a sample"


def reference(
    forward: Forward, parameters: Mapping[str, nn.Parameter], tolerance: float
) -> tuple[dict[str, Tensor], str, str]:
    """Per-sample gradients by torch alone.

    Args:
        forward: model, inputs, outputs and losses; the graph is kept.
        parameters: what to differentiate with respect to.
        tolerance: a hundred times as far the sum over samples may be from the gradient of the summed losses.

    Returns:
        ``[N, *shape]`` by name; in words how they were computed, and why not by ``vmap`` (empty if they were).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operator has no fast path under vmap
            grads = _by_vmap(forward, parameters)
    except Exception as error:
        # Anything may happen when somebody's model runs under vmap; whatever it is, the other reference remains.
        message = str(error).removeprefix("vmap: ").rstrip(".") or type(error).__name__
        reason = textwrap.shorten(message, 200, placeholder=" …")
        return _one_by_one(forward, parameters), ONE_BY_ONE, f"it cannot run this model ({reason})"
    batch = _gradients(forward, parameters, torch.ones_like(forward.losses))
    sums = {name: grad.sum(0, keepdim=True) for name, grad in grads.items()}
    wanted = {name: grad.unsqueeze(0) for name, grad in batch.items()}
    # A sum cancels and so rounds more than its terms do; what is to be caught here is far larger.
    if max(relative_errors(sums, wanted, tolerance).values()) > 100 * tolerance:
        reason = "under it the model computes something else than on the batch"
        return _one_by_one(forward, parameters), ONE_BY_ONE, reason
    return grads, VMAP, ""


def relative_errors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> dict[str, float]:
    """Largest error of each parameter's gradients, relative to what was expected of the sample.

    Args:
        actual: ``[N, *shape]`` by name.
        expected: the reference, likewise.
        tolerance: its fourth root times a sample's largest entry in any parameter is the least that an error is
            relative to. A gradient that is zero but for rounding, such as that of a bias before a normalisation,
            would differ from itself otherwise.

    Edge cases: NaN agrees with NaN and infinity with itself; otherwise they are infinite errors.
    """
    errors = dict.fromkeys(actual, 0.0)
    rows = {
        name: grad.detach().double().reshape(len(grad), -1) for name, grad in expected.items() if grad.numel()
    }
    if not rows:
        return errors
    scales = {name: torch.where(grad.isfinite(), grad.abs(), 0).amax(1).cpu() for name, grad in rows.items()}
    floor = torch.stack(list(scales.values())).amax(0) * tolerance**0.25
    for name, wanted in rows.items():
        got = actual[name].detach().double().reshape(wanted.shape)
        same = (got == wanted) | (got.isnan() & wanted.isnan())
        differences = torch.where(same, 0, (got - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf))
        scale = torch.maximum(scales[name], floor)
        # Where nothing but zeros was expected of a sample, the error is absolute.
        errors[name] = float((differences.amax(1).cpu() / torch.where(scale > 0, scale, 1)).max())
    return errors


def _gradients(
    forward: Forward, parameters: Mapping[str, nn.Parameter], weights: Tensor
) -> dict[str, Tensor]:
    """Gradients of the weighted sum of the losses; zeros where a parameter has no part in it."""
    found = _differentiate(forward, list(parameters.values()), weights)
    pairs = zip(parameters.items(), found, strict=True)
    return {
        name: torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for (name, p), g in pairs
    }


def _differentiate(
    forward: Forward, parameters: Sequence[nn.Parameter], weights: Tensor
) -> Sequence[Tensor | None]:
    root = forward.losses.grad_fn
    assert root is not None
    if not any(map(graph.is_checkpoint, paths.walk([root], []).order())):
        return torch.autograd.grad(forward.losses, parameters, weights, retain_graph=True, allow_unused=True)
    # Only a plain backward goes through a reentrant checkpoint; it adds to every leaf's .grad.
    inputs = [t for t in tensors_in((forward.args, forward.kwargs)) if t.is_leaf]
    kept = [(leaf, leaf.grad) for leaf in (*forward.model.parameters(), *inputs)]
    try:
        for leaf, _ in kept:
            leaf.grad = None
        torch.autograd.backward(forward.losses, weights, retain_graph=True)
        return [parameter.grad for parameter in parameters]
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


def _one_by_one(forward: Forward, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """One backward pass of the whole batch for each sample, with its loss alone."""
    one_hots = torch.eye(len(forward.losses), dtype=forward.losses.dtype, device=forward.losses.device)
    rows = [_gradients(forward, parameters, weights) for weights in one_hots]
    return {
        name: torch.stack([row[name] for row in rows]) if rows else p.detach().new_zeros(0, *p.shape)
        for name, p in parameters.items()
    }


def _by_vmap(forward: Forward, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """``vmap`` of ``grad`` over the samples of inputs and outputs.

    The losses are replaced by their linear parts: what each output is multiplied with. So they may be computed from
    targets of the whole batch, which a function of one sample could not index.
    """
    outputs = [(i, t) for i, t in forward.outputs.items() if t.requires_grad]
    found = torch.autograd.grad(
        forward.losses.sum(), [t for _, t in outputs], retain_graph=True, allow_unused=True
    )
    factors = {i: g for (i, _), g in zip(outputs, found, strict=True) if g is not None}
    dim, args, kwargs = forward.batch_dim, dict(enumerate(forward.args)), dict(forward.kwargs)
    if not factors or not all(map(forward.has_samples, factors.values())):
        raise UsageError("the losses come from something else than outputs with a batch axis")

    def loss(values: dict[str, Tensor], inputs: dict[Any, Tensor], factors: dict[int, Tensor]) -> Tensor:
        inputs = {key: tensor.unsqueeze(dim) for key, tensor in inputs.items()}
        output = torch.func.functional_call(
            forward.model,
            values,
            tuple(inputs.get(key, value) for key, value in args.items()),
            {key: inputs.get(key, value) for key, value in kwargs.items()},
        )
        results = dict(enumerate(tensors_in(output)))
        parts = [(real(results[i]) * real(factor.unsqueeze(dim))).sum() for i, factor in factors.items()]
        return torch.stack(parts).sum()

    inputs = {k: value.detach() for k, value in (args | kwargs).items() if forward.has_samples(value)}
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    grads: dict[str, Tensor] = torch.func.vmap(torch.func.grad(loss), in_dims=(None, dim, dim))(
        values, inputs, factors
    )
    return grads
