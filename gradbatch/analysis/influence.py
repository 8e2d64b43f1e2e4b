"""Which samples matter: scores collected over training, and the influence of one sample on another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradbatch.analysis.ids import ids_of
from gradbatch.api import backward
from gradbatch.errors import UsageError
from gradbatch.quantities import BatchDotGrad
from gradbatch.requests import check_losses


class SampleScores:
    r"""Collects a number of each sample of a data set, whenever it is seen.

    With norms of gradients, the mean over some short training runs from different initialisations is the **GraNd**
    score: how much a sample matters early in training; those with a wrong label are among the largest. With squared
    norms times the learning rate, the sum over checkpoints is **TracIn's self-influence**:
    :math:`\sum_k \eta_k \lVert g_n(\theta_k) \rVert^2`.

    Args:
        size: of the data set.

    Edge cases: NaN is the mean of a sample that was never seen. Numbers that are not finite make the sample's score so.

    References:
        Deep Learning on a Data Diet (Paul, Ganguli, Dziugaite, 2021), https://arxiv.org/abs/2107.07075

        Estimating Training Data Influence by Tracing Gradient Descent (Pruthi et al., 2020),
        https://arxiv.org/abs/2002.08484

    Example:
        >>> import torch
        >>> from gradbatch.analysis import SampleScores
        >>> scores = SampleScores(4)
        >>> scores.update(torch.tensor([0, 2]), torch.tensor([1.0, 5.0]))
        >>> scores.update(torch.tensor([2, 1]), torch.tensor([7.0, 2.0]))
        >>> scores.mean()
        tensor([1., 2., 6., nan], dtype=torch.float64)
        >>> scores.largest(2)
        [2, 1]
    """

    def __init__(self, size: int) -> None:
        self._sums: Tensor = torch.zeros(size, dtype=torch.double)
        self._squares: Tensor = torch.zeros(size, dtype=torch.double)
        self._visits: Tensor = torch.zeros(size, dtype=torch.double)

    def update(self, ids: Tensor | Sequence[int], values: Tensor) -> None:
        """Add a number for each of some samples.

        Args:
            ids: of the samples, ``[N]``, from 0; one may occur several times.
            values: ``[N]``.

        Raises:
            UsageError: the shapes differ, or an id is out of range, or no whole number.
        """
        places = ids_of(ids, len(self._sums))
        numbers = values.detach().to("cpu", torch.double)
        if places.shape != numbers.shape:
            raise UsageError(
                f"ids {list(places.shape)} and values {list(numbers.shape)}; expected [N] and [N]"
            )
        self._sums.index_add_(0, places, numbers)
        self._squares.index_add_(0, places, numbers**2)
        self._visits.index_add_(0, places, torch.ones_like(numbers))

    def merge(self, other: SampleScores) -> None:
        """Add those of another rank.

        Raises:
            UsageError: another size.
        """
        if len(other._sums) != len(self._sums):
            raise UsageError(f"scores of {len(self._sums)} and of {len(other._sums)} samples do not merge")
        self._sums, self._squares = self._sums + other._sums, self._squares + other._squares
        self._visits = self._visits + other._visits

    def visits(self) -> Tensor:
        """How often each sample was seen, ``[size]``."""
        return self._visits.clone()

    def sum(self) -> Tensor:
        """``[size]``, float64."""
        return self._sums.clone()

    def mean(self) -> Tensor:
        """``[size]``, float64."""
        return self._sums / self._visits

    def standard_error(self) -> Tensor:
        """Of the mean, ``[size]``, if a sample's numbers are independent; NaN for fewer than two."""
        variance = (self._squares - self._sums**2 / self._visits).clamp_min(0) / (self._visits - 1)
        return torch.where(self._visits > 1, (variance / self._visits).sqrt(), torch.nan)

    def largest(self, count: int) -> list[int]:
        """Ids of the samples with the largest means, largest first; those never seen are not among them.

        What is not finite is the largest of all.
        """
        seen = self._visits.nonzero()[:, 0]
        means = self.mean()[seen].nan_to_num(nan=torch.inf, posinf=torch.inf)
        largest: list[int] = seen[means.argsort(descending=True, stable=True)[:count]].tolist()
        return largest


def influence(model: nn.Module, losses: Tensor, others: Tensor) -> Tensor:
    r"""Dot products between the gradients of two sets of samples, ``[N, M]``: TracIn's influence at one checkpoint.

    .. math:: \langle g_n, g'_m \rangle

    Times the learning rate, by how much a step on sample ``n`` lowers the loss of sample ``m``, to first order; summed
    over checkpoints it is TracIn. Positive: a proponent; negative: an opponent. No gradient is materialised for it.

    Args:
        model: an extended model.
        losses: ``[N]``, such as those of training samples.
        others: ``[M]``, such as those of test samples.

    Raises:
        GradBatchError: as :func:`gradbatch.backward`.

    Edge cases: the Gram matrix of both sets together, ``[N + M, N + M]``, is computed on the way.

    References:
        Estimating Training Data Influence by Tracing Gradient Descent (Pruthi et al., 2020),
        https://arxiv.org/abs/2002.08484

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch.analysis import influence
        >>> model = gradbatch.extend(torch.nn.Linear(2, 1, bias=False))
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
        >>> influence(model, model(x[:2]).squeeze(1), model(x[2:]).squeeze(1))
        tensor([[3.],
                [2.]])
    """
    check_losses(losses)
    check_losses(others)
    gram = backward(model, torch.cat([losses, others]), BatchDotGrad())[BatchDotGrad].total()
    return gram[: len(losses), len(losses) :]
