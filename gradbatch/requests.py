"""What is asked for, checked before anything is computed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn

from gradbatch.capture.hooks import recorder_of
from gradbatch.errors import UsageError
from gradbatch.plans.choice import PLANS
from gradbatch.quantities import Quantity
from gradbatch.results import Results


def check_request(model: nn.Module, quantities: Sequence[Quantity], attach: bool = False) -> None:
    """Refuse what is no extended model, or no list of quantities (:class:`UsageError`).

    Args:
        model: the model.
        quantities: what was asked for.
        attach: whether results become attributes of the parameters.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument is the extended model, not a {type(model).__name__}")
    if all(recorder_of(module) is None for module in model.modules()):
        raise UsageError(
            f"this {type(model).__name__} is not extended; call gradbatch.extend(model) before the forward"
        )
    if not quantities:
        raise UsageError("no quantity asked for; pass one or more, such as gradbatch.BatchGrad()")
    for quantity in quantities:
        _check_quantity(quantity)
    if attach:
        _check_attributes(quantities)


def _check_attributes(quantities: Sequence[Quantity]) -> None:
    """Refuse names that attributes of a parameter cannot have."""
    found: dict[str, Quantity] = {}
    for quantity in quantities:
        if hasattr(Tensor, quantity.name):
            raise UsageError(
                f"attach: {type(quantity).__name__} is named {quantity.name!r}, which every tensor has already; choose "
                "another name, or read the results"
            )
        if found.setdefault(quantity.name, quantity) is not quantity:
            raise UsageError(
                f"attach: {found[quantity.name]!r} and {quantity!r} are both named {quantity.name!r}, and the "
                "parameters would have the last one; read the results, or ask for one of them"
            )


def _check_quantity(quantity: object) -> None:
    if isinstance(quantity, type) and issubclass(quantity, Quantity):
        raise UsageError(
            f"{quantity.__name__} is a class; pass an instance, such as {_instance_of(quantity)}"
        )
    if not isinstance(quantity, Quantity):
        hints = {
            str: '; quantities are objects, such as BatchGrad(), and options go by name, such as reduction="mean"',
            Sequence: "; pass several one by one, as in backward(model, losses, BatchGrad(), BatchL2Grad())",
            Tensor: "; the losses come before the quantities, as one vector [N]",
        }
        raise UsageError(
            f"a quantity is an instance of gradbatch.Quantity, not a {type(quantity).__name__}"
            f"{next((hint for kind, hint in hints.items() if isinstance(quantity, kind)), '')}"
        )
    kind = type(quantity)
    if not isinstance(getattr(quantity, "name", None), str):
        raise UsageError(f'{kind.__name__} has no name; give the class one: name = "{kind.__name__.lower()}"')
    if kind.prepare is not Quantity.prepare and not quantity.joint:
        raise UsageError(f"{kind.__name__}.prepare would never be called; set joint = True in the class")
    operations: object = quantity.operations
    if not isinstance(operations, (tuple, list)) or not set(operations) <= PLANS.keys():
        raise UsageError(
            f"{kind.__name__}.operations is {operations!r}; it is a tuple of what reduce asks of a PerSampleGrad, from "
            f"{', '.join(PLANS)}"
        )


def _instance_of(kind: type[Quantity]) -> str:
    """How an instance is made: with those arguments that have no default."""
    if inspect.isabstract(kind):
        return "gradbatch.BatchGrad()"
    arguments = inspect.signature(kind).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [a.name for a in arguments if a.default is a.empty and a.kind not in several]
    return f"{kind.__name__}({', '.join(f'{name}=...' for name in needed)})"


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
            "the losses have no graph: compute them from the extended model, with gradients enabled (not under "
            "torch.no_grad) and without detach() on the way"
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
