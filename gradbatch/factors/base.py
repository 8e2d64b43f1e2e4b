"""What every structure of per-sample gradients can do, and how it is done where the structure knows nothing better.

The public operations check their arguments, leave autocast, and hand over to hooks (``_sum``, ``_squared_norm``, …). A
structure must define how it is materialised, selected and regrouped; every other hook has a correct default that
materialises a budget's worth of samples at a time, and a structure may override it with something faster, never with
something different. What two structures do together stands in ``pairs.py``, for all of them in one place.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.plans.choice import RECYCLED
from gradbatch.plans.contractions import Plan, Planner, accumulation_dtype, check_operation
from gradbatch.plans.kernels import add_squares, squared_norms
from gradbatch.plans.operands import full_precision
from gradbatch.plans.slabs import spans

Self = TypeVar("Self", bound="PerSampleGrad")


class PerSampleGrad(ABC):
    r"""The gradients :math:`g_1 \dots g_N` of a batch's losses with respect to one parameter.

    Each is the gradient of that sample's own loss, never scaled by ``1 / N``. All operations compute and return at
    least float32; a non-finite sample never reaches another sample's result; ``N = 0`` works everywhere.

    Attributes:
        shape: shape of the parameter.
        num_samples: ``N``.
        dtype: of the results: that of the operands, at least float32.
        device: of the operands and the results.
        planner: decides how operations are evaluated.
    """

    def __init__(
        self, shape: Sequence[int], num_samples: int, dtypes: Sequence[torch.dtype], device: torch.device
    ) -> None:
        self.shape = torch.Size(shape)
        self.num_samples = num_samples
        self.dtype = accumulation_dtype(*dtypes)
        self.device = device
        self.planner = _DEFAULT_PLANNER

    # ------------------------------------------------------------------ operations

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Materialise, ``[N, *shape]``.

        Args:
            out: contiguous memory of that shape, and of the results' dtype and device, to write to; on a CPU, fresh
                memory takes longer to get than the gradients take to compute.
        """
        if out is not None:
            self._check_out(out)
        with full_precision(self.device):
            return self._dense() if out is None else self._dense_into(out)

    def sum(self) -> Tensor:
        """Sum over samples, ``[*shape]``: the gradient of the summed losses."""
        with full_precision(self.device):
            return self._sum()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Weighted sum over samples.

        Args:
            weights: ``[N]``, or ``[K, N]`` for ``K`` sums.

        Returns: ``[*shape]``, or ``[K, *shape]``.
        """
        if not isinstance(weights, Tensor):
            raise UsageError(
                f"weights is a {type(weights).__name__}; expected a tensor [N], or [K, N] for K sums."
            )
        if weights.dim() not in (1, 2) or weights.shape[-1] != self.num_samples:
            raise UsageError(
                f"weights {list(weights.shape)}: expected [N] or [K, N] with N = {self.num_samples}."
            )
        with full_precision(self.device):
            if weights.dim() == 2:
                return self._weighted_sum(weights)
            return self._weighted_sum(weights.unsqueeze(0)).squeeze(0)

    def squared_norm(self) -> Tensor:
        """Squared Euclidean norms, ``[N]``; never negative."""
        with full_precision(self.device):
            return self._squared_norm()

    def inner(self, other: "PerSampleGrad") -> Tensor:
        """Inner product of each sample's gradient with the same sample's gradient in ``other``, ``[N]``."""
        self._check_same(other, samples=True)
        # The table of pairs knows every structure, and every structure is a PerSampleGrad.
        from gradbatch.factors import pairs

        with full_precision(self.device):
            return pairs.inner(self, other)

    def gram(self, other: "PerSampleGrad | None" = None) -> Tensor:
        """Inner products of all pairs of samples, ``[N, N]``, or with those of ``other``, ``[N, M]``.

        Without ``other`` the matrix is exactly symmetric and its diagonal is :meth:`squared_norm`, to rounding.
        """
        other = self if other is None else other
        self._check_same(other, samples=False)
        from gradbatch.factors import pairs

        with full_precision(self.device):
            return pairs.gram(self, other)

    def sum_of_squares(self, center: Tensor | None = None) -> Tensor:
        r"""Elementwise :math:`\sum_n (g_n - c)^2`, ``[*shape]``; never negative.

        Args:
            center: ``c``, ``[*shape]``; 0 by default. The differences are formed before they are squared, so that a
                variance does not suffer from a large mean.
        """
        if center is not None:
            self._check_direction("center", center.shape)
        with full_precision(self.device):
            return self._sum_of_squares(center)

    def moments(self) -> tuple[Tensor, Tensor]:
        r"""Mean over samples, and elementwise :math:`\sum_n (g_n - \bar g)^2`, never negative; ``[*shape]`` each.

        What :meth:`sum` and :meth:`sum_of_squares` around the mean give, in one pass where gradients are materialised.
        Zeros without samples.
        """
        with full_precision(self.device):
            return self._moments()

    def squared_deviations(self) -> Tensor:
        """The second of :meth:`moments` alone, ``[*shape]``."""
        with full_precision(self.device):
            return self._squared_deviations()

    def dot(self, direction: Tensor) -> Tensor:
        """Inner products with ``direction [*shape]``, ``[N]``."""
        self._check_direction("direction", direction.shape)
        with full_precision(self.device):
            return self._dot(direction)

    def project(self, directions: Tensor) -> Tensor:
        """Inner products with ``directions [K, *shape]``, ``[N, K]``."""
        self._check_direction("directions without their first axis", directions.shape[1:])
        with full_precision(self.device):
            return self._project(directions)

    def __add__(self, other: "PerSampleGrad") -> "PerSampleGrad":
        """Add the gradients of the same samples: two calls of one parameter. Norms have the cross terms."""
        if not isinstance(other, PerSampleGrad):
            return NotImplemented
        self._check_same(other, samples=True)
        from gradbatch.factors import pairs

        with full_precision(self.device):
            return pairs.add(self, other)

    def select(self, index: Tensor) -> "PerSampleGrad":
        """Take the samples at ``index``: positions ``[M]`` in any order, also repeated, or a mask ``[N]``."""
        if index.dim() != 1 or (index.dtype == torch.bool and len(index) != self.num_samples):
            raise UsageError(
                f"index {list(index.shape)} into {self.num_samples} samples: expected [M], or a mask [N]."
            )
        return self._select(index.nonzero()[:, 0] if index.dtype == torch.bool else index)._planned(
            self.planner
        )

    def regroup(self, k: int) -> "PerSampleGrad":
        """Make one sample of every ``k`` consecutive ones by adding their gradients; ``N`` becomes ``N / k``."""
        if k < 1 or self.num_samples % k:
            raise UsageError(f"{self.num_samples} samples cannot be regrouped by {k}: it has to divide them.")
        return self if k == 1 else self._regroup(k)._planned(self.planner)

    def compact(self) -> "PerSampleGrad":
        """The same gradients without elements that are zero for every sample, where the structure tells which.

        The rows of an embedding's table that occur in the batch, in a table of their own; most gradients as they are.
        Norms, dot products, and sums over elements stay what they were.
        """
        return self

    def keep(self, operations: Sequence[str], room: int) -> "tuple[PerSampleGrad, int]":
        """The same gradients for several operations, materialised now where that is faster for all of them together.

        Args:
            operations: what will be asked, by the names of the methods.
            room: bytes by which what is held may grow.

        Returns: the gradients, and by how many bytes what they hold has grown; 0 where it is less.
        """
        if len(operations) < 2:
            return self, 0
        with full_precision(self.device):
            kept, growth = self._keep(operations, room)
        return (self if kept is self else kept._planned(self.planner)), growth

    def with_planner(self: Self, planner: Planner) -> Self:
        """The same gradients, evaluated as ``planner`` decides."""
        twin = object.__new__(type(self))  # what copy.copy does, in a tenth of the time
        twin.__dict__.update(self.__dict__)
        twin._planned(planner)
        return twin

    def plan(self, operation: str) -> Plan | None:
        """How an operation would be evaluated; None where the structure leaves nothing to decide."""
        check_operation(operation)
        return self._plan(operation)

    # ------------------------------------------------------------------ a structure must define

    @abstractmethod
    def _dense(self) -> Tensor: ...

    @abstractmethod
    def _select(self, index: Tensor) -> "PerSampleGrad": ...

    @abstractmethod
    def _regroup(self, k: int) -> "PerSampleGrad": ...

    # ------------------------------------------------------------------ a structure may override

    def _dense_into(self, out: Tensor) -> Tensor:
        rows = out.view(self.num_samples, self._numel)
        for samples, block in self._blocks(
            self.dtype, max(1, self._step() * RECYCLED // self.planner.budget)
        ):
            rows[samples] = block
        return out

    def _part(self, start: int, stop: int) -> "PerSampleGrad":
        """The samples from ``start`` to ``stop``."""
        return self._select(torch.arange(start, stop, device=self.device))

    def _planned(self: Self, planner: Planner) -> Self:
        """Set the planner of an object that nobody else holds yet."""
        self.planner = planner
        return self

    def _plan(self, operation: str) -> Plan | None:
        return None

    def _keep(self, operations: Sequence[str], room: int) -> "tuple[PerSampleGrad, int]":
        return self, 0

    def _noise(self) -> Tensor:
        """How large the terms are that make a squared norm in ``pairs.py``, ``[N]``; see ``kernels.rounding``."""
        return self._squared_norm()

    def _sum(self) -> Tensor:
        out = torch.zeros(self._numel, dtype=self.dtype, device=self.device)
        for _, block in self._blocks(self.dtype):
            out += block.sum(0)
        return out.reshape(self.shape)

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        dtype = accumulation_dtype(self.dtype, weights.dtype)
        out = torch.zeros(len(weights), self._numel, dtype=dtype, device=self.device)
        for samples, block in self._blocks(dtype):
            out += weights[:, samples].to(dtype) @ block
        return out.reshape(len(weights), *self.shape)

    def _squared_norm(self) -> Tensor:
        out = torch.zeros(self.num_samples, dtype=self.dtype, device=self.device)
        for samples, block in self._blocks(self.dtype):
            out[samples] = squared_norms(block)
        return out

    def _sum_of_squares(self, center: Tensor | None) -> Tensor:
        dtype = self.dtype if center is None else accumulation_dtype(self.dtype, center.dtype)
        out = torch.zeros(self._numel, dtype=dtype, device=self.device)
        shift = 0 if center is None else center.to(dtype).reshape(self._numel)
        for _, block in self._blocks(dtype):
            add_squares(out, block if center is None else block - shift)
        return out.reshape(self.shape)

    def _moments(self) -> tuple[Tensor, Tensor]:
        mean = self._sum() / max(1, self.num_samples)
        return mean, self._sum_of_squares(mean)

    def _squared_deviations(self) -> Tensor:
        return self._moments()[1]

    def _dot(self, direction: Tensor) -> Tensor:
        return self._project(direction[None])[:, 0]

    def _project(self, directions: Tensor) -> Tensor:
        dtype = accumulation_dtype(self.dtype, directions.dtype)
        out = torch.zeros(self.num_samples, len(directions), dtype=dtype, device=self.device)
        flat = directions.to(dtype).reshape(len(directions), self._numel).mT
        for samples, block in self._blocks(dtype):
            out[samples] = block @ flat
        return out

    # ------------------------------------------------------------------ shared by the defaults

    @property
    def _numel(self) -> int:
        return math.prod(self.shape)

    def _step(self) -> int:
        """How many samples' gradients fit into the budget."""
        return max(1, self.planner.budget // max(1, self._numel * self.dtype.itemsize))

    def _blocks(self, dtype: torch.dtype, step: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Materialise the gradients some samples at a time, ``[n, elements]``."""
        for start, stop in spans(self.num_samples, step or self._step()):
            block = self._part(start, stop)._planned(self.planner)._dense()
            yield slice(start, stop), block.to(dtype).reshape(stop - start, self._numel)

    def _check_same(self, other: "PerSampleGrad", samples: bool) -> None:
        if self.shape != other.shape or (samples and self.num_samples != other.num_samples):
            raise UsageError(
                f"{self!r} and {other!r} do not go together: they have to be gradients of one parameter"
                + (" and of the same samples." if samples else ".")
            )

    def _check_out(self, out: Tensor) -> None:
        wanted = (self.num_samples, *self.shape), self.dtype, self.device
        if (
            (tuple(out.shape), out.dtype, out.device) != wanted
            or not out.is_contiguous()
            or out.requires_grad
        ):
            raise UsageError(
                f"out is {list(out.shape)}, {out.dtype} on {out.device}; expected contiguous memory without a graph, "
                f"{list(wanted[0])}, {wanted[1]} on {wanted[2]}."
            )

    def _check_direction(self, name: str, shape: torch.Size) -> None:
        if shape != self.shape:
            raise UsageError(f"{name} has shape {list(shape)}; the parameter has {list(self.shape)}.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_samples} x {list(self.shape)}{self._details()})"

    def _details(self) -> str:
        return ""


_DEFAULT_PLANNER = Planner()
