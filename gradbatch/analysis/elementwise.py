"""Statistics of single elements of the parameters: when to stop, and which to hold on to."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradbatch.errors import UsageError


def stopping_evidence(count: int, means: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> float:
    r"""Evidence that what is left of the gradient is noise: above 0, training may stop.

    .. math:: 1 - \frac{N}{D} \sum_k \frac{\bar g_k^2}{\hat \sigma_k^2}

    Where the true gradient is zero and samples are many, each term is one on average, and the evidence zero (of ``N``
    samples with normal gradients, :math:`-2 / (N - 3)`). It needs no validation set.

    One batch scatters; average over some, with :func:`mean_interval` of their evidences. One batch alone has no honest
    interval: the scatter of its terms over elements would give one if elements were independent, but each sample
    enters all of them. Of a linear layer with 20 weights that interval covers the truth in 65% of batches instead of
    95%, of wider layers in fewer; over 16 batches, the interval of their mean does in 93%.

    Args:
        count: ``N``.
        means: gradient of the mean loss by parameter, such as ``p.grad``.
        variances: ``results[Variance(unbiased=True)]``, of the same parameters.

    Raises:
        UsageError: the parameters differ.

    Edge cases: elements without variance and gradient (dead units) are left out of the sum and of ``D``; without
    variance but with a gradient, the evidence is minus infinity. NaN where nothing is left.

    References:
        Early Stopping without a Validation Set (Mahsereci et al., 2017), https://arxiv.org/abs/1703.09580

    Example:
        >>> import torch
        >>> from gradbatch.analysis import stopping_evidence
        >>> stopping_evidence(4, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([8.0, 2.0])})
        0.75
    """
    if set(means) != set(variances):
        raise UsageError(
            f"means and variances are of different parameters: {sorted(set(means) ^ set(variances))}"
        )
    terms, elements = 0.0, 0
    for name, mean in means.items():
        square, variance = mean.detach().double().square(), variances[name].double()
        alive = (square != 0) | (variance != 0)
        terms += float((square[alive] / variance[alive]).sum())
        elements += int(alive.sum())
    return 1 - count * terms / elements if elements else math.nan


class FisherDiagonal:
    r"""Diagonal of the empirical Fisher matrix: the mean of squared gradients, elementwise.

    .. math:: F_k = \frac1N \sum_n g_{nk}^2

    With the labels of the data it is the *empirical* Fisher; with labels drawn from the model's own predictions, an
    unbiased estimate of the Fisher matrix's diagonal. Elastic weight consolidation takes it to hold on to those
    parameters that earlier tasks need (:meth:`penalty`).

    Edge cases: empty until the first batch.

    References:
        Overcoming catastrophic forgetting in neural networks (Kirkpatrick et al., 2017),
        https://arxiv.org/abs/1612.00796

        Limitations of the Empirical Fisher Approximation (Kunstner, Balles, Hennig, 2019),
        https://arxiv.org/abs/1905.12558

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch.analysis import FisherDiagonal
        >>> model = gradbatch.extend(torch.nn.Linear(2, 1, bias=False))
        >>> fisher = FisherDiagonal()
        >>> x = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> results = gradbatch.backward(model, model(x).squeeze(1), gradbatch.SumGradSquared())
        >>> fisher.update(results[gradbatch.SumGradSquared], 2)
        >>> fisher.value()["weight"]
        tensor([[5., 2.]])
        >>> anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
        >>> fisher.penalty(model, anchor).item()
        0.0
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def update(self, sums: Mapping[str, Tensor], count: int) -> None:
        """Add a batch.

        Args:
            sums: ``results[SumGradSquared]``.
            count: its samples.

        Raises:
            UsageError: other parameters than before.
        """
        if self._sums and set(sums) != set(self._sums):
            raise UsageError(f"of other parameters than before: {sorted(set(sums) ^ set(self._sums))}")
        self._sums = {
            name: self._sums[name] + sums[name] if self._sums else sums[name].clone() for name in sums
        }
        self._count += count

    def merge(self, other: FisherDiagonal) -> None:
        """Add the batches of another one, such as another rank's.

        Raises:
            UsageError: of other parameters.
        """
        if other._count:
            self.update(other._sums, other._count)

    def value(self) -> dict[str, Tensor]:
        """``[*shape]`` by parameter name."""
        return {name: tensor / self._count for name, tensor in self._sums.items()}

    def penalty(self, model: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
        r"""How far the parameters have moved from earlier ones, where these mattered.

        .. math:: \frac12 \sum_k F_k (\theta_k - \theta^*_k)^2

        Args:
            model: with the parameters.
            anchor: the earlier parameters, by name.

        Returns: ``[]``, to be added to a loss, times a weight.

        Raises:
            UsageError: no parameter has a Fisher diagonal (the model is wrapped, and its names are others), or one that
                has is not in ``anchor``.

        Edge cases: parameters without a Fisher diagonal have no part in it.
        """
        value, terms = self.value(), [torch.zeros(())]
        names = [name for name, _ in model.named_parameters() if name in value]
        if missing := [name for name in names if name not in anchor]:
            raise UsageError(f"anchor has no {missing[0]}; it has {', '.join(anchor)}")
        if value and not names:
            raise UsageError(
                f"the Fisher diagonal is of {', '.join(value)}, and the model has none of these: the penalty would be "
                "zero. Is the model wrapped, by DistributedDataParallel say? Pass the module inside"
            )
        for name, parameter in model.named_parameters():
            if name in value:
                terms.append((value[name] * (parameter - anchor[name]).square()).sum() / 2)
        return torch.stack([term.to(terms[-1].device) for term in terms]).sum()
