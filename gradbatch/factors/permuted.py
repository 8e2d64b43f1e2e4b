"""Gradients whose elements stand in another order than the parameter's: nothing is moved until someone wants to see."""

from collections.abc import Sequence

from torch import Tensor

from gradbatch.factors.base import PerSampleGrad
from gradbatch.plans.contractions import Planner


class Permuted(PerSampleGrad):
    """Per-sample gradients of a tensor of which the parameter is a permuted and reshaped copy.

    Norms and inner products do not depend on the order of elements, and a sum over samples is put in order once.

    Args:
        grad: gradients of the tensor.
        axes: of the tensor, in the parameter's order.
        shape: of the parameter; it has the permuted tensor's elements in their order.

    Example:
        >>> import torch
        >>> from gradbatch.factors import Dense
        >>> Permuted(Dense(torch.arange(6.0).view(1, 2, 3)), (1, 0), (6,)).dense()
        tensor([[0., 3., 1., 4., 2., 5.]])
    """

    def __init__(self, grad: PerSampleGrad, axes: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__(shape, grad.num_samples, [grad.dtype], grad.device)
        self.grad, self.axes, self.planner = grad, tuple(axes), grad.planner

    def _dense(self) -> Tensor:
        return self._ordered(self.grad._dense(), 1)

    def _select(self, index: Tensor) -> "Permuted":
        return Permuted(self.grad._select(index), self.axes, self.shape)

    def _part(self, start: int, stop: int) -> "Permuted":
        return Permuted(self.grad._part(start, stop), self.axes, self.shape)

    def _regroup(self, k: int) -> "Permuted":
        return Permuted(self.grad._regroup(k), self.axes, self.shape)

    def _planned(self, planner: Planner) -> "Permuted":
        self.grad = self.grad.with_planner(planner)
        return super()._planned(planner)

    def _keep(self, operations: Sequence[str], room: int) -> tuple[PerSampleGrad, int]:
        kept, growth = self.grad._keep(operations, room)
        return (self if kept is self.grad else Permuted(kept, self.axes, self.shape)), growth

    def _noise(self) -> Tensor:
        return self.grad._noise()

    def _sum(self) -> Tensor:
        return self._ordered(self.grad._sum(), 0)

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        return self._ordered(self.grad._weighted_sum(weights), 1)

    def _squared_norm(self) -> Tensor:
        return self.grad._squared_norm()

    def _sum_of_squares(self, center: Tensor | None) -> Tensor:
        squares = self.grad._sum_of_squares(None if center is None else self._reordered(center[None])[0])
        return self._ordered(squares, 0)

    def _moments(self) -> tuple[Tensor, Tensor]:
        mean, squares = self.grad._moments()
        return self._ordered(mean, 0), self._ordered(squares, 0)

    def _project(self, directions: Tensor) -> Tensor:
        return self.grad._project(self._reordered(directions))

    def _ordered(self, tensor: Tensor, leading: int) -> Tensor:
        """In the parameter's order: ``[*leading, *tensor's]`` to ``[*leading, *shape]``."""
        order = (*range(leading), *(leading + axis for axis in self.axes))
        return tensor.permute(order).reshape(*tensor.shape[:leading], *self.shape).contiguous()

    def _reordered(self, tensor: Tensor) -> Tensor:
        """In the tensor's order: ``[K, *shape]`` to ``[K, *tensor's]``."""
        sizes = [self.grad.shape[axis] for axis in self.axes]
        back = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return tensor.reshape(len(tensor), *sizes).permute(0, *(1 + axis for axis in back))

    def _details(self) -> str:
        return f", {self.grad!r}"

    def is_like(self, other: "Permuted") -> bool:
        """Whether the elements of both stand in the same order."""
        return self.axes == other.axes and self.grad.shape == other.grad.shape
