"""Sums over samples where a sample's own terms cancel each other: what rounding leaves of it must stay small.

A norm and a weighted sum add up the same terms in different orders, so each has a rounding error of its own, which is
relative to the terms and not to the gradient. Where a gradient is far smaller than its terms, weights that were chosen
by its norm bound nothing of what the sum gets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradbatch.factors.base import PerSampleGrad
from gradbatch.factors.blocks import Blocks
from gradbatch.factors.dense import Dense
from gradbatch.factors.outer_product import OuterProduct
from gradbatch.factors.permuted import Permuted
from gradbatch.factors.row_scatter import RowScatter
from gradbatch.factors.sums import Concat, Sum, sum_tensors
from gradbatch.plans.convolutions import Patches
from gradbatch.plans.kernels import squared_norms
from gradbatch.plans.operands import full_precision


def term_norms(grad: PerSampleGrad) -> Tensor | None:
    """At least the sum of the norms of the terms that each gradient is added up from, ``[N]``.

    ``None`` where each is one term, so that this is its own norm.
    """
    with full_precision(grad.device):
        return None if _is_one_term(grad) else _term_norms(grad)


def capped_sum(grad: PerSampleGrad, weights: Tensor, norms: Tensor) -> Tensor:
    """Weighted sum, ``[*shape]``, of gradients that are materialised and cut to given norms.

    Args:
        grad: the gradients.
        weights: ``[N]``.
        norms: what each is taken to have, ``[N]``: where it has more, it is scaled down to that. One that is not finite
            adds nothing.
    """
    total = torch.zeros(math.prod(grad.shape), dtype=grad.dtype, device=grad.device)
    with full_precision(grad.device):
        for samples, block in grad._blocks(grad.dtype):
            found = squared_norms(block).sqrt()
            kept = torch.where(found > norms[samples], norms[samples] / found, 1.0)
            finite = found.isfinite()
            total += torch.where(finite, weights[samples] * kept, 0) @ torch.where(finite[:, None], block, 0)
    return total.reshape(grad.shape)


def _is_one_term(grad: PerSampleGrad) -> bool:
    """Whether no element is added up from several terms: it is materialised, or a product at one position."""
    if isinstance(grad, Permuted):
        return _is_one_term(grad.grad)
    if isinstance(grad, Blocks):
        return all(_is_one_term(block) for block in grad.blocks.values())
    return isinstance(grad, Dense) or (isinstance(grad, OuterProduct) and grad.left.shape[3] == 1)


def _term_norms(grad: PerSampleGrad) -> Tensor:
    if isinstance(grad, Sum):
        return sum_tensors([_term_norms(term) for term in grad.terms])
    if isinstance(grad, Permuted):
        return _term_norms(grad.grad)
    if isinstance(grad, Blocks):
        return sum_tensors([_term_norms(block) for block in grad.blocks.values()])
    if isinstance(grad, Concat):
        return torch.cat([_term_norms(part) for part in grad.parts])
    if isinstance(grad, RowScatter):
        each = torch.linalg.vector_norm(grad.values.to(grad.dtype), dim=2)
        return torch.where(grad.ids >= 0, each, 0).sum(1)
    if isinstance(grad, OuterProduct):
        # By Cauchy and Schwarz, over positions: two cheap norms of all positions bound the sum of their products.
        left, right = grad.left.to(grad.dtype), grad.right
        if not isinstance(right, Patches):
            return _norms(left) * _norms(right.to(grad.dtype))
        # An element of the source is in at most as many patches as a window has elements.
        often = math.sqrt(math.prod(right.window.kernel))
        return _norms(left) * _norms(right.per_sample().to(grad.dtype)) * often
    return grad.squared_norm().sqrt()


def _norms(operand: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(operand, dim=tuple(range(1, operand.dim())))
    return norms
