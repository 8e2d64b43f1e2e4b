"""References that share nothing with the package: per-sample gradients by other means, and what is made of them.

A model here takes and returns tensors with the samples on axis 0. A loss takes its output and a target, both
``[N, ...]``, and returns one number a sample, ``[N]``, each from that sample's own rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradbatch import (
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSum,
    PerSampleGrad,
    Quantity,
    SumGradSquared,
    Variance,
    WeightedSum,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}

Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor]


def projection(output: Tensor, target: Tensor) -> Tensor:
    """The loss whose output gradient is ``target`` itself, in the memory layout that it has."""
    return (output * target).unsqueeze(-1).flatten(1).sum(1)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# ---------------------------------------------------------------------- per-sample gradients, three ways


def vmap(model: nn.Module, loss: Loss, inputs: Sequence[Tensor], target: Tensor) -> Gradients:
    """``torch.func.vmap(grad)``: not for layers that change something in place, or look at values."""
    parameters = {name: p.detach() for name, p in trainable(model).items()}

    def own_loss(parameters: Gradients, target: Tensor, *sample: Tensor) -> Tensor:
        batch = tuple(x.unsqueeze(0) for x in sample)
        return loss(torch.func.functional_call(model, parameters, batch), target.unsqueeze(0))[0]

    per_sample = torch.func.vmap(torch.func.grad(own_loss), in_dims=(None, 0, *(0 for _ in inputs)))
    return per_sample(parameters, target, *inputs)


def one_hot(model: nn.Module, loss: Loss, inputs: Sequence[Tensor], target: Tensor) -> Gradients:
    """One forward of the whole batch, and ``N`` backward passes of one loss each."""
    return one_hot_of(loss(model(*inputs), target), trainable(model))


def one_hot_of(losses: Tensor, parameters: Mapping[str, Tensor]) -> Gradients:
    """Gradients of each of ``losses`` alone; what depends on no parameter has zero gradients."""
    rows = []
    for weights in torch.eye(len(losses), dtype=losses.dtype, device=losses.device):
        found = torch.autograd.grad(
            losses, [*parameters.values()], weights, retain_graph=True, allow_unused=True
        )
        rows.append([strided(g, p) for g, p in zip(found, parameters.values(), strict=True)])
    return {
        name: torch.stack([row[i] for row in rows]) if rows else p.detach().new_zeros(0, *p.shape)
        for i, (name, p) in enumerate(parameters.items())
    }


def loop(model: nn.Module, loss: Loss, inputs: Sequence[Tensor], target: Tensor) -> Gradients:
    """A batch of one at a time; the only one that is right where a layer counts over the batch."""
    single = [
        one_hot(model, loss, [x[n : n + 1] for x in inputs], target[n : n + 1]) for n in range(len(target))
    ]
    return {name: torch.cat([found[name] for found in single]) for name in trainable(model)}


ORACLES: dict[str, Callable[[nn.Module, Loss, Sequence[Tensor], Tensor], Gradients]] = {
    "vmap": vmap,
    "one hot": one_hot,
    "loop": loop,
}


def strided(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A parameter's gradient as a plain tensor: zeros if there is none, dense if it is sparse."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


# ---------------------------------------------------------------------- what is made of gradients X [N, *shape]


class Arguments(NamedTuple):
    """Arguments of the operations on the gradients of a parameter of some shape."""

    weights: Tensor
    several_weights: Tensor
    direction: Tensor
    directions: Tensor

    @classmethod
    def draw(cls, n: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "Arguments":
        generator = torch.Generator().manual_seed(n)
        shapes = ((n,), (2, n), shape, (2, *shape))
        return cls(
            *(torch.randn(s, generator=generator, dtype=torch.double).to(device, dtype) for s in shapes)
        )


def backwards(n: int, device: torch.device) -> Tensor:
    return torch.arange(n - 1, -1, -1, device=device)


# Each operation of PerSampleGrad, on the structure and on its materialised gradients.
OPERATIONS: dict[
    str, tuple[Callable[[PerSampleGrad, Arguments], Tensor], Callable[[Tensor, Arguments], Tensor]]
] = {
    "dense": (lambda g, a: g.dense(), lambda x, a: x),
    "sum": (lambda g, a: g.sum(), lambda x, a: x.sum(0)),
    "weighted_sum": (
        lambda g, a: g.weighted_sum(a.weights),
        lambda x, a: torch.einsum("n,n...->...", a.weights, x),
    ),
    "weighted_sums": (
        lambda g, a: g.weighted_sum(a.several_weights),
        lambda x, a: torch.einsum("kn,n...->k...", a.several_weights, x),
    ),
    "squared_norm": (lambda g, a: g.squared_norm(), lambda x, a: x.flatten(1).square().sum(1)),
    "inner": (
        lambda g, a: g.inner(g.select(backwards(g.num_samples, g.device))),
        lambda x, a: (x * x.flip(0)).flatten(1).sum(1),
    ),
    "gram": (lambda g, a: g.gram(), lambda x, a: x.flatten(1) @ x.flatten(1).mT),
    "gram_of_two": (
        lambda g, a: g.gram(g.select(backwards(g.num_samples, g.device)[:2])),
        lambda x, a: x.flatten(1) @ x.flip(0)[:2].flatten(1).mT,
    ),
    "sum_of_squares": (lambda g, a: g.sum_of_squares(), lambda x, a: x.square().sum(0)),
    "sum_of_centered_squares": (
        lambda g, a: g.sum_of_squares(a.direction),
        lambda x, a: (x - a.direction).square().sum(0),
    ),
    "moments": (
        lambda g, a: torch.stack(g.moments()),
        lambda x, a: torch.stack([x.mean(0), (x - x.mean(0)).square().sum(0)]),
    ),
    "dot": (lambda g, a: g.dot(a.direction), lambda x, a: (x * a.direction).flatten(1).sum(1)),
    "project": (
        lambda g, a: g.project(a.directions),
        lambda x, a: x.flatten(1) @ a.directions.flatten(1).mT,
    ),
    "plus": (
        lambda g, a: (g + g.select(backwards(g.num_samples, g.device))).dense(),
        lambda x, a: x + x.flip(0),
    ),
    "norm_of_sum": (
        lambda g, a: (g + g.select(backwards(g.num_samples, g.device))).squared_norm(),
        lambda x, a: (x + x.flip(0)).flatten(1).square().sum(1),
    ),
}


def quantities(n: int, dtype: torch.dtype, device: torch.device) -> list[Quantity]:
    """An instance of every quantity, in every mode that it has."""
    single, several, *_ = Arguments.draw(n, torch.Size([1]), dtype, device)
    return [
        BatchGrad(),
        BatchL2Grad(),
        BatchDotGrad(),
        SumGradSquared(),
        Variance(),
        Variance(unbiased=True),
        WeightedSum(single),
        WeightedSum(several),
        ClippedSum(0.5),
        ClippedSum(0.5, style="normalise"),
    ]


# By definition, from all gradients, in float64; a quantity that is not here fails the completeness test.
QUANTITIES: dict[type[Quantity], Callable[..., Tensor]] = {
    BatchGrad: lambda q, x: x,
    BatchL2Grad: lambda q, x: x.flatten(1).square().sum(1),
    BatchDotGrad: lambda q, x: x.flatten(1) @ x.flatten(1).mT,
    SumGradSquared: lambda q, x: x.square().sum(0),
    Variance: lambda q, x: x.var(0, correction=int(q.unbiased)),
    WeightedSum: lambda q, x: torch.einsum("...n,nx->...x", q.weights.double(), x.flatten(1)).reshape(
        *q.weights.shape[:-1], *x.shape[1:]
    ),
}


# The same for quantities of a parameter that depend on all: from its gradients and a list of those of every parameter.
JOINT_QUANTITIES: dict[type[Quantity], Callable[..., Tensor]] = {
    ClippedSum: lambda q, x, every: torch.einsum("n,nx->x", _factors(q, every), x.flatten(1)).reshape(
        x.shape[1:]
    ),
}


def _factors(asked: ClippedSum, every: Sequence[Tensor]) -> Tensor:
    if asked.style == "normalise":
        return asked.max_norm / (_norms(every) + asked.stability)
    return (asked.max_norm / _norms(every)).clamp(max=1)


def _norms(every: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten(1) for each in every], 1).norm(dim=1)


def quantity(asked: Quantity, gradients: Tensor, every: Iterable[Tensor] = ()) -> Tensor:
    """What the definition of a quantity gives for per-sample gradients ``[N, *shape]``.

    Args:
        asked: the quantity.
        gradients: of one parameter.
        every: of all parameters; that one alone by default.
    """
    if type(asked) in JOINT_QUANTITIES:
        together = [each.double() for each in every] or [gradients.double()]
        return JOINT_QUANTITIES[type(asked)](asked, gradients.double(), together)
    return QUANTITIES[type(asked)](asked, gradients.double())


def terms_of(asked: Quantity) -> float:
    """Size of the terms of a quantity that is a sum of terms of one size, which may cancel; else 0."""
    return asked.max_norm if isinstance(asked, ClippedSum) else 0.0


# ---------------------------------------------------------------------- comparison


def assert_right(
    actual: Tensor,
    expected: Tensor,
    tolerance: float,
    what: str = "",
    per_sample: bool = False,
    terms: float = 0.0,
) -> None:
    """Equal relative to the largest element: of the whole result, or of each sample (axis 0).

    A sum whose terms may cancel is as exact as they are: it is compared at the size of its ``terms``.
    """
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    error = relative_error(actual, expected, per_sample, terms)
    assert error <= tolerance, f"{what}: relative error {error:.3g} exceeds {tolerance:g}"


def relative_error(actual: Tensor, expected: Tensor, per_sample: bool = False, terms: float = 0.0) -> float:
    """Largest difference relative to the largest element of ``expected``, or of the same sample in it.

    A sample whose gradient is zero, or a millionth of the others', is measured by a millionth of the others'.
    """
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    difference, size = (actual.double() - expected.double()).abs(), expected.double().abs()
    if not bool(actual.isfinite().all()):
        return float("inf")
    scale = size.amax().clamp_min(terms)
    if per_sample:
        rows = size.reshape(len(size), -1).amax(1).clamp_min(float(scale) * 1e-6)
        scale = rows.view(-1, *(1,) * (size.dim() - 1))
    # Where everything is zero, only zero is right.
    return float((difference / scale.clamp_min(torch.finfo(torch.double).tiny)).amax())
