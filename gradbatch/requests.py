"""What is asked for, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from gradbatch.capture.hooks import recorder_of
from gradbatch.errors import UsageError
from gradbatch.quantities import Quantity
from gradbatch.results import Results


def check_request(model: nn.Module, quantities: Sequence[Quantity]) -> None:
    """Refuse what is no extended model, or no list of quantities (:class:`UsageError`)."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument is the extended model, not a {type(model).__name__}")
    if all(recorder_of(module) is None for module in model.modules()):
        raise UsageError(
            f"this {type(model).__name__} is not extended; call gradbatch.extend(model) before the forward"
        )
    if not quantities:
        raise UsageError("no quantity asked for; pass one or more, such as gradbatch.BatchGrad()")
    for quantity in quantities:
        if isinstance(quantity, type) and issubclass(quantity, Quantity):
            raise UsageError(f"{quantity.__name__} is a class; pass an instance, {quantity.__name__}()")
        if not isinstance(quantity, Quantity):
            raise UsageError(
                f"a quantity is an instance of gradbatch.Quantity, not a {type(quantity).__name__}"
            )


def allows_coupling(samples_coupled: str) -> bool:
    """Whether samples may depend on each other; :class:`UsageError` if that is neither refused nor allowed."""
    if samples_coupled not in ("refuse", "allow"):
        raise UsageError(f'samples_coupled is {samples_coupled!r}; it is "refuse" or "allow"')
    return samples_coupled == "allow"


def check_losses(losses: Tensor) -> None:
    """Refuse what is no vector of real losses with a graph (:class:`UsageError`)."""
    if not isinstance(losses, Tensor):
        raise UsageError(f"losses is a tensor [N], one loss a sample, not a {type(losses).__name__}")
    if losses.dim() == 0:
        raise UsageError(
            'the loss is a scalar, but losses [N] are needed, one a sample: compute it with reduction="none", or run '
            "your own loss.backward() inside gradbatch.compute(..., loss_reduction=...)"
        )
    if losses.dim() != 1:
        raise UsageError(
            f"losses have shape {tuple(losses.shape)}, but [N] is needed, one a sample: sum or average over the other "
            "axes, e.g. losses.flatten(1).sum(1)"
        )
    if losses.grad_fn is None:
        raise UsageError(
            "the losses have no graph: compute them with gradients enabled, from the extended model"
        )
    if losses.is_complex():
        raise UsageError("the losses are complex; a loss is a real number")


def check_out(out: object) -> None:
    """Refuse what is no earlier step's results to write to (:class:`UsageError`)."""
    if out is not None and not isinstance(out, Results):
        raise UsageError(
            f"out is a {type(out).__name__}; it takes all of what backward or compute returned in an earlier step "
            "(results, not results[BatchGrad])"
        )
