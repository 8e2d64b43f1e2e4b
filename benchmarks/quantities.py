"""The quantities that are timed, and how each follows from per-sample gradients that are already there."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Of each parameter by name; of the whole model, under "total", for norms and dot products.
Answer = Mapping[str, Tensor]
PerSample = Mapping[str, Tensor]

CLIP = 1.0  # the norm that samples' gradients are clipped to


def clip_coefficients(squared_norms: Tensor) -> Tensor:
    """What each sample's gradient is multiplied by, ``[N]``."""
    return (CLIP / squared_norms.sqrt()).clamp(max=1.0)


def batch_grad(grads: PerSample) -> Answer:
    return grads


def batch_l2_grad(grads: PerSample) -> Answer:
    """``[N]``. ``vector_norm`` would be shorter, but adds up a million float32 to no more than three digits."""
    return {"total": sum(torch.einsum("np,np->n", g.flatten(1), g.flatten(1)) for g in grads.values())}


def batch_dot_grad(grads: PerSample) -> Answer:
    """``[N, N]``."""
    return {"total": sum(g.flatten(1) @ g.flatten(1).mT for g in grads.values())}


def sum_grad_squared(grads: PerSample) -> Answer:
    return {name: g.square().sum(0) for name, g in grads.items()}


def variance(grads: PerSample) -> Answer:
    return {name: g.var(0, correction=0) for name, g in grads.items()}


def clipped_sum(grads: PerSample) -> Answer:
    coefficients = clip_coefficients(batch_l2_grad(grads)["total"])
    return {name: (coefficients @ g.flatten(1)).view_as(g[0]) for name, g in grads.items()}


FROM_GRADS: dict[str, Callable[[PerSample], Answer]] = {
    "BatchGrad": batch_grad,
    "BatchL2Grad": batch_l2_grad,
    "BatchDotGrad": batch_dot_grad,
    "SumGradSquared": sum_grad_squared,
    "Variance": variance,
    "clipped sum": clipped_sum,
}
QUANTITIES = tuple(FROM_GRADS)
