"""How far the gradients of different samples agree."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

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
    member = torch.nn.functional.one_hot(places, len(classes)).to(gram.dtype)
    pairs = member.mT @ counted.to(gram.dtype) @ member
    return classes, torch.where(pairs > 0, member.mT @ values @ member / pairs, math.nan)


def _check_gram(gram: Tensor) -> None:
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1]:
        raise UsageError(f"a Gram matrix is [N, N], not {list(gram.shape)}")
