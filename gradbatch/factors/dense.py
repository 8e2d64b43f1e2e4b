"""Materialised per-sample gradients: norms' affine parameters, biases, and whatever has no better structure."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradbatch.errors import RuleError
from gradbatch.factors.base import PerSampleGrad
from gradbatch.plans.kernels import squared_norms


class Dense(PerSampleGrad):
    """Per-sample gradients as one tensor.

    Args:
        values: ``[N, *shape]``, any strides; an expanded tensor is never copied as a whole.

    Raises:
        RuleError: when ``values`` has no sample axis or is no real floating point tensor.

    Example:
        >>> import torch
        >>> Dense(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).squared_norm()
        tensor([25.,  1.])
    """

    def __init__(self, values: Tensor) -> None:
        check_floating("Dense", values=values.dtype)
        if values.dim() < 1:
            raise RuleError("Dense takes values [N, *shape]; these have no sample axis.")
        super().__init__(values.shape[1:], values.shape[0], [values.dtype], values.device)
        self.values = values

    def _dense(self) -> Tensor:
        return self.values.to(self.dtype)

    def _dense_into(self, out: Tensor) -> Tensor:
        return out.copy_(self.values)

    def _sum(self) -> Tensor:
        return self._rows().sum(0).reshape(self.shape) if self._is_plain else super()._sum()

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        if not self._is_plain or weights.dtype != self.dtype:
            return super()._weighted_sum(weights)
        return torch.mm(weights, self._rows()).view(weights.shape[0], *self.shape)

    def _squared_norm(self) -> Tensor:
        return squared_norms(self._rows()) if self._is_plain else super()._squared_norm()

    @property
    def _is_plain(self) -> bool:
        """Whether nothing has to be copied before it can be computed with."""
        return self.values.dtype == self.dtype and self.values.is_contiguous()

    def _rows(self) -> Tensor:
        return self.values.reshape(self.num_samples, self._numel)

    def _part(self, start: int, stop: int) -> "Dense":
        return Dense(self.values[start:stop])

    def _select(self, index: Tensor) -> "Dense":
        return Dense(self.values[index])

    def _regroup(self, k: int) -> "Dense":
        rows = self.values.reshape(self.num_samples // k, k, *self.shape)
        return Dense(rows.sum(1, dtype=self.dtype))


def check_floating(structure: str, **dtypes: torch.dtype) -> None:
    """Raise :class:`RuleError` unless all operands are real floating point numbers."""
    for name, dtype in dtypes.items():
        if not dtype.is_floating_point:
            raise RuleError(f"{structure} takes real floating point {name}; these are {dtype}.")


def check_devices(structure: str, devices: Sequence[torch.device]) -> None:
    """Raise :class:`RuleError` unless all operands are on one device."""
    if len(set(devices)) > 1:
        raise RuleError(
            f"{structure} takes operands on one device; these are on {', '.join(map(str, devices))}."
        )
