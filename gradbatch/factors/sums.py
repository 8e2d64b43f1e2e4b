"""Gradients put together: added over the calls of one parameter, or one micro-batch after another."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import torch
from torch import Tensor

from gradbatch.errors import RuleError
from gradbatch.factors.base import PerSampleGrad
from gradbatch.factors.dense import Dense, check_devices
from gradbatch.plans.contractions import Planner, accumulation_dtype
from gradbatch.plans.kernels import cancelled


class Sum(PerSampleGrad):
    """Sum of gradients of different structure: one parameter, several calls (a tied embedding and head).

    Args:
        terms: gradients of the same samples and the same parameter, at least one.

    Raises:
        RuleError: when there are none, or they differ in samples, shape or device.
    """

    def __init__(self, terms: Sequence[PerSampleGrad]) -> None:
        self.terms: tuple[PerSampleGrad, ...] = tuple(
            chain.from_iterable(_flattened(term, Sum) for term in terms)
        )
        if len({(term.num_samples, term.shape) for term in self.terms}) != 1:
            raise RuleError(
                f"Sum takes gradients of one parameter and the same samples; got {list(self.terms)}."
            )
        check_devices("Sum", [term.device for term in self.terms])
        first = self.terms[0]
        super().__init__(first.shape, first.num_samples, [term.dtype for term in self.terms], first.device)
        self.planner = first.planner

    def _dense(self) -> Tensor:
        return sum_tensors([term._dense() for term in self.terms])

    def _select(self, index: Tensor) -> "Sum":
        return Sum([term._select(index) for term in self.terms])

    def _part(self, start: int, stop: int) -> "Sum":
        return Sum([term._part(start, stop) for term in self.terms])

    def _regroup(self, k: int) -> "Sum":
        return Sum([term._regroup(k) for term in self.terms])

    def _planned(self, planner: Planner) -> "Sum":
        self.terms = tuple(term.with_planner(planner) for term in self.terms)
        return super()._planned(planner)

    def _noise(self) -> Tensor:
        return sum_tensors([term._noise().sqrt() for term in self.terms]).square()

    def _sum(self) -> Tensor:
        return sum_tensors([term._sum() for term in self.terms])

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        return sum_tensors([term._weighted_sum(weights) for term in self.terms])

    def _squared_norm(self) -> Tensor:
        from gradbatch.factors import pairs

        parts = [term._squared_norm() for term in self.terms]
        for i, term in enumerate(self.terms):
            parts += [2 * pairs.inner_of_terms(term, other) for other in self.terms[i + 1 :]]
        norms = sum_tensors(parts)
        lost = cancelled(self._noise(), norms).nonzero()[:, 0]
        if len(lost) == 0:
            return norms
        again = self._select(lost)._planned(self.planner)
        return norms.index_copy(0, lost, PerSampleGrad._squared_norm(again))

    def _dot(self, direction: Tensor) -> Tensor:
        return sum_tensors([term._dot(direction) for term in self.terms])

    def _project(self, directions: Tensor) -> Tensor:
        return sum_tensors([term._project(directions) for term in self.terms])

    def _details(self) -> str:
        return "".join(f", {term!r}" for term in self.terms)


class Concat(PerSampleGrad):
    """Gradients of micro-batches, one after another.

    Args:
        parts: gradients of one parameter, at least one; their samples follow each other.

    Raises:
        RuleError: when there are none, or they differ in shape or device.
    """

    def __init__(self, parts: Sequence[PerSampleGrad]) -> None:
        self.parts: tuple[PerSampleGrad, ...] = tuple(
            chain.from_iterable(_flattened(part, Concat) for part in parts)
        )
        if len({part.shape for part in self.parts}) != 1:
            raise RuleError(f"Concat takes gradients of one parameter; got {list(self.parts)}.")
        check_devices("Concat", [part.device for part in self.parts])
        first, samples = self.parts[0], sum(part.num_samples for part in self.parts)
        super().__init__(first.shape, samples, [part.dtype for part in self.parts], first.device)
        self.planner = first.planner

    def spans(self) -> Iterator[tuple[int, int, PerSampleGrad]]:
        """First sample, last sample + 1 and gradients of every part."""
        start = 0
        for part in self.parts:
            yield start, start + part.num_samples, part
            start += part.num_samples

    def _dense(self) -> Tensor:
        return torch.cat([part._dense() for part in self.parts])

    def _select(self, index: Tensor) -> PerSampleGrad:
        bounds = torch.tensor([stop for _, stop, _ in self.spans()])
        wrapped = torch.where(index < 0, index + self.num_samples, index).cpu()
        owners = torch.searchsorted(bounds, wrapped, right=True).tolist()
        parts, done = [], 0
        starts = [start for start, _, _ in self.spans()]
        for owner, run in groupby(owners):
            length = len(list(run))
            local = wrapped[done : done + length] - starts[owner]
            parts.append(self.parts[owner]._select(local.to(self.device)))
            done += length
        return Concat(parts) if parts else self.parts[0]._part(0, 0)

    def _part(self, start: int, stop: int) -> PerSampleGrad:
        cut = [
            (max(start - a, 0), min(stop, b) - a, part)
            for a, b, part in self.spans()
            if a < stop and b > start
        ]
        return Concat([part._part(a, b) for a, b, part in cut]) if cut else self.parts[0]._part(0, 0)

    def _regroup(self, k: int) -> PerSampleGrad:
        if all(part.num_samples % k == 0 for part in self.parts):
            return Concat([part._regroup(k) for part in self.parts])
        return Dense(self._dense())._regroup(k)

    def _planned(self, planner: Planner) -> "Concat":
        self.parts = tuple(part.with_planner(planner) for part in self.parts)
        return super()._planned(planner)

    def _noise(self) -> Tensor:
        return torch.cat([part._noise() for part in self.parts])

    def _sum(self) -> Tensor:
        return sum_tensors([part._sum() for part in self.parts])

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        return sum_tensors([part._weighted_sum(weights[:, a:b]) for a, b, part in self.spans()])

    def _squared_norm(self) -> Tensor:
        return torch.cat([part._squared_norm() for part in self.parts])

    def _sum_of_squares(self, center: Tensor | None) -> Tensor:
        return sum_tensors([part._sum_of_squares(center) for part in self.parts])

    def _dot(self, direction: Tensor) -> Tensor:
        return torch.cat([part._dot(direction) for part in self.parts])

    def _project(self, directions: Tensor) -> Tensor:
        return torch.cat([part._project(directions) for part in self.parts])

    def _details(self) -> str:
        return "".join(f", {part!r}" for part in self.parts)


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Add tensors of one shape, in the widest of their dtypes."""
    total = tensors[0].to(accumulation_dtype(*(tensor.dtype for tensor in tensors)))
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _flattened(grad: PerSampleGrad, kind: type["Sum"] | type["Concat"]) -> tuple[PerSampleGrad, ...]:
    """Terms of a sum, parts of a concatenation: neither holds one of its own kind."""
    if not isinstance(grad, kind):
        return (grad,)
    return grad.terms if isinstance(grad, Sum) else grad.parts
