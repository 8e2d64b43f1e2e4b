"""Activation checkpointing: right, and what is recomputed is not kept by gradbatch either."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradbatch
from gradbatch.capture import checkpoints, graph
from tests.capture.reference import (
    WAYS,
    assert_results,
    assert_right_both_ways,
    draw,
    expected,
    sum_of_squares,
    wired,
)

Block = Callable[[nn.Module, Tensor], Tensor]


def mixed(self: nn.Module, x: Tensor) -> Tensor:
    """Layers with a rule, raw parameters, functional calls and attention."""
    hidden = self.norm(torch.tanh(self.a(x)) * self.b.bias)
    hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
    return F.linear(hidden, self.b.weight, self.a.bias)


BLOCKS: dict[str, Block] = {
    "layers": lambda self, x: self.b(torch.tanh(self.a(x))),
    "raw parameters": lambda self, x: torch.tanh(x @ self.a.weight) * self.b.bias + self.a.bias,
    "a mixture": mixed,
    "a node without a rule": lambda self, x: torch.cdist(self.b(x), self.a.weight),
    "a layer twice": lambda self, x: self.a(torch.tanh(self.a(x))),
    "checkpoints inside": lambda self, x: checkpoint(
        lambda h: self.b(torch.tanh(h)) * self.a.bias, self.a(x), use_reentrant=False
    ),
}


def model_of(block: Block, checkpointed: bool = True) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = (
                checkpoint(lambda h: block(self, h), hidden, use_reentrant=False)
                if checkpointed
                else block(self, hidden)
            )
        return self.last(hidden)

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    layers = {"first": nn.Linear(3, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    return wired(forward, **layers, norm=nn.LayerNorm(4), attention=attention)


@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
@pytest.mark.parametrize("kind", BLOCKS)
def test_checkpointed_blocks_are_right_both_ways(kind: str) -> None:
    model, x = model_of(BLOCKS[kind]), draw(3, 5, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("way", WAYS)
def test_several_steps_are_right(way: str) -> None:
    model = model_of(mixed)
    for _ in range(4):
        x = draw(3, 5, 3)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        assert_results(WAYS[way](model, losses), expected(model, losses))


def test_weights_computed_inside_are_right_and_hooks_on_parameters_stay() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    block = lambda self, h: self.layer(torch.tanh(h)) @ (self.last.weight * self.last.bias)  # noqa: E731
    model = wired(
        lambda self, x: checkpoint(lambda h: block(self, h), self.first(x), use_reentrant=False),
        first=nn.Linear(3, 4),
        layer=layer,
        last=nn.Linear(4, 4),
    )
    x, called = draw(3, 3), []
    for parameter in model.parameters():
        parameter.register_hook(lambda _, parameter=parameter: called.append(id(parameter)))
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    called.clear()
    sum_of_squares(model(x)).sum().backward()
    assert set(called) == set(map(id, model.parameters()))


@pytest.mark.parametrize("saved", ["recomputed", "on the CPU"])
def test_no_input_of_a_layer_is_kept_until_the_backward(saved: str) -> None:
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        pytest.skip("this torch does not tell that saved tensors are packed away; inputs are kept then")
    seen: list[weakref.ref[Tensor]] = []

    def block(self: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        seen.append(weakref.ref(hidden))
        return self.a(hidden)

    if saved == "recomputed":
        model = model_of(block)
        losses = sum_of_squares(model(draw(3, 5, 3)))
    else:
        model = model_of(block, checkpointed=False)
        with torch.autograd.graph.save_on_cpu():
            losses = sum_of_squares(model(draw(3, 5, 3)))
    records = [r for notes in checkpoints.walk([graph.node_of(losses)], []).notes.values() for r, _ in notes]
    inner = [record for record in records if record.module is model.a]
    assert all(not record.args for record in inner)
    if saved == "recomputed":
        assert all(reference() is None for reference in seen)
    right = expected(model, lambda: losses)
    assert_results(gradbatch.backward(model, losses, gradbatch.BatchGrad()), right)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["layers", "a layer twice"])
def test_a_region_is_run_once_for_the_pass_and_all_that_is_read_in_it(way: str, kind: str) -> None:
    if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        pytest.skip("this torch does not show what it keeps in place of a saved tensor")
    runs = 0

    def block(self: nn.Module, hidden: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return BLOCKS[kind](self, hidden)

    model, counts = model_of(block), []
    for _ in range(4):
        x = draw(3, 5, 3)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        right, before = expected(model, losses), runs
        assert_results(WAYS[way](model, losses), right)
        counts.append(runs - before)
    # Of two blocks each, the forward and the pass.
    assert counts[2:] == [4, 4]


def test_a_parameter_whose_value_is_overwritten_in_a_checkpoint_has_no_gradient() -> None:
    def block(self: nn.Module, hidden: Tensor) -> Tensor:
        rows = self.a.bias[torch.tensor([0])].repeat(3, 4).clone()
        rows[:, :] = torch.tanh(hidden)
        return self.b(rows)

    model, x = model_of(block), draw(3, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
