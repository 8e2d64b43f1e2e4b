r"""Random projections of per-sample gradients: a few numbers a sample that keep the dot products between samples.

The directions are outer products of random signs, one factor for the rows of a parameter and one for the rest. So they
take memory as the parameter's height and width and not as their product, and meet the factors of a gradient one by one:
:math:`(a_k \otimes b_k) \cdot (\ell\, r^\top) = (a_k \cdot \ell)(b_k \cdot r)`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.factors import Concat, OuterProduct, PerSampleGrad, RowScatter, Sum
from gradbatch.plans.operands import full_precision
from gradbatch.quantities import Quantity


@dataclass(frozen=True)
class RandomProjection(Quantity):
    r"""Random features of each sample's gradient of a parameter, ``[N, K]``; ``.total()`` is those of all parameters.

    .. math:: \varphi_k(g) = \frac{1}{\sqrt K} \sum_{ij} a_{ki} b_{kj} g_{ij}, \qquad
        \mathbb E \langle \varphi(g), \varphi(h) \rangle = \langle g, h \rangle

    with independent random signs :math:`a_k`, :math:`b_k` for each parameter. The error of a dot product is, root mean
    square, at most :math:`3 / \sqrt K` of the product of both norms.

    Embeddings, and linear and recurrent layers with few positions, are projected factor by factor. Of everything else,
    convolutions among them, some samples' gradients at a time are materialised, as many as the planner's budget holds.
    The signs are drawn anew for every batch, ``K`` times height plus width of each parameter, which is most of the time
    that a large table of embeddings takes.

    Args:
        features: ``K``.
        seed: of the signs; the same seed, number of features, and names and shapes of parameters give the same signs,
            on every device.

    Raises:
        UsageError: fewer than one feature, or a number or seed that is no ``int``.

    Edge cases: a non-finite sample has non-finite features, and leaves the others alone. Tied parameters have the signs
    of their first name.

    References:
        Tensorized Random Projections (Rakhshan, Rabusseau, 2020), https://arxiv.org/abs/2003.05101

        TRAK: Attributing Model Behavior at Scale (Park et al., 2023), https://arxiv.org/abs/2303.14186

    Example:
        >>> import torch, gradbatch
        >>> from gradbatch.analysis import RandomProjection
        >>> model = gradbatch.extend(torch.nn.Linear(50, 10))
        >>> losses = model(torch.randn(4, 50)).square().sum(1)
        >>> features = gradbatch.backward(model, losses, RandomProjection(64))[RandomProjection].total()
        >>> features.shape  # of 510 numbers a sample
        torch.Size([4, 64])
    """

    features: int = 512
    seed: int = 0
    _parameter: str = field(default="", repr=False, compare=False)
    name: ClassVar[str] = "random_projection"
    additive: ClassVar[bool] = True
    operations: ClassVar[tuple[str, ...]] = ("project",)

    def __post_init__(self) -> None:
        if type(self.features) is not int or self.features < 1:
            raise UsageError(f"features is {self.features!r}; it is a whole number, 1 or more")
        # 1.0 and True are equal to 1, and would make other signs.
        if type(self.seed) is not int:
            raise UsageError(f"seed is {self.seed!r}; it is a whole number")

    def __repr__(self) -> str:
        return f"RandomProjection({self.features}, seed={self.seed})"

    def of(self, name: str) -> RandomProjection:
        """With the signs of this parameter."""
        return replace(self, _parameter=name)

    def reduce(self, grad: PerSampleGrad) -> Tensor:
        """``[N, K]``."""
        rows, columns = (sign.to(grad.device) for sign in self.signs(grad.shape))
        with full_precision(grad.device):
            features: Tensor = _project(grad, rows, columns) / self.features**0.5
        return features

    def signs(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The signs of a parameter of this shape, ``[K, rows]`` and ``[K, columns]``, int8, on the CPU.

        The first axis of the parameter are rows, all others together columns; a vector has one column, whose sign is 1.
        """
        text = f"{self.seed} {self._parameter}".encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
        rows = shape[0] if shape else 1
        columns = shape[1:].numel()
        a = _random_signs(rows, self.features, generator).mT
        if len(shape) < 2:
            return a, torch.ones(self.features, columns, dtype=torch.int8)
        return a, _random_signs(columns, self.features, generator).mT


def _random_signs(size: int, features: int, generator: torch.Generator) -> Tensor:
    """``[size, K]``, eight from each number that is drawn."""
    count = size * features
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator)
    return ((words.view(torch.int8)[:count] & 1) * 2 - 1).view(size, features)


def _project(grad: PerSampleGrad, a: Tensor, b: Tensor) -> Tensor:
    """Dot products with ``a_k ⊗ b_k``, ``[N, K]``.

    Args:
        grad: of a parameter with ``rows × columns`` elements.
        a: ``[K, rows]``, int8.
        b: ``[K, columns]``, int8.
    """
    if isinstance(grad, Sum):
        return torch.stack([_project(term, a, b).to(grad.dtype) for term in grad.terms]).sum(0)
    if isinstance(grad, Concat):
        return torch.cat([_project(part, a, b).to(grad.dtype) for part in grad.parts])
    if isinstance(grad, RowScatter):
        return _of_rows(grad, a, b)
    if isinstance(grad, OuterProduct) and _pays(grad, a, b):
        return _of_factors(grad, a, b)
    return _of_elements(grad, a, b)


def _pays(grad: OuterProduct, a: Tensor, b: Tensor) -> bool:
    """Whether the factors are projected rather than materialised: where they are those of rows and columns, and few."""
    groups, outputs, inputs = grad.factor_sizes
    if grad.has_patches or (groups * outputs, inputs) != (a.shape[1], b.shape[1]):
        return False
    positions, features = grad.left.shape[3], len(a)
    factors = positions * features * groups * (outputs + inputs)
    return factors <= groups * outputs * inputs * (positions + features)


def _of_factors(grad: OuterProduct, a: Tensor, b: Tensor) -> Tensor:
    groups, outputs, _ = grad.factor_sizes
    positions, features = grad.left.shape[3], len(a)
    a, b = a.to(grad.dtype).view(features, groups, outputs), b.to(grad.dtype)
    out = b.new_empty(grad.num_samples, features)
    for part in _chunks(grad, 2 * features * groups * positions):
        left, right = (factor[part].to(b.dtype) for factor in (grad.left, _tensor(grad.right)))
        lefts = torch.einsum("kgp,ngpt->nkgt", a, left)
        rights = torch.einsum("kd,ngdt->nkgt", b, right)
        out[part] = (lefts * rights).sum((2, 3))
    return out


def _of_rows(grad: RowScatter, a: Tensor, b: Tensor) -> Tensor:
    b = b.to(grad.dtype)
    out = b.new_zeros(grad.num_samples, len(a))
    for part in _chunks(grad, 2 * len(a) * max(1, grad.ids.shape[1])):
        ids, there = grad.ids[part], (grad.ids[part] >= 0)[..., None]
        values = torch.where(there, grad.values[part].to(b.dtype), 0) @ b.mT
        out[part] = (values * a.mT[ids.clamp_min(0)].to(b.dtype)).sum(1)
    return out


def _of_elements(grad: PerSampleGrad, a: Tensor, b: Tensor) -> Tensor:
    rows, columns = a.shape[1], b.shape[1]
    a, b = a.to(grad.dtype), b.to(grad.dtype)
    out = a.new_empty(grad.num_samples, len(a))
    for part in _chunks(grad, rows * columns + min(rows, columns) * len(a)):
        samples = torch.arange(part.start, part.stop, device=grad.device)
        elements = grad.select(samples).dense().to(a.dtype).reshape(len(samples), rows, columns)
        # The longer side first: what is left is smaller.
        if rows > columns:
            out[part] = ((elements.mT @ a.mT) * b.mT).sum(1)
        else:
            out[part] = ((elements @ b.mT) * a.mT).sum(1)
    return out


def _chunks(grad: PerSampleGrad, numbers: int) -> list[slice]:
    """Samples that are taken at a time, where each needs so many numbers."""
    step = max(1, grad.planner.budget // max(1, numbers * grad.dtype.itemsize))
    return [slice(start, min(start + step, grad.num_samples)) for start in range(0, grad.num_samples, step)]


def _tensor(operand: object) -> Tensor:
    assert isinstance(operand, Tensor), "patches are left to the plans of a convolution"
    return operand
