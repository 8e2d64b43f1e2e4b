"""How far the gradients of different samples agree."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gradbatch.analysis.intervals import ends, jackknife_variance, student_quantile
from gradbatch.errors import UsageError


def coherence(sum_of_squares: Tensor, square_of_sum: Tensor) -> Tensor:
    r"""How many samples each gradient of a batch helps, itself included (m-coherence).

    .. math:: \frac{\lVert \sum_n g_n \rVert^2}{\sum_n \lVert g_n \rVert^2}

    ``N`` where all gradients are equal, 1 where they are at right angles, 0 where they cancel. Its inverse is
    :func:`diversity`. It depends on ``N``: compare batches of one size.

    Args:
        sum_of_squares: of the norms of the samples' gradients; any shape.
        square_of_sum: squared norm of the summed gradients; of the same shape.

    Returns: of the same shape, float64.

    Edge cases: NaN where all gradients are zero.

    References:
        Making Coherence Out of Nothing At All (Chatterjee, Zielinski, 2020), https://arxiv.org/abs/2008.01217

    Example:
        >>> import torch
        >>> from gradbatch.analysis import coherence
        >>> coherence(torch.tensor(14.0), torch.tensor(20.0))  # of [1, 0] and [3, 2]
        tensor(1.4286, dtype=torch.float64)
    """
    return square_of_sum.double() / sum_of_squares.double()


def coherence_interval(squared_norms: Tensor, dots: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    r"""Confidence interval of the :func:`coherence` of ``N`` samples, from one batch of them.

    Coherence is :math:`1 + (N - 1) \rho`, where
    :math:`\rho = \lVert G \rVert^2 / \operatorname E \lVert g \rVert^2` does not depend on ``N``. The interval is that
    of :math:`\rho`, by the jackknife: what the batch says without each of its samples, which takes their norms and dot
    products with the sum alone. Of many batches, put the ends of :meth:`NoiseScale.interval
    <gradbatch.analysis.NoiseScale.interval>` for ``B`` into :math:`1 + (N - 1) / (1 + B)`.

    Args:
        squared_norms: of the samples' gradients, ``[*shape, N]``, such as ``results[BatchL2Grad].total()``.
        dots: with the batch's sum, of the same shape, such as ``results[BatchDotSum].total()``.
        level: chance to cover the truth, for independent samples. It is less where few gradients are most of the sum of
            squares (89% to 93% instead of 95% where norms are log-normal and spread by a factor of e), and more where
            :math:`G` is zero (97% to 99%).

    Returns: lower and upper ends, ``[*shape]``, float64, between 0 and ``N``.

    Raises:
        UsageError: the shapes differ, or the level is not between 0 and 1.

    Edge cases: from 0 to ``N`` for fewer than four samples, and for gradients that are zero or not finite.

    References:
        Jackknifing U-Statistics (Arvesen, 1969), https://doi.org/10.1214/aoms/1177697287

    Example:
        >>> import torch
        >>> from gradbatch.analysis import coherence, coherence_interval
        >>> g = torch.randn(50, 8) + 0.3
        >>> squares, dots = g.square().sum(1), g @ g.sum(0)
        >>> low, high = coherence_interval(squares, dots)
        >>> bool(low < coherence(squares.sum(), dots.sum()) < high)
        True
    """
    if squared_norms.shape != dots.shape or not squared_norms.dim():
        raise UsageError(
            f"squared norms {list(squared_norms.shape)} and dots {list(dots.shape)}; expected [N] and [N]"
        )
    squares, products = (tensor.detach().to("cpu", torch.double) for tensor in (squared_norms, dots))
    count = squares.shape[-1]
    sum_of_squares, square_of_sum = squares.sum(-1, keepdim=True), products.sum(-1, keepdim=True)

    def share(count: int, sum_of_squares: Tensor, square_of_sum: Tensor) -> Tensor:
        return (square_of_sum / sum_of_squares - 1) / (count - 1)

    without = share(count - 1, sum_of_squares - squares, square_of_sum - 2 * products + squares)
    half = jackknife_variance(without).sqrt() * student_quantile(level, torch.tensor(count - 1.0))
    middle = share(count, sum_of_squares, square_of_sum)[..., 0]
    return ends(1 + (count - 1) * middle, (count - 1) * half, 0, count)


def diversity(sum_of_squares: Tensor, square_of_sum: Tensor) -> Tensor:
    r"""How different the gradients of a data set are.

    .. math:: \frac{\sum_n \lVert g_n \rVert^2}{\lVert \sum_n g_n \rVert^2}

    Times ``N``, a bound on the batch size up to which stochastic gradient descent loses nothing a sample.

    Args:
        sum_of_squares, square_of_sum: as for :func:`coherence`; of the whole data set, or of many samples.

    Returns: of the same shape, float64.

    Edge cases: infinite where the gradients cancel, NaN where all are zero.

    References:
        Gradient Diversity: a Key Ingredient for Scalable Distributed Learning (Yin et al., 2018),
        https://arxiv.org/abs/1706.05699
    """
    return sum_of_squares.double() / square_of_sum.double()


def diversity_interval(squared_norms: Tensor, dots: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Confidence interval of the :func:`diversity` of ``N`` samples: the inverse of :func:`coherence_interval`.

    Args:
        squared_norms, dots, level: as there.

    Returns: lower and upper ends, ``[*shape]``, float64; from ``1 / N`` on.

    Raises:
        UsageError: as there.

    Edge cases: the upper end is infinite where the gradients may cancel.
    """
    low, high = coherence_interval(squared_norms, dots, level)
    return 1 / high, 1 / low


def cosines(gram: Tensor) -> Tensor:
    """Cosines of the angles between gradients.

    Args:
        gram: dot products ``[N, N]``, such as ``results[BatchDotGrad].total()``.

    Returns: ``[N, N]``, between -1 and 1.

    Raises:
        UsageError: the matrix is not square.

    Edge cases: NaN in the row and column of a gradient that is zero.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import cosines
        >>> cosines(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))
        tensor([[1., 0.],
                [0., 1.]])
    """
    _check_gram(gram)
    norms = gram.diagonal().clamp_min(0).sqrt()
    return (gram / norms / norms[:, None]).clamp(-1, 1)


def confusion(gram: Tensor) -> Tensor:
    r"""How much two samples pull against each other at worst (gradient confusion).

    .. math:: \eta = \max\left(0, -\min_{n \ne m} \langle g_n, g_m \rangle\right)

    A lower bound on that of the data set, without an interval: of an extreme, the samples that were drawn do not say
    how far away it is. They bound how many pairs are worse: with 95% confidence, at most
    :math:`1 - 0.05^{1 / \lfloor N / 2 \rfloor}` of all, since disjoint pairs are independent (17% for ``N = 32``).

    Args:
        gram: dot products ``[N, N]``; also of mini-batches, as in the paper, if these are what is in rows.

    Returns: ``[]``; 0 where no pair disagrees.

    Raises:
        UsageError: the matrix is not square.

    Edge cases: 0 for fewer than two samples; NaN where a gradient is.

    References:
        The Impact of Neural Network Overparameterization on Gradient Confusion and Stochastic Gradient Descent
        (Sankararaman et al., 2020), https://arxiv.org/abs/1904.06963

    Example:
        >>> import torch
        >>> from gradbatch.analysis import confusion
        >>> confusion(torch.tensor([[4.0, -3.0], [-3.0, 9.0]]))
        tensor(3.)
    """
    _check_gram(gram)
    pairs = gram[~torch.eye(len(gram), dtype=torch.bool, device=gram.device)]
    return gram.new_zeros(()) if not len(pairs) else (-pairs.min()).clamp_min(0)


def stiffness(
    gram: Tensor, labels: Tensor, kind: Literal["sign", "cosine"] = "cosine"
) -> tuple[Tensor, Tensor]:
    """How far a step for samples of one class also helps those of another.

    The mean over pairs of different samples of the sign, or cosine, of the angle between their gradients.

    Args:
        gram: dot products ``[N, N]``.
        labels: class of each sample, ``[N]``.
        kind: ``"cosine"``, or ``"sign"``: between -1 (each pair disagrees) and 1.

    Returns: the classes in order ``[C]``, and the means ``[C, C]``, symmetric.

    Raises:
        UsageError: the matrix is not square, there is not one label a sample, or another kind.

    Edge cases: NaN for a class with itself that has one sample only. Pairs with a gradient of zero are left out.

    References:
        Stiffness: A New Perspective on Generalization in Neural Networks (Fort et al., 2019),
        https://arxiv.org/abs/1901.09491

    Example:
        >>> import torch
        >>> from gradbatch.analysis import stiffness
        >>> g = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
        >>> classes, means = stiffness(g @ g.T, torch.tensor([3, 3, 7, 7]))
        >>> classes, means
        (tensor([3, 7]), tensor([[ 1.0000, -0.5000],
                [-0.5000,  0.0000]]))
    """
    classes, member, counted, values = _agreements(gram, labels, kind)
    pairs = member.mT @ counted @ member
    return classes, torch.where(pairs > 0, member.mT @ values @ member / pairs, math.nan)


def stiffness_interval(
    gram: Tensor, labels: Tensor, kind: Literal["sign", "cosine"] = "cosine", level: float = 0.95
) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence intervals of :func:`stiffness`; with one label for all, of how far all samples agree.

    By the jackknife: how the mean over pairs changes without each of the samples, class by class, which takes only the
    sums of the rows.

    Args:
        gram, labels, kind: as there.
        level: chance to cover the mean over all pairs, for samples that are drawn independently of each other within
            each class. It is more where the gradients have nothing in common.

    Returns: the classes in order ``[C]``, lower and upper ends ``[C, C]``, symmetric, float64, between -1 and 1.

    Raises:
        UsageError: as there, or the level is not between 0 and 1.

    Edge cases: from -1 to 1 for classes of fewer than four samples (with a gradient), and where all pairs agree
    equally, such as in sign: nothing scatters that would say how sure that is.

    References:
        Jackknifing U-Statistics (Arvesen, 1969), https://doi.org/10.1214/aoms/1177697287

    Example:
        >>> import torch
        >>> from gradbatch.analysis import stiffness_interval
        >>> g = torch.randn(40, 8) + 0.3
        >>> _, low, high = stiffness_interval(g @ g.mT, torch.zeros(40))
        >>> bool(low > 0), bool(high < 0.5)
        (True, True)
    """
    classes, member, counted, values = _agreements(gram.detach().cpu().double(), labels, kind)
    rows, pairs = values @ member, counted @ member  # [N, C]
    sums, counts = member.mT @ rows, member.mT @ pairs  # [C, C]
    # In the sums of its own class, a sample is in a row and in a column.
    times = 1 + member
    without = (member @ sums - times * rows) / (member @ counts - times * pairs)
    variances, degrees = torch.full_like(sums, math.nan), torch.full_like(sums, math.nan)
    alive = counted.any(1)
    for place in range(len(classes)):
        inside = without[(member[:, place] > 0) & alive]
        variances[place], degrees[place] = jackknife_variance(inside.mT), len(inside) - 1
    # Of two classes the samples are drawn one by one, and variances add up; degrees of freedom by Welch.
    apart = ~torch.eye(len(classes), dtype=torch.bool)
    variance = variances + variances.mT * apart
    freedom = variance**2 / (variances**2 / degrees + (variances**2 / degrees).mT * apart)
    half = torch.where(variance > 0, variance.sqrt() * student_quantile(level, freedom), math.nan)
    return classes, *ends(sums / counts, half, -1, 1)


def _agreements(gram: Tensor, labels: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Classes ``[C]``; which sample is in which, ``[N, C]``; which pairs count, and how they agree, ``[N, N]``."""
    _check_gram(gram)
    if labels.shape != gram.shape[:1]:
        raise UsageError(f"labels {list(labels.shape)} for a Gram matrix {list(gram.shape)}; expected [N]")
    if kind not in ("sign", "cosine"):
        raise UsageError(f'kind is {kind!r}; it is "sign" or "cosine"')
    cosine = cosines(gram)
    counted = ~cosine.isnan()
    counted.fill_diagonal_(False)
    values = torch.where(counted, cosine if kind == "cosine" else cosine.sign(), 0)
    classes, places = labels.to(gram.device).unique(return_inverse=True)
    member = (places[:, None] == torch.arange(len(classes), device=gram.device)).to(gram.dtype)
    return classes, member, counted.to(gram.dtype), values


def _check_gram(gram: Tensor) -> None:
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1]:
        raise UsageError(f"a Gram matrix is [N, N], not {list(gram.shape)}")
