"""The forward pass that both sides of the comparison start from, and the model left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradbatch.api import extend, retract
from gradbatch.capture.arguments import tensors_in
from gradbatch.capture.hooks import recorder_of
from gradbatch.errors import UsageError


@dataclass(frozen=True)
class Forward:
    """A forward pass that both sides of the comparison start from.

    Args:
        model: the model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        batch_dim: axis of inputs and outputs that runs over samples.
        outputs: tensors that the model returned, by their place among all of them, as the losses are computed from
            them.
        losses: ``[N]``.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    batch_dim: int
    outputs: Mapping[int, Tensor]
    losses: Tensor

    def has_samples(self, value: Any) -> bool:
        """Whether a value is a tensor with a row for each sample."""
        dims, rows = self.batch_dim, len(self.losses)
        return isinstance(value, Tensor) and value.dim() > dims and value.shape[dims] == rows


def run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
) -> Forward:
    """Call the model, and make losses ``[N]`` of what it returns.

    Args:
        model: the model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        loss: from its output to losses ``[N]``; ``None`` to project every output onto random numbers.

    Raises:
        UsageError: the output has no row for each sample, or the losses are not ``[N]`` with a graph.
    """
    batch_dim = next((r.batch_dim for r in map(recorder_of, model.modules()) if r is not None), 0)
    output = model(*args, **kwargs)
    outputs = dict(enumerate(tensors_in(output)))
    if loss is None:
        # Views: what another output is computed from has gradients of its own and of that one.
        outputs = {i: t.view_as(t) if t.requires_grad else t for i, t in outputs.items()}
        inputs = [t for t in tensors_in((list(args), dict(kwargs))) if t.dim() > batch_dim]
        losses = _projections(outputs.values(), batch_dim, {t.shape[batch_dim] for t in inputs})
    else:
        losses = loss(output)
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise UsageError(
                f'loss returns losses [N], one a sample (reduction="none"); this one returns {got}'
            )
    if losses.grad_fn is None:
        raise UsageError("the losses do not depend on any trainable parameter through autograd")
    return Forward(model, args, kwargs, batch_dim, outputs, losses)


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Extend the model if it is not, and undo that and whatever running it changes, random state included."""
    extended = any(recorder_of(module) is not None for module in model.modules())
    training = {module: module.training for module in model.modules()}
    state: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (tensors, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    devices = {tensor.device for _, _, tensor, _ in state if tensor.is_cuda}
    try:
        with torch.random.fork_rng([*devices]):
            if not extended:
                extend(model)
            yield
    finally:
        if not extended:
            retract(model)
        for module, mode in training.items():
            module.training = mode
        with torch.no_grad():
            for tensors, name, tensor, value in state:
                tensors[name] = tensor
                # By value: BatchNorm's kernels update their statistics without counting it as a new version.
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as real and imaginary parts on a last axis; another one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _projections(tensors: Iterable[Tensor], batch_dim: int, rows: set[int]) -> Tensor:
    """Each sample's outputs, multiplied with random numbers of its own and added up, ``[N]``."""
    outputs = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    counts = [t.shape[batch_dim] for t in outputs if t.dim() > batch_dim]
    samples = next((count for count in counts if count in rows or not rows), None)
    if samples is None:
        raise UsageError(
            f"the model returns {[list(t.shape) for t in outputs]} for inputs with {sorted(rows)} rows on axis "
            f"{batch_dim}: what is a sample? Pass loss=, a function from the output to one loss a sample"
        )
    generator = torch.Generator().manual_seed(0)
    losses = []
    for values in (real(t) for t in outputs if t.dim() > batch_dim and t.shape[batch_dim] == samples):
        # In at least float32: a sum of half precision numbers would be rounding and little else.
        dtype = torch.promote_types(values.dtype, torch.float32)
        factors = torch.randn(values.shape, generator=generator, dtype=dtype).to(values.device)
        losses.append((values.to(dtype) * factors).movedim(batch_dim, 0).unsqueeze(-1).flatten(1).sum(1))
    return torch.stack([each.to(losses[0]) for each in losses]).sum(0)
