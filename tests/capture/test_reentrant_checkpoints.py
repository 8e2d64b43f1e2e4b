"""Reentrant activation checkpointing: right both ways, though the graph shows none of the parameters inside it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.capture.reentrant import Forward, around, assert_right, layers, reentrant
from tests.capture.reference import draw, sum_of_squares, wired
from tests.capture.test_checkpoints import BLOCKS

# torch's own: the inner one of two checkpoints is first called without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
@pytest.mark.parametrize("kind", BLOCKS)
def test_checkpointed_blocks_are_right_both_ways(kind: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = reentrant(lambda h: BLOCKS[kind](self, h), hidden)
        return self.last(hidden)

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model, x = wired(forward, **layers(norm=nn.LayerNorm(4), attention=attention)), draw(3, 5, 4)
    assert_right(model, lambda: sum_of_squares(model(x)))


def side_by_side(self: nn.Module, x: Tensor) -> Tensor:
    hidden = self.first(x)
    return self.last(reentrant(self.a, hidden) * reentrant(self.b, hidden))


def one_in_another(self: nn.Module, x: Tensor, outer: bool = True, inner: bool = True) -> Tensor:
    def block(hidden: Tensor) -> Tensor:
        within = checkpoint(lambda h: torch.tanh(self.a(h)), self.b(hidden), use_reentrant=inner)
        return within + self.b(within)

    return self.last(checkpoint(block, self.first(x), use_reentrant=outer))


def three_deep(self: nn.Module, x: Tensor) -> Tensor:
    within = lambda h: reentrant(lambda g: self.b(torch.tanh(self.a(g))), self.b(h))  # noqa: E731
    return self.last(reentrant(lambda h: reentrant(within, h) + h, self.first(x)))


def from_the_input(self: nn.Module, x: Tensor) -> Tensor:
    return self.last(reentrant(lambda h: torch.tanh(self.a(h)), x.detach().requires_grad_()))


def from_the_input_in_turn(self: nn.Module, x: Tensor) -> Tensor:
    hidden = reentrant(lambda h: torch.tanh(reentrant(self.a, h)), x.detach().requires_grad_())
    return reentrant(self.b, hidden)


def all_of_it(self: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential(
        [self.first, nn.Tanh(), self.a, nn.Tanh(), self.last], 2, x, use_reentrant=True
    )


def parameters_as_arguments(self: nn.Module, x: Tensor) -> Tensor:
    hidden = reentrant(lambda h, w, b: F.linear(h, w.T, b), self.first(x), self.a.weight, self.b.bias)
    return self.last(hidden) @ self.a.weight


def only_parameters_as_arguments(self: nn.Module, x: Tensor) -> Tensor:
    return reentrant(lambda h, w: torch.tanh(self.b(h @ w)), x, self.a.weight)


def only_parameters(self: nn.Module, x: Tensor) -> Tensor:
    weight = reentrant(lambda w: w * self.b.bias, self.a.weight)
    return F.linear(self.first(x), weight)


def computed_weights(self: nn.Module, x: Tensor) -> Tensor:
    weight = self.a.weight * 2
    return self.last(reentrant(lambda h, w: F.linear(h, w * 3) + self.b(h), self.first(x), weight)) @ weight


def tied(self: nn.Module, x: Tensor) -> Tensor:
    return self.a(reentrant(lambda h: torch.tanh(self.a(h)) * self.b.bias, self.a(x)) * self.b.bias)


def several_outputs(self: nn.Module, x: Tensor) -> Tensor:
    def block(hidden: Tensor) -> tuple[Tensor | None, ...]:
        return self.a(hidden), None, hidden.argmax(-1), self.b(hidden), torch.tanh(hidden)

    hidden, _, places, other, _ = reentrant(block, self.first(x))
    return self.last(hidden * other) * places.unsqueeze(-1)


def a_shared_value_too(self: nn.Module, x: Tensor) -> Tensor:
    """As the first layer of T5 hands its table of positions on to the others."""
    hidden, table = reentrant(lambda h: (self.a(h), torch.tanh(self.b.weight[:, 0])), self.first(x))
    hidden, table = reentrant(lambda h, t: (torch.tanh(self.b(h)) * t, t), hidden, table)
    return self.last(hidden) + table


def at_the_end(self: nn.Module, x: Tensor) -> Tensor:
    return reentrant(lambda h: reentrant(lambda g: torch.tanh(self.a(g)), self.b(h)), self.first(x))


def cut_off(self: nn.Module, x: Tensor) -> Tensor:
    hidden = reentrant(self.a, self.first(x))
    return self.last(reentrant(lambda h: self.b(h.detach()), hidden))


def its_input_too(self: nn.Module, x: Tensor) -> Tensor:
    hidden, same = reentrant(lambda h: (self.a(h), h), self.first(x))
    return self.last(hidden * same)


def several_inputs(self: nn.Module, x: Tensor) -> Tensor:
    block = lambda h, factor, x, nothing, other, _: self.a(h) * factor * x + self.b(other)  # noqa: E731
    hidden = self.first(x)
    return self.last(reentrant(block, hidden, 2.0, x, None, torch.tanh(hidden), "words"))


def behind_a_closure(self: nn.Module, x: Tensor) -> Tensor:
    hidden, other = self.first(x), self.b(x)
    return self.last(reentrant(lambda h: self.a(h) * other, hidden))


def normalised_weights(self: nn.Module, x: Tensor) -> Tensor:
    return self.last(reentrant(lambda h: self.normed(torch.tanh(h)), self.first(x)))


FORWARDS: dict[str, Forward] = {
    function.__name__: function
    for function in (
        around,
        side_by_side,
        one_in_another,
        three_deep,
        from_the_input,
        from_the_input_in_turn,
        all_of_it,
        parameters_as_arguments,
        only_parameters_as_arguments,
        only_parameters,
        computed_weights,
        tied,
        several_outputs,
        a_shared_value_too,
        at_the_end,
        cut_off,
        its_input_too,
        several_inputs,
        behind_a_closure,
        normalised_weights,
    )
} | {
    "inside_the_other_kind": partial(one_in_another, outer=False),
    "the_other_kind_inside": partial(one_in_another, inner=False),
}


@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_every_arrangement_is_right_both_ways(kind: str, samples: int) -> None:
    normed = parametrizations.weight_norm(nn.Linear(4, 4))
    model, x = wired(FORWARDS[kind], **layers(normed=normed)), draw(samples, 4)
    assert_right(model, lambda: sum_of_squares(model(x)))
