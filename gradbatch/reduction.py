"""From the per-sample gradients of all parameters to the quantities asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradbatch.factors import PerSampleGrad
from gradbatch.plans.operands import full_precision
from gradbatch.quantities import Quantity
from gradbatch.quantities.calls import prepare, reduce


class Reducer:
    """Takes the gradients of one parameter after another, and reduces them to every quantity.

    What several operations need is materialised once, where that is faster. Joint quantities need all parameters'
    gradients at once, so that what is kept for them adds up; it is at most ``budget``.

    Args:
        quantities: what to compute.
        budget: bytes that may be kept.
        earlier: results of an earlier step, quantity by quantity, whose memory may be written to.
    """

    def __init__(
        self, quantities: Sequence[Quantity], budget: int, earlier: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        self._quantities, self._room = quantities, budget
        self._earlier = earlier or [{} for _ in quantities]
        self._operations = [operation for quantity in quantities for operation in quantity.operations]
        self._is_joint = any(quantity.joint for quantity in quantities)
        self._waiting: dict[str, PerSampleGrad] = {}
        self._tensors: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def take(self, name: str, grad: PerSampleGrad) -> None:
        """Reduce the gradients of a parameter, or keep them until those of all others are there.

        Args:
            name: of the parameter.
            grad: its per-sample gradients.
        """
        kept, growth = grad.keep(self._operations, self._room)
        if not self._is_joint:
            self._reduce(name, kept, self._quantities)
            return
        self._room -= growth
        self._waiting[name] = kept

    @torch.no_grad()
    def finish(self, names: Iterable[str]) -> list[tuple[Quantity, dict[str, Tensor]]]:
        """The quantities, prepared, with their tensors by parameter name.

        Args:
            names: of all parameters, in the order of the results.
        """
        quantities = self._quantities
        if self._is_joint:
            # In one order, whatever the order of the backward: sums over parameters are the same in every step.
            waiting = {name: self._waiting.pop(name) for name in names}
            quantities = [prepare(quantity, waiting) for quantity in quantities]
            for name in list(waiting):
                self._reduce(name, waiting.pop(name), quantities)
        return [
            (quantity, {name: self._tensors[name][number] for name in names})
            for number, quantity in enumerate(quantities)
        ]

    def _reduce(self, name: str, grad: PerSampleGrad, quantities: Sequence[Quantity]) -> None:
        with full_precision(grad.device):
            self._tensors[name] = [
                reduce(quantity, name, grad, earlier.get(name))
                for quantity, earlier in zip(quantities, self._earlier, strict=True)
            ]
