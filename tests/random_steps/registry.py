"""The steps that random networks are drawn from, told apart by whether they keep the samples apart.

A step is a function from a network and ``[N, T, C]`` to ``[N, T, C']``. It makes its layers with ``network.layer`` and
its parameters with ``network.parameter``, makes all its choices with ``network.draw``, and must run on any number of
samples: what it draws depends neither on the data nor on how many samples there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork

Step = Callable[["RandomNetwork", Tensor], Tensor]

STEPS: dict[str, Step] = {}
COUPLING: dict[str, Step] = {}
# Of the former: those that multiply another sample's numbers by zero, which a sample of NaN does not survive; those
# that make random numbers for the whole batch; and those that let a sample's values through but not their gradients.
LEAKY: set[str] = set()
RANDOM: set[str] = set()
STOPPING: set[str] = set()


def step(function: Step) -> Step:
    """Register a step that keeps the samples apart."""
    STEPS[function.__name__] = function
    return function


def coupling(function: Step) -> Step:
    """Register a step in which samples depend on each other."""
    COUPLING[function.__name__] = function
    return function


def marked(*marks: set[str]) -> Callable[[Step], Step]:
    """Register a step that keeps the samples apart, with a reservation."""

    def register(function: Step) -> Step:
        for mark in marks:
            mark.add(function.__name__)
        return step(function)

    return register
