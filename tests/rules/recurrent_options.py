"""Recurrent layers and cells with their options, and what they are called with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

FEATURES, HIDDEN, STEPS, SEQUENCES = 5, 4, 4, 3


@dataclass(frozen=True)
class Case:
    """A recurrent layer with some options, and what it is called with.

    Args:
        name: for test ids.
        kind: type of the layer.
        options: further arguments of its constructor.
        lengths: of packed sequences; ``None`` for a plain batch.
        initial: whether initial states are given.
        used: numbers of the floating point outputs that have a gradient; ``None`` for all.
    """

    name: str
    kind: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None
    initial: bool = False
    used: tuple[int, ...] | None = None

    def build(self, device: torch.device) -> Any:
        return self.kind(FEATURES, HIDDEN, **self.options).to(device, torch.double)

    def arguments(self, module: Any, sequences: int = SEQUENCES) -> dict[str, Any]:
        like = module.weight_ih if self.is_cell else module.weight_ih_l0
        batch = (sequences,) if self.is_cell else (sequences, STEPS)
        input: Any = like.new_empty(*batch, FEATURES).normal_()
        if self.lengths is not None:
            ordered = list(self.lengths) == sorted(self.lengths, reverse=True)
            input = pack_padded_sequence(input, self.lengths, batch_first=True, enforce_sorted=ordered)
        elif not self.is_cell and not module.batch_first:
            input = input.transpose(0, 1)
        return {"input": input, "hx": self.states(module, like, sequences) if self.initial else None}

    def states(self, module: Any, like: Tensor, sequences: int) -> Any:
        rows = () if self.is_cell else (module.num_layers * (1 + module.bidirectional),)
        hidden = like.new_empty(*rows, sequences, self.options.get("proj_size", 0) or HIDDEN).normal_()
        if self.kind is not nn.LSTM:
            return hidden
        return hidden, like.new_empty(*rows, sequences, HIDDEN).normal_()

    @property
    def is_cell(self) -> bool:
        return issubclass(self.kind, nn.RNNCellBase)


LAYERS, CELLS = (nn.RNN, nn.LSTM, nn.GRU), (nn.RNNCell, nn.GRUCell)
EVERYTHING: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
PACKINGS = {"plain": None, "sorted": (4, 3, 1), "unsorted": (2, 4, 1), "equally long": (4, 4, 4)}


def flavours(kind: type[nn.Module]) -> Iterator[dict[str, Any]]:
    """Options that every packing, and a call with and without initial states, is tried with."""
    yield {}
    yield {"batch_first": True}
    yield EVERYTHING
    if kind is nn.LSTM:
        yield {**EVERYTHING, "proj_size": 3}
    if kind is nn.RNN:
        yield {**EVERYTHING, "nonlinearity": "relu"}


def layer_cases(kind: type[nn.Module]) -> Iterator[Case]:
    for packing, lengths in PACKINGS.items():
        for options in flavours(kind):
            name = ", ".join([kind.__name__, *options, packing])
            yield Case(name, kind, options, lengths)
            yield Case(f"{name}, initial", kind, options, lengths, initial=True)
        for used in ((), (0,), (1,), (2,))[: 4 if kind is nn.LSTM else 3]:
            name = f"{kind.__name__}, {packing}, gradient of {used}"
            yield Case(name, kind, EVERYTHING, lengths, used=used)
    for options in ({"bias": False}, {"bias": False, **EVERYTHING}, {"num_layers": 3}):
        yield Case(", ".join([kind.__name__, *options]), kind, options)


def cell_cases() -> Iterator[Case]:
    for kind in CELLS:
        for options in ({}, {"bias": False}):
            yield Case(", ".join([kind.__name__, *options]), kind, options)
            yield Case(", ".join([kind.__name__, *options, "initial"]), kind, options, initial=True)
    yield Case("RNNCell, relu, initial", nn.RNNCell, {"nonlinearity": "relu"}, initial=True)


CASES = [*(case for kind in LAYERS for case in layer_cases(kind)), *cell_cases()]
# The richest of each kind, for promises that hold whatever the options.
RICHEST = [
    Case(f"{kind.__name__}, {options}, {lengths}", kind, options, lengths, initial=True)
    for kind in (*LAYERS, *CELLS)
    for options in ([{}] if kind in CELLS else list(flavours(kind))[2:])
    for lengths in ([None] if kind in CELLS else [None, (2, 4, 1)])
]
