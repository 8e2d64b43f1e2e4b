"""What a contestant is, and whether two of them agree."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.cases import Batch
from benchmarks.quantities import Answer

Step = Callable[[], Answer]


class Refused(Exception):
    """A contestant does not take this model, in its own words."""


class Contestant(ABC):
    """One way to a quantity.

    Attributes:
        name: in tables and on the command line.
        offers: the quantities that the package computes by itself.
        derives: it hands out per-sample gradients, from which everything else follows by a line of torch.
        warm_up: steps until it is as fast as it will be.
    """

    name: ClassVar[str]
    offers: ClassVar[frozenset[str]]
    derives: ClassVar[bool] = False
    warm_up: ClassVar[int] = 1

    @abstractmethod
    def prepare(self, model: nn.Module, batch: Batch, quantity: str) -> Step:
        """One step of a training loop: forward, backward, quantity, and nothing of the step before.

        Args:
            model: its own copy, which it may change.
            batch: what the step runs on.
            quantity: one that it offers or derives.

        Raises:
            Refused: the package says no; a step may say so too, with this or any other exception.
        """


def per_sample_attribute(model: nn.Module, attribute: str, prefix: str = "") -> dict[str, Tensor]:
    """What a package has set on every parameter, taken off it.

    Args:
        model: whose parameters.
        attribute: its name.
        prefix: that a wrapper put before the parameters' names.

    Raises:
        Refused: there are parameters without it.
    """
    found = {
        name.removeprefix(prefix): parameter.__dict__.pop(attribute, None)
        for name, parameter in model.named_parameters()
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise Refused(f"nothing for {len(missing)} of {len(found)} parameters, such as {missing[0]}")
    return found


def disagreement(answer: Answer, reference: Answer) -> float:
    """The largest relative error over parameters, by Frobenius norm.

    A gradient that is zero but for rounding (an attention's key bias) is measured against the largest one.
    """
    if answer.keys() != reference.keys():
        return float("inf")
    sizes = {name: float(torch.linalg.vector_norm(values)) for name, values in reference.items()}
    floor = 1e-3 * max(sizes.values())
    errors = []
    for name, values in reference.items():
        if answer[name].shape != values.shape:
            return float("inf")
        difference = float(torch.linalg.vector_norm(answer[name] - values))
        errors.append(difference / (max(sizes[name], floor) or 1.0))
    return float("nan") if any(e != e for e in errors) else max(errors)
