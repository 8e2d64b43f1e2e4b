"""The clipped sum of one logical batch: in ``p.grad``, and the proof that nobody else has touched it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradbatch.errors import UsageError
from gradbatch.privacy.distributed import is_sharded


class Accumulation:
    """Clipped sums of the parts of a logical batch, in ``p.grad``, until noise is added.

    A gradient that is still the same tensor, with autograd's count of changes in place and the norm that it had, is
    what was left there: changes by way of ``.data``, or by a GradScaler, are not counted. Parameters in half precision
    get their sums added up in float32, beside ``p.grad``. The sum of a parameter that is sharded over processes is of
    the whole parameter, and its ``p.grad`` is empty until then.
    """

    def __init__(self) -> None:
        self.sums: dict[nn.Parameter, Tensor] = {}
        self._left: dict[nn.Parameter, Tensor] = {}
        self._noted: list[tuple[int, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self.sums)

    def check_free(self, names: Mapping[nn.Parameter, str]) -> None:
        """Refuse gradients that somebody else has left in ``p.grad`` (:class:`UsageError`)."""
        for parameter, name in names.items():
            if parameter.grad is not None and _has_numbers(parameter.grad):
                raise UsageError(
                    f"{name} has a gradient before private.backward: call optimizer.zero_grad() after every step, and "
                    "no loss.backward() of your own"
                )

    def check_untouched(self, names: Mapping[nn.Parameter, str]) -> None:
        """Refuse where ``p.grad`` is not what :meth:`add` left there (:class:`UsageError`)."""
        for parameter in self.sums.keys() - self._left.keys():
            if parameter.grad is not None:
                raise _changed(names.get(parameter))
        if not self._left:
            return
        norms = torch._foreach_norm(list(self._left.values()))
        device, same = norms[0].device, []
        for norm, (parameter, grad), (version, before) in zip(
            norms, self._left.items(), self._noted, strict=True
        ):
            if parameter.grad is None:
                raise UsageError(
                    f"the gradient of {names.get(parameter)} is gone: optimizer.zero_grad() was called between "
                    "private.backward and optimizer.step(); private.discard() drops the batch"
                )
            if parameter.grad is not grad or grad._version != version:
                raise _changed(names.get(parameter))
            same.append((norm == before).to(device))
        for parameter, kept in zip(self._left, torch.stack(same).tolist(), strict=True):
            if not kept:
                raise _changed(names.get(parameter))

    def check_covers(self, names: Mapping[nn.Parameter, str]) -> None:
        """Refuse a parameter that a step would change by a gradient that is none of the sums (:class:`UsageError`)."""
        for parameter, name in names.items():
            if parameter not in self.sums and (parameter.requires_grad or parameter.grad is not None):
                raise UsageError(
                    f"{name} is in the optimizer, but was not among the parameters that private.backward clipped "
                    "(unfrozen or added since, or with a gradient from elsewhere); call optimizer.zero_grad() and "
                    "private.discard()"
                )

    def check_same(self, parameters: Mapping[nn.Parameter, str]) -> None:
        """Refuse other parameters than those of the first part (:class:`UsageError`)."""
        if self.sums and self.sums.keys() != parameters.keys():
            raise UsageError(
                "parameters were frozen or unfrozen between two parts of a batch; private.discard() drops the batch"
            )

    def add(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        """Add the sums of a part."""
        for parameter, total in sums.items():
            if parameter in self.sums:
                self.sums[parameter] += total
            else:
                self.sums[parameter] = total
            if is_sharded(parameter):
                parameter.grad = None
            else:
                self._left[parameter] = parameter.grad = self.sums[parameter].to(parameter.dtype)
        if self._left:
            norms = torch._foreach_norm(list(self._left.values()))
            self._noted = [
                (grad._version, norm) for grad, norm in zip(self._left.values(), norms, strict=True)
            ]

    def release(self, totals: Mapping[Any, Tensor], divisor: float) -> None:
        """Leave the noised totals in ``p.grad``, divided."""
        for parameter in self.sums:
            parameter.grad = totals[parameter].div_(divisor).to(parameter.dtype)

    def hand_over(self) -> None:
        """Leave ``p.grad`` to the optimizer, and begin anew."""
        self.sums, self._left, self._noted = {}, {}, []

    def discard(self) -> None:
        """Drop the sums, and take them out of ``p.grad``."""
        for parameter, grad in self._left.items():
            if parameter.grad is grad:
                parameter.grad = None
        self.hand_over()


def _has_numbers(grad: Any) -> bool:
    own = grad.to_local() if is_sharded(grad) else grad
    return bool(own.is_sparse or own.any())


def _changed(name: str | None) -> UsageError:
    return UsageError(
        f"the gradient of {name} is not what private.backward left: a loss.backward(), gradient clipping, a GradScaler "
        "or a hook has changed it, and no noise covers what it is now. private.discard() drops the batch"
    )


def names_of(
    model: nn.Module, optimizer: Optimizer, known: Mapping[nn.Parameter, str] | None = None
) -> dict[nn.Parameter, str]:
    """What the parameters of an optimizer are called in the model, or by their shape if they are not in it.

    Args:
        model: the model.
        optimizer: the optimizer.
        known: names found earlier. After a forward of ``fully_shard``, a module has whole parameters in place of those
            that the optimizer has.
    """
    own = {parameter: name for name, parameter in model.named_parameters()}
    sharded = {parameter: name for parameter, name in (known or {}).items() if is_sharded(parameter)}
    return {
        parameter: own.get(parameter)
        or sharded.get(parameter, f"a parameter of shape {list(parameter.shape)}")
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
