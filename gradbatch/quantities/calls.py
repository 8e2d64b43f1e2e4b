"""A quantity called: what goes wrong in it says which quantity it was, and of which parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gradbatch.errors import GradBatchError, QuantityError
from gradbatch.factors import PerSampleGrad
from gradbatch.quantities.base import Quantity


def prepare(quantity: Quantity, grads: Mapping[str, PerSampleGrad]) -> Quantity:
    """What the gradients of all parameters are to be reduced by.

    Args:
        quantity: as it was asked for.
        grads: by parameter name.

    Raises:
        QuantityError: its ``prepare`` failed, or returned no quantity.
    """
    called = f"{type(quantity).__name__}.prepare"
    try:
        prepared = quantity.prepare(grads)
    except torch.OutOfMemoryError:
        raise  # whoever catches it tries smaller batches, whatever it was raised in
    except Exception as error:
        raise _explained(error, called, f"on {len(grads)} parameters", grads.values()) from error
    if not isinstance(prepared, Quantity):
        raise QuantityError(
            f"{called} returned {_a(prepared)}; let it return the quantity to reduce with, self or another"
        )
    return prepared


def reduce(quantity: Quantity, name: str, grad: PerSampleGrad, out: Tensor | None) -> Tensor:
    """The quantity of one parameter.

    Args:
        quantity: prepared.
        name: of the parameter.
        grad: of the parameter.
        out: see :meth:`~gradbatch.Quantity.reduce_into`.

    Raises:
        QuantityError: its ``reduce`` failed, or returned no tensor.
    """
    called = f"{type(quantity).__name__}.reduce"
    try:
        tensor = quantity.of(name).reduce_into(grad, out)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _explained(error, called, f"on {_gradients(name, grad)}", [grad]) from error
    if not isinstance(tensor, Tensor):
        raise QuantityError(
            f"{called} returned {_a(tensor)} for {_gradients(name, grad)}; let it return a tensor"
        )
    return tensor


def _explained(error: Exception, called: str, where: str, grads: Iterable[PerSampleGrad]) -> Exception:
    if isinstance(error, GradBatchError):
        return type(error)(f"{called} {where}: {error}")
    message = f"{called} failed {where}: {type(error).__name__}: {error}"
    # Most likely they were taken for tensors.
    if any(type(grad).__name__ in str(error) for grad in grads):
        message += ". Gradients come as a PerSampleGrad; grad.dense() is a tensor [N, *shape]"
    return QuantityError(message)


def _gradients(name: str, grad: PerSampleGrad) -> str:
    return f"{name} {[grad.num_samples, *grad.shape]}"


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
