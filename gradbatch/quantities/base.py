"""What a quantity is: a name, and how the per-sample gradients of one parameter are reduced to a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from gradbatch.factors import PerSampleGrad


class Quantity(ABC):
    """Something derived from the per-sample gradients of a parameter.

    A subclass must define :attr:`name` and :meth:`reduce`, and may set the two flags. It is written with the operations
    of :class:`~gradbatch.PerSampleGrad` alone, so it works on every layer that has a rule, present and future.

    Attributes:
        name: attribute that ``attach=True`` sets on each parameter.
        additive: whether the quantity of all parameters together is the sum over parameters, as it is for squared norms
            and dot products; allows ``results[...].total()``.
        operations: what :meth:`reduce` asks of a ``PerSampleGrad``, by the names of the methods: several quantities may
            share what they need.
        joint: whether it looks at the gradients of all parameters before one is reduced; see :meth:`prepare`.

    Example:
        >>> import torch, gradbatch
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class BatchMaxAbs(gradbatch.Quantity):
        ...     name = "batch_max_abs"
        ...     def reduce(self, grad): return grad.dense().abs().flatten(1).amax(1)
        >>> model = gradbatch.extend(torch.nn.Linear(3, 2))
        >>> losses = model(torch.ones(4, 3)).sum(1)
        >>> gradbatch.backward(model, losses, BatchMaxAbs())[BatchMaxAbs]["weight"]
        tensor([1., 1., 1., 1.])
    """

    name: ClassVar[str]
    additive: ClassVar[bool] = False
    operations: ClassVar[tuple[str, ...]] = ("dense",)
    joint: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def prepare(self, grads: Mapping[str, PerSampleGrad]) -> Quantity:
        """What :meth:`reduce` is called of, once the gradients of all parameters are there; of use where ``joint``.

        Args:
            grads: by parameter name.
        """
        return self

    def of(self, name: str) -> Quantity:
        """What :meth:`reduce` is called of for one parameter; of use where parameters differ, as groups do.

        Args:
            name: of the parameter.
        """
        return self

    def reduce_into(self, grad: PerSampleGrad, out: Tensor | None) -> Tensor:
        """As :meth:`reduce`; where a quantity is large, into the memory of an earlier result of its own.

        Args:
            grad: of the parameter.
            out: what an earlier step returned for it; ``None``: nothing.
        """
        return self.reduce(grad)

    @abstractmethod
    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """Reduce the per-sample gradients of one parameter.

        Args:
            grad: ``N`` per-sample gradients of the parameter's shape, usually not materialised.
        """
