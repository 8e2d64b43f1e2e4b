"""Sums of outer products over positions: linear layers, convolutions, attention projections, recurrent gates."""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.errors import RuleError
from gradbatch.factors.base import PerSampleGrad
from gradbatch.factors.blocks import Blocks
from gradbatch.factors.dense import Dense, check_devices, check_floating
from gradbatch.factors.permuted import Permuted
from gradbatch.plans.contractions import Plan, accumulation_dtype, select
from gradbatch.plans.convolutions import Patches
from gradbatch.plans.keeping import growth, keep, pays_to_keep
from gradbatch.plans.kernels import rounding
from gradbatch.plans.positions import Positions
from gradbatch.plans.slabs import Operand, part


class OuterProduct(PerSampleGrad):
    r"""Per-sample gradients that are sums over positions of outer products, group by group.

    .. math:: g_n[\gamma] = \sum_t \ell_{n\gamma t}\, r_{n\gamma t}^\top

    Args:
        left: ``[N, G, P, T]``, usually output gradients; a transposed convolution has its input here.
        right: ``[N, G, D, T]``, usually inputs, or patches that are unfolded only by plans that want them.
        shape: shape of the parameter; its ``G * P * D`` elements in this order.

    Raises:
        RuleError: when ranks, sizes, devices or dtypes do not fit together.

    Edge cases: ``T = 0`` (an empty sequence) gives zero gradients; ``N = 0`` gives empty results.
    """

    def __init__(self, left: Tensor, right: Operand, shape: Sequence[int]) -> None:
        if wrong := _what_is_wrong(left.shape, right.shape, shape):
            sizes = f"left {list(left.shape)}, right {list(right.shape)}, shape {list(shape)}"
            raise RuleError(f"OuterProduct {wrong}: {sizes}.")
        check_floating("OuterProduct", left=left.dtype, right=right.dtype)
        check_devices("OuterProduct", [left.device, right.device])
        super().__init__(shape, left.shape[0], [left.dtype, right.dtype], left.device)
        self._parts: list[tuple[Tensor, Operand]] = [(left, right)]
        self._shared: Positions | None = None

    @property
    def left(self) -> Tensor:
        """``[N, G, P, T]``."""
        return self._joined()[0]

    @property
    def right(self) -> Operand:
        """``[N, G, D, T]``."""
        return self._joined()[1]

    @property
    def factor_sizes(self) -> tuple[int, int, int]:
        """``(G, P, D)``."""
        left, right = self._parts[0]
        return left.shape[1], left.shape[2], right.shape[2]

    @property
    def has_patches(self) -> bool:
        """Whether the right operand is not unfolded."""
        return isinstance(self._parts[0][1], Patches)

    def followed_by(self, other: "OuterProduct") -> "OuterProduct":
        """The sum of both, of equal factor sizes and without patches: the positions of one behind those of the other.

        They are joined when they are first looked at; a layer that is called in a loop makes many of them.
        """
        twin = copy.copy(self)
        twin._parts, twin._shared = [*self._parts, *other._parts], None
        twin.dtype = accumulation_dtype(self.dtype, other.dtype)
        return twin

    def _joined(self) -> tuple[Tensor, Operand]:
        if len(self._parts) > 1:
            lefts, rights = zip(*self._parts, strict=True)
            self._parts[:] = [(_concatenated(lefts), _concatenated(rights))]
        return self._parts[0]

    def _dense(self) -> Tensor:
        return self.planner.dense(self.left, self.right).reshape(self.num_samples, *self.shape)

    def _dense_into(self, out: Tensor) -> Tensor:
        self.planner.dense(self.left, self.right, out.view(self.num_samples, *self.factor_sizes))
        return out

    def _part(self, start: int, stop: int) -> "OuterProduct":
        return OuterProduct(self.left[start:stop], part(self.right, start, stop), self.shape)

    def _select(self, index: Tensor) -> "OuterProduct":
        return OuterProduct(self.left[index], select(self.right, index), self.shape)

    def _regroup(self, k: int) -> "OuterProduct":
        right = self.right.regroup(k) if isinstance(self.right, Patches) else _join(self.right, k)
        return OuterProduct(_join(self.left, k), right, self.shape)

    def _plan(self, operation: str) -> Plan:
        return self.planner.plan(operation, self.left, self.right, shared=self._shared is not None)

    def _keep(self, operations: Sequence[str], room: int) -> tuple[PerSampleGrad, int]:
        if not pays_to_keep(self.planner, operations, self.left, self.right, room):
            return self, 0
        more = growth(self.left, self.right)
        strips, channels_last = keep(self.planner, self.left, self.right)
        if strips[0].dim() == 4:
            return Dense(strips[0].reshape(self.num_samples, *self.shape)), more
        blocks = {i * strip[0].numel(): Dense(strip) for i, strip in enumerate(strips)}
        by_strip = Blocks(blocks, (len(strips), *strips[0].shape[1:]))  # [strips, G, P, *elements]
        return Permuted(by_strip, (1, 2, 4, 0, 3) if channels_last else (1, 2, 3, 0, 4), self.shape), more

    def _noise(self) -> Tensor:
        tile = self._plan("squared_norm").tile
        return rounding(self.left.to(self.dtype), self.right.to(self.dtype), tile)

    def _sum(self) -> Tensor:
        return self.planner.sum(self.left, self.right).reshape(self.shape)

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        sums = self.planner.weighted_sum(self.left, self.right, weights)
        return sums.reshape(weights.shape[0], *self.shape)

    def _squared_norm(self) -> Tensor:
        products = None if self._shared is None else self._shared.products
        return self.planner.squared_norm(self.left, self.right, products)

    def _sum_of_squares(self, center: Tensor | None) -> Tensor:
        center = None if center is None else center.reshape(self.factor_sizes)
        return self.planner.sum_of_squares(self.left, self.right, center).reshape(self.shape)

    def _moments(self) -> tuple[Tensor, Tensor]:
        mean, squares = self.planner.moments(self.left, self.right)
        return mean.reshape(self.shape), squares.reshape(self.shape)

    def _dot(self, direction: Tensor) -> Tensor:
        return self.planner.dot(self.left, self.right, direction.reshape(self.factor_sizes))

    def _project(self, directions: Tensor) -> Tensor:
        directions = directions.reshape(len(directions), *self.factor_sizes)
        return self.planner.project(self.left, self.right, directions)

    def _details(self) -> str:
        groups, outputs, inputs = self.factor_sizes
        return f", G={groups} P={outputs} D={inputs} T={self.left.shape[3]}"


def _what_is_wrong(left: Sequence[int], right: Sequence[int], shape: Sequence[int]) -> str | None:
    if len(left) != 4 or len(right) != 4:
        return "takes left [N, G, P, T] and right [N, G, D, T]"
    samples, groups, outputs, positions = left
    if right[0] != samples or right[1] != groups or right[3] != positions:
        return "takes left [N, G, P, T] and right [N, G, D, T], which differ in N, G or T"
    if groups * outputs * right[2] != math.prod(shape):
        return "has another number of elements, G * P * D, than the parameter"
    return None


def with_common_left(left: Tensor, rights: Sequence[Tensor]) -> list[OuterProduct]:
    """Gradients of several matrices that were multiplied for the same result: ghost norms share what they can.

    Args:
        left: ``[N, 1, P, T]``.
        rights: ``[N, 1, D, T]`` each.
    """
    grads = [OuterProduct(left, right, (left.shape[2], right.shape[2])) for right in rights]
    if len(grads) > 1:
        shared = Positions(left)
        for grad in grads:
            grad._shared = shared
    return grads


def _concatenated(operands: Sequence[Tensor]) -> Tensor:
    """Positions one after another, ``[N, G, C, T]``; next to each other in memory is what was so before."""
    if operands[0].stride(2) == 1:
        return torch.cat([operand.mT for operand in operands], 2).mT
    return torch.cat(list(operands), 3)


def _join(operand: Tensor, k: int) -> Tensor:
    """Put the positions of ``k`` consecutive samples one after another, ``[N / k, G, C, k * T]``."""
    samples, groups, channels, positions = operand.shape
    rows = operand.reshape(samples // k, k, groups, channels, positions).permute(0, 2, 3, 1, 4)
    return rows.reshape(samples // k, groups, channels, k * positions)
