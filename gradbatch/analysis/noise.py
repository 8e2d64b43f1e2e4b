r"""The gradient noise scale and the two numbers that it is made of.

A batch of ``N`` samples with gradients :math:`g_n` enters with three numbers, none of which needs the gradients
themselves: ``N``, :math:`\sum_n \lVert g_n \rVert^2` (the sum of squared norms) and :math:`\lVert \sum_n g_n \rVert^2`
(the squared norm of the sum). Both add up over parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbatch.analysis.intervals import fieller, student_quantile
from gradbatch.errors import UsageError

STATE = ("sums", "products", "weights")


def total_variance(count: int, sum_of_squares: Tensor, square_of_sum: Tensor) -> Tensor:
    r"""Trace of the covariance of a sample's gradient, estimated from one batch.

    .. math:: \widehat{\operatorname{tr} \Sigma}
        = \frac{1}{N - 1} \sum_n \lVert g_n - \bar g \rVert^2
        = \frac{1}{N - 1} \left( \sum_n \lVert g_n \rVert^2 - \frac{1}{N} \Big\lVert \sum_n g_n \Big\rVert^2 \right)

    Unbiased, where the samples are drawn independently.

    Args:
        count: ``N``.
        sum_of_squares: of the norms of the samples' gradients; any shape.
        square_of_sum: squared norm of the summed gradients; of the same shape.

    Returns: of the same shape, float64; in squared units of a gradient. Divide by a batch size for the noise of the
    mean over such a batch.

    Edge cases: never negative; NaN for fewer than two samples, of which nothing can be said; NaN where a
    sum is not finite.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import total_variance
        >>> g = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> total_variance(2, g.square().sum(), g.sum(0).square().sum()), g.var(0).sum()
        (tensor(4., dtype=torch.float64), tensor(4.))
    """
    if count < 2:
        return torch.full_like(sum_of_squares, math.nan, dtype=torch.double)
    return not_negative(sum_of_squares.double() - square_of_sum.double() / count) / (count - 1)


def squared_gradient(count: int, sum_of_squares: Tensor, square_of_sum: Tensor) -> Tensor:
    r"""Squared norm of the true gradient, :math:`\lVert G \rVert^2`, estimated from one batch.

    .. math:: \widehat{\lVert G \rVert^2}
        = \frac{1}{N (N - 1)} \sum_{n \ne m} \langle g_n, g_m \rangle
        = \frac{1}{N (N - 1)} \left( \Big\lVert \sum_n g_n \Big\rVert^2 - \sum_n \lVert g_n \rVert^2 \right)

    Unbiased, where the samples are drawn independently; the squared norm of the batch's mean is too large by
    :math:`\operatorname{tr} \Sigma / N`, which is often most of it.

    Args:
        count, sum_of_squares, square_of_sum: as for :func:`total_variance`.

    Returns: of the same shape, float64; in squared units of a gradient.

    Edge cases: **negative** for a good part of small batches, which is no error: only so is it right on average.
    NaN for fewer than two samples.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import squared_gradient
        >>> g = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> squared_gradient(2, g.square().sum(), g.sum(0).square().sum()), g[0] @ g[1]
        (tensor(3., dtype=torch.float64), tensor(3.))
    """
    if count < 2:
        return torch.full_like(sum_of_squares, math.nan, dtype=torch.double)
    return (square_of_sum.double() - sum_of_squares.double()) / (count * (count - 1))


def not_negative(sums: Tensor) -> Tensor:
    """Sums that rounding alone takes below zero; what overflowed on the way is NaN rather than zero."""
    return sums.clamp_min(0).where(sums.isfinite(), math.nan)


class NoiseScale:
    r"""Gradient noise scale of many batches, :math:`\operatorname{tr} \Sigma / \lVert G \rVert^2`.

    The batch size at which the noise of the batch's mean gradient is as large as the gradient. In smaller batches a
    sample makes nearly as much progress as alone; in larger ones a step makes hardly more than one without noise.

    Each batch adds to sums of both parts, the variance weighted by its ``N - 1`` degrees of freedom, the squared
    gradient by its ``N (N - 1)`` pairs; the sums are divided last. (A mean of the batches' ratios is no estimate of
    anything.) Both parts are unbiased, the ratio up to terms of order one over the number of batches.

    Several batches are also the micro-batches of a step, ragged last batches, and the ranks of data-parallel training
    (:meth:`merge`). Where the model changes meanwhile, the parts are those of the model on average; with a ``decay``
    recent batches count for more.

    Args:
        shape: of what is estimated side by side, such as ``[layers]``; ``()``: one number.
        decay: factor on all earlier batches in each update, above 0; 1: all count the same.

    Raises:
        UsageError: the decay is not above 0 and at most 1.

    Edge cases: a batch of fewer than two samples adds nothing. Where a batch is not finite, it adds nothing (in this
    place of ``shape``). Without a batch, NaN. Infinite where the estimate of :math:`\lVert G \rVert^2` is not positive:
    the gradient does not stand out of its noise yet.

    References:
        An Empirical Model of Large-Batch Training (McCandlish et al., 2018), https://arxiv.org/abs/1812.06162

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch.analysis import NoiseScale, SumL2Grad
        >>> from gradbatch import BatchL2Grad
        >>> model = gradbatch.extend(torch.nn.Linear(4, 1))
        >>> noise = NoiseScale()
        >>> for _ in range(200):
        ...     x = torch.randn(8, 4)
        ...     losses = (model(x) - x.sum(1, keepdim=True)).square().sum(1)
        ...     results = gradbatch.backward(model, losses, BatchL2Grad(), SumL2Grad())
        ...     noise.update(8, results[BatchL2Grad].total().sum(), results[SumL2Grad].total())
        >>> low, high = noise.interval()
        >>> bool(low < noise.value() < high)
        True
    """

    def __init__(self, shape: Sequence[int] = (), decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise UsageError(f"decay is {decay!r}; it is above 0 and at most 1 (all batches count the same)")
        self.shape, self.decay = torch.Size(shape), decay
        # Of a batch: deviations, their degrees of freedom, products of pairs, pairs. Sums of these and of their
        # products give both means and the covariance of the means; weights and their squares, how many batches.
        self._sums = torch.zeros(*shape, 4, dtype=torch.double)
        self._products = torch.zeros(*shape, 4, 4, dtype=torch.double)
        self._weights = torch.zeros(*shape, 2, dtype=torch.double)

    def update(self, count: int, sum_of_squares: Tensor, square_of_sum: Tensor) -> None:
        """Add a batch.

        Args:
            count: its samples.
            sum_of_squares: of the norms of their gradients, ``[*shape]``.
            square_of_sum: squared norm of their summed gradients, ``[*shape]``.

        Raises:
            UsageError: another shape.
        """
        self.update_all(torch.tensor([count]), sum_of_squares[None], square_of_sum[None])

    def update_all(self, counts: Tensor, sums_of_squares: Tensor, squares_of_sums: Tensor) -> None:
        """Add batches one after another; the same as :meth:`update` of each, and faster.

        Args:
            counts: samples of each batch, ``[R]``.
            sums_of_squares, squares_of_sums: ``[R, *shape]``.

        Raises:
            UsageError: another shape.
        """
        squares, square = (self._checked(tensor) for tensor in (sums_of_squares, squares_of_sums))
        enough = counts > 1
        squares, square = squares[enough], square[enough]
        count = counts[enough].double().view(-1, *(1,) * len(self.shape))
        finite = squares.isfinite() & square.isfinite()
        deviations = (squares - square / count).clamp_min(0)
        parts = torch.broadcast_tensors(deviations, count - 1, square - squares, count * (count - 1))
        batches = torch.where(finite[..., None], torch.stack(parts, -1), 0)
        # What each batch still counts for when the last has come.
        left = self.decay ** torch.arange(len(count) - 1, -1, -1, dtype=torch.double)
        whole, weighted = self.decay ** len(count), left.view(-1, *(1,) * (batches.dim() - 1)) * batches
        self._sums = whole * self._sums + weighted.sum(0)
        self._products = whole**2 * self._products + weighted.movedim(0, -1) @ weighted.movedim(0, -2)
        weights = finite.double().movedim(0, -1) @ torch.stack([left, left**2], -1)
        self._weights = torch.tensor([whole, whole**2], dtype=torch.double) * self._weights + weights

    def merge(self, other: NoiseScale) -> None:
        """Add the batches of another one, such as another rank's.

        Raises:
            UsageError: another shape.
        """
        if self.shape != other.shape:
            raise UsageError(
                f"noise scales of shapes {list(self.shape)} and {list(other.shape)} do not merge"
            )
        self._sums = self._sums + other._sums
        self._products = self._products + other._products
        self._weights = self._weights + other._weights

    def batches(self) -> Tensor:
        """How many batches there were, ``[*shape]``; with a decay, how many of one weight are worth as much."""
        total, squares = self._weights.unbind(-1)
        return torch.where(squares > 0, total**2 / squares, 0)

    def variance(self) -> Tensor:
        r"""The first part, :math:`\operatorname{tr} \Sigma`, ``[*shape]``."""
        return self._sums[..., 0] / self._sums[..., 1]

    def squared_gradient(self) -> Tensor:
        r"""The second part, :math:`\lVert G \rVert^2`, ``[*shape]``; it may be negative."""
        return self._sums[..., 2] / self._sums[..., 3]

    def value(self, population: int | None = None) -> Tensor:
        r"""The noise scale, ``[*shape]``, in samples.

        Args:
            population: size ``M`` of the data set, where batches are drawn from it without replacement and the noise
                is wanted against the gradient of this very set. Pairs of different samples are then, on average, short
                of the set's squared gradient by :math:`\operatorname{tr} \Sigma / M`. Without, it is against the
                gradient of what the set was itself drawn from.
        """
        return _scale(self._ratio(), population)

    def signal_to_noise(self, count: float) -> Tensor:
        r"""Signal to noise ratio of a mean gradient over ``count`` samples, ``[*shape]``.

        .. math:: \lVert G \rVert^2 \big/ (\operatorname{tr} \Sigma / N)

        Edge cases: 0 where the estimate of the squared gradient is negative.
        """
        return count * self._ratio().clamp_min(0)

    def interval(self, level: float = 0.95, population: int | None = None) -> tuple[Tensor, Tensor]:
        """Confidence interval of the noise scale, two tensors ``[*shape]``.

        Fieller's, from the scatter of the batches around their means: its upper end is infinite where the gradient
        may be zero for all that the batches say.

        Args:
            level: chance to cover the truth, if batches are many (some tens) and independent.
            population: as for :meth:`value`.

        Raises:
            UsageError: the level is not between 0 and 1.

        Edge cases: from 0 to infinity for fewer than four batches, and where one or two outweigh all others (a batch of
        256 among some of 8): a batch of ``N`` has ``N (N - 1)`` pairs, and what it deviates by from a mean that it
        makes nearly alone says nothing.
        """
        variance, signal = self.variance(), self.squared_gradient()
        degrees, pairs = self._sums[..., 1], self._sums[..., 3]
        zero = torch.zeros_like(variance)
        # How each mean moves with the four sums: the covariance of means is that of what batches deviate by.
        jacobian = torch.stack(
            [
                torch.stack([1 / degrees, -variance / degrees, zero, zero], -1),
                torch.stack([zero, zero, 1 / pairs, -signal / pairs], -1),
            ],
            -2,
        )
        # How many batches of one weight each mean is worth.
        weights = [1, 3]
        worth = self._sums[..., weights] ** 2 / self._products[..., weights, weights]
        correction = (worth / (worth - 1)).sqrt()
        covariance = (
            jacobian @ self._products @ jacobian.mT * correction[..., None] * correction[..., None, :]
        )
        quantile = student_quantile(level, worth.amin(-1) - 1)
        low, high = fieller(signal, variance, covariance, quantile)
        return _scale(high, population), _scale(low, population)

    def state_dict(self) -> dict[str, Tensor]:
        """What :meth:`load_state_dict` goes on from: tensors, whose sums over ranks are the state of all together."""
        return {name: getattr(self, f"_{name}").clone() for name in STATE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state.

        Raises:
            UsageError: it is of something else, or of another shape.
        """
        own = self.state_dict()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                given = list(state[name].shape) if name in state else "missing"
                raise UsageError(f"state of a noise scale: {name} is {given}, expected {list(tensor.shape)}")
        self._sums, self._products, self._weights = (
            state[name].to("cpu", torch.double, copy=True) for name in STATE
        )

    def _ratio(self) -> Tensor:
        return self.squared_gradient() / self.variance()

    def _checked(self, tensor: Tensor) -> Tensor:
        if tensor.shape[1:] != self.shape:
            raise UsageError(
                f"a batch of shape {list(tensor.shape[1:])} in a noise scale of {list(self.shape)}"
            )
        return tensor.detach().to("cpu", torch.double)


def _scale(ratio: Tensor, population: int | None) -> Tensor:
    """The noise scale of a ratio of squared gradient to variance."""
    if population is not None:
        if population < 1:
            raise UsageError(f"population is {population!r}; it is the size of the data set, 1 or more")
        ratio = ratio + 1 / population
    return 1 / ratio.clamp_min(0)
