"""Operations on pairs of operands, each evaluated as the planner decides, within a byte budget.

It decides for each operation and the *current* sizes, by a cost model: operation counts of ``opt_einsum`` plus what is
written to memory. A plan never changes a value beyond rounding, so any of them can be forced. Where positions are
contracted against positions (the "ghost" plans) the terms can be much larger than their sum; the samples that lose
their digits that way are found and materialised.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.plans import kernels, slabs
from gradbatch.plans.choice import (
    PLANS as PLANS,
    RECYCLED,
    Plan as Plan,
    candidates,
    check_force,
    check_operation as check_operation,
)
from gradbatch.plans.costs import Sizes
from gradbatch.plans.measured import Result, Timings, key_of
from gradbatch.plans.operands import (
    accumulation_dtype as accumulation_dtype,
    promoted,
    select as select,
    sizes_of,
    widened,
)
from gradbatch.plans.slabs import Operand as Operand, Tile

DEFAULT_BUDGET = 256 * 2**20

# A difference of sums that is smaller than they are by this factor has lost digits.
_CANCELLED = 16


class Planner:
    """Evaluates operations on ``left [N, G, P, T]`` and ``right [N, G, D, T]``, a tensor or patches.

    Args:
        budget: bytes that the temporaries of one operation may take. Samples are tiled first, then output rows or the
            second positions of a ghost sum; a single one of those of a single sample is never cut.
        force: operation to plan name, for what should not be left to the cost model. Where a forced plan cannot
            evaluate the operands (a native convolution kernel for plain tensors, ``"squares"`` for several positions)
            it is ignored.
        measure: time every plan on the first operands of each shape instead of asking the cost model, as
            ``torch.backends.cudnn.benchmark`` does. Pays where one planner is passed to every step of a loop. Which
            plan wins may differ from run to run, and with it the rounding.

    All operands are computed in the widest of their dtypes, at least float32.

    Raises:
        UsageError: for an unknown operation or plan, or a budget that is not positive.

    Example:
        >>> Planner(budget=2**20, force={"squared_norm": "ghost"})
        Planner(budget=1048576, force={'squared_norm': 'ghost'})
    """

    def __init__(
        self, budget: int = DEFAULT_BUDGET, force: Mapping[str, str] | None = None, *, measure: bool = False
    ) -> None:
        self.budget, self.force, self.measure = budget, dict(force or {}), measure
        self._timings, self._forced = Timings(), tuple(sorted(self.force.items()))
        if budget <= 0:
            raise UsageError(f"budget is {budget}; it is a number of bytes, at least 1.")
        check_force(self.force)

    def __repr__(self) -> str:
        measure = ", measure=True" if self.measure else ""
        return f"Planner(budget={self.budget}, force={self.force}{measure})"

    def forcing(self, **force: str) -> "Planner":
        """A planner with the same budget that forces these plans too."""
        return Planner(self.budget, {**self.force, **force}, measure=self.measure)

    def plan(
        self,
        operation: str,
        left: Tensor,
        right: Operand,
        others: tuple[Tensor, Operand] | None = None,
        count: int = 1,
        shared: bool = False,
    ) -> Plan:
        """How an operation is evaluated; before anything was measured, by the cost model.

        Args:
            operation: a key of :data:`PLANS`.
            left: ``[N, G, P, T]``.
            right: ``[N, G, D, T]``.
            others: the second left and right of ``inner`` and ``gram``; by default those of the first.
            count: number of weight vectors or directions.
            shared: whether another parameter has the left one too.

        Raises:
            UsageError: for an unknown operation.
        """
        check_operation(operation)
        sizes, plans = self.candidates(operation, left, right, others, count, shared)
        known = self._timings.best.get(key_of(operation, sizes, left, right))
        return plans[0] if known is None else known[0]

    def candidates(
        self,
        operation: str,
        left: Tensor,
        right: Operand,
        others: tuple[Tensor, Operand] | None = None,
        count: int = 1,
        shared: bool = False,
    ) -> tuple[Sizes, tuple[Plan, ...]]:
        """The sizes of operands, and every plan for an operation on them, the fastest by the cost model first."""
        sizes = sizes_of(left, right, others, count, shared)
        return sizes, self.ranked(operation, sizes)

    def ranked(self, operation: str, sizes: Sizes) -> tuple[Plan, ...]:
        """Every plan for an operation on operands of these sizes, the fastest by the cost model first."""
        return candidates(operation, sizes, self.budget, self._forced)

    def _evaluate(
        self,
        run: Callable[[Plan], Result],
        operation: str,
        left: Tensor,
        right: Operand,
        others: tuple[Tensor, Operand] | None = None,
        count: int = 1,
        shared: bool = False,
    ) -> Result:
        """Run the best plan."""
        sizes, plans = self.candidates(operation, left, right, others, count, shared)
        if not self.measure or len(plans) == 1:
            return run(plans[0])
        return self._timings.run(key_of(operation, sizes, left, right), plans, run, left.device)

    def dense(self, left: Tensor, right: Operand, out: Tensor | None = None) -> Tensor:
        """Per-sample gradients, ``[N, G, P, D]``, in memory of the caller's if there is some."""
        left, right = promoted(left, right)
        if isinstance(right, Tensor):
            return slabs.products(left, right, out)

        def run(plan: Plan) -> Tensor:
            if out is None:
                return slabs.slab(left, right, plan.tile, plan.kernel)
            bytes_each = math.prod(out.shape[1:]) * out.dtype.itemsize
            return slabs.fill(
                out, left, right, max(1, RECYCLED // max(1, bytes_each)), plan.tile, plan.kernel
            )

        return self._evaluate(run, "dense", left, right)

    def sum(self, left: Tensor, right: Operand) -> Tensor:
        """Sum over samples, ``[G, P, D]``."""
        left, right = promoted(left, right)
        if isinstance(right, Tensor):
            return kernels.summed_product(left, right)
        return self._evaluate(
            lambda plan: kernels.summed(left, right, plan.tile, plan.name == "native"), "sum", left, right
        )

    def weighted_sum(self, left: Tensor, right: Operand, weights: Tensor) -> Tensor:
        """Weighted sums for ``weights [K, N]``, ``[K, G, P, D]``."""
        left, right, weights = promoted(left, right, weights)

        def run(plan: Plan) -> Tensor:
            if plan.name == "dense":
                return kernels.weighted_dense(left, right, weights, plan.tile, plan.kernel)
            each = weights.reshape(*weights.shape, 1, 1, 1).unbind()
            if isinstance(right, Tensor) and right.numel() < left.numel():
                sums = [self.sum(left, right * weight) for weight in each]
            else:
                sums = [self.sum(left * weight, right) for weight in each]
            return torch.stack(sums) if len(sums) > 1 else sums[0][None]

        return self._evaluate(run, "weighted_sum", left, right, count=len(weights))

    def squared_norm(
        self, left: Tensor, right: Operand, products: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Squared norms, ``[N]``, never negative; ``products`` gives those of left positions that others want too."""
        given = left
        left, right = promoted(left, right)
        shared = products if left is given else None

        def run(plan: Plan) -> Tensor:
            if plan.name == "dense":
                return kernels.squared_norm_dense(left, right, plan.tile, plan.kernel)
            norms, size = kernels.squared_norm_ghost(left, right, plan.tile, shared)
            if kernels.is_trusted(size, norms):
                return norms
            lost = kernels.cancelled(size, norms).nonzero()[:, 0]
            # Positions that cancel do so in a product over positions too, in whichever order that adds them up.
            again = self.forcing(squared_norm="dense").squared_norm(*widened(left[lost], select(right, lost)))
            return norms.index_copy(0, lost, again.to(norms.dtype))

        return self._evaluate(run, "squared_norm", left, right, shared=shared is not None)

    def inner(self, left: Tensor, right: Operand, left2: Tensor, right2: Operand) -> Tensor:
        """Inner products of each sample's two gradients, ``[N]``; exact to rounding of the product of the norms."""
        left, right, left2, right2 = promoted(left, right, left2, right2)

        def norms(index: Tensor) -> Tensor:
            first = self.squared_norm(left[index], select(right, index))
            return (first * self.squared_norm(left2[index], select(right2, index))).sqrt()

        def again(index: Tensor) -> Tensor:
            first, second = (left[index], select(right, index)), (left2[index], select(right2, index))
            return self.forcing(inner="dense").inner(*first, *second)

        def run(plan: Plan) -> Tensor:
            if plan.name == "dense":
                methods = plan.kernel, self.plan("dense", left2, right2).kernel
                return kernels.inner_dense(left, right, left2, right2, plan.tile, methods)
            value = kernels.inner_ghost(left, right, left2, right2, plan.tile)
            first, second = (
                kernels.rounding(left, right, plan.tile),
                kernels.rounding(left2, right2, plan.tile),
            )
            return kernels.repaired(value, (first * second).sqrt(), norms, again)

        return self._evaluate(run, "inner", left, right, (left2, right2))

    def gram(
        self, left: Tensor, right: Operand, left2: Tensor | None = None, right2: Operand | None = None
    ) -> Tensor:
        """Inner products of all pairs of samples, ``[N, M]``.

        Without a second left and right, those of the first with themselves: exactly symmetric, squared norms on the
        diagonal.
        """
        left, right = promoted(left, right)
        others = None
        if left2 is not None and right2 is not None:
            left, right, *others = promoted(left, right, left2, right2)
        second = (others[0], others[1]) if others else None

        def run(plan: Plan) -> Tensor:
            return self._gram(plan, left, right, second)

        return self._evaluate(run, "gram", left, right, second)

    def _gram(
        self, plan: Plan, left: Tensor, right: Operand, others: tuple[Tensor, Operand] | None
    ) -> Tensor:
        left2, right2 = others or (left, right)
        if plan.name == "dense":
            methods = plan.kernel, self.plan("dense", left2, right2).kernel
            return kernels.gram_dense(left, right, left2, right2, plan.tile, methods)
        gram = kernels.gram_ghost(left, right, left2, right2, plan.tile)
        norms = self.squared_norm(left, right)
        for index, gradients in self._cancelled_gradients(left, right, norms, plan.tile):
            rows = self.project(left2, right2, gradients).mT
            gram = gram.index_copy(0, index, rows)
            gram = gram if others else gram.index_copy(1, index, rows.mT)
        if not others:
            return torch.diagonal_scatter(kernels.mirrored(gram), norms)
        norms = self.squared_norm(left2, right2)
        for index, gradients in self._cancelled_gradients(left2, right2, norms, plan.tile):
            gram = gram.index_copy(1, index, self.project(left, right, gradients))
        return gram

    def sum_of_squares(self, left: Tensor, right: Operand, center: Tensor | None = None) -> Tensor:
        """Sums over samples of squared differences from ``center [G, P, D]``, ``[G, P, D]``; never negative."""
        if center is not None:
            left, right, center = promoted(left, right, center)
        left, right = promoted(left, right)

        def run(plan: Plan) -> Tensor:
            if plan.name != "squares":
                return kernels.sum_of_squares(left, right, center, plan.tile, plan.kernel)
            squares = self.sum(left.square(), slabs.columns(right).square())
            return squares if center is None else self._centered(squares, left, right, center)

        return self._evaluate(run, "sum_of_squares", left, right)

    def _centered(self, squares: Tensor, left: Tensor, right: Operand, center: Tensor) -> Tensor:
        """Sums of squared differences from sums of squares, but for output rows in which these cancel."""
        around = left.shape[0] * center.square()
        value = squares - 2 * center * self.sum(left, right) + around
        lost = ~(value >= (squares + around) / _CANCELLED)
        rows = lost.any(2).any(0).nonzero()[:, 0]
        if len(rows):
            exact = self.forcing(sum_of_squares="dense")
            again = exact.sum_of_squares(left[:, :, rows], right, center[:, rows])
            value = value.index_copy(1, rows, again)
        return value

    def moments(self, left: Tensor, right: Operand) -> tuple[Tensor, Tensor]:
        """Means over samples and sums of squared differences from them, never negative, ``[G, P, D]`` each."""
        left, right = promoted(left, right)

        def run(plan: Plan) -> tuple[Tensor, Tensor]:
            if plan.name != "squares":
                return kernels.moments(left, right, plan.tile, plan.kernel)
            mean = self.sum(left, right).div_(max(1, len(left)))
            squares = self.sum(left.square(), slabs.columns(right).square())
            least = squares / _CANCELLED
            squares.addcmul_(mean, mean, value=-len(left))
            rows = (~(squares >= least)).any(2).any(0).nonzero()[:, 0]
            if len(rows):
                again = self.forcing(moments="dense").moments(left[:, :, rows], right)
                for part, exact in zip((mean, squares), again, strict=True):
                    part.index_copy_(1, rows, exact)
            return mean, squares

        return self._evaluate(run, "moments", left, right)

    def dot(self, left: Tensor, right: Operand, direction: Tensor) -> Tensor:
        """Inner products with ``direction [G, P, D]``, ``[N]``."""
        return self._projected("dot", left, right, direction[None])[:, 0]

    def project(self, left: Tensor, right: Operand, directions: Tensor) -> Tensor:
        """Inner products with ``directions [K, G, P, D]``, ``[N, K]``."""
        return self._projected("project", left, right, directions)

    def _projected(self, operation: str, left: Tensor, right: Operand, directions: Tensor) -> Tensor:
        left, right, directions = promoted(left, right, directions)

        def run(plan: Plan) -> Tensor:
            if plan.name == "dense":
                return kernels.project_dense(left, right, directions, plan.tile, plan.kernel)
            return kernels.project_contract(left, right, directions, plan.tile)

        return self._evaluate(run, operation, left, right, count=len(directions))

    def _cancelled_gradients(
        self, left: Tensor, right: Operand, norms: Tensor, tile: Tile
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Materialise the samples whose ghost sums are not to be trusted: their positions, ``[n, G, P, D]``."""
        lost = kernels.cancelled_samples(left, right, norms, tile)
        bytes_each = left.shape[1] * left.shape[2] * right.shape[2] * left.dtype.itemsize
        for start, stop in slabs.spans(len(lost), self.budget // max(1, bytes_each)) if len(lost) else ():
            index = lost[start:stop]
            yield index, self.dense(left[index], select(right, index))
