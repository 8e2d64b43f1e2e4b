"""A parameter that is used in parts: slices of a fused projection, one expert of a stack of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.factors import Blocks, Dense, OuterProduct, PerSampleGrad
from tests.capture.by_nodes import assert_captured, assert_same, read, watch
from tests.capture.reading_examples import Example
from tests.capture.reference import (
    assert_right_both_ways,
    draw,
    expected,
    sum_of_squares,
    wired,
)


def captured_and_right(
    function: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...] = (6, 3)
) -> PerSampleGrad:
    """The gradients of the only parameter, after they were compared with one backward pass a sample."""
    example = Example(function, (2, 3), {"w": shape})
    model, x = example.model(), example.batch()
    losses = lambda: sum_of_squares(torch.sin(model(x)))  # noqa: E731
    right = expected(model, losses)
    captured = read(model, losses())
    assert_captured(model, captured, right)
    assert_same(watch(model, losses), right)
    (grad,) = captured.grads.values()
    return grad


def attended(x: Tensor, *parts: Tensor) -> Tensor:
    """A product of what each part projects, so that none is without influence on the others' gradients."""
    return torch.stack([F.linear(x, part).sum(2) + n for n, part in enumerate(parts)]).prod(0)


# What is done with a weight of 6 rows, and which elements each part begins with.
PARTS: dict[str, tuple[Callable[[Tensor], Any], list[int]]] = {
    "chunk": (lambda w: w.chunk(3), [0, 6, 12]),
    "split": (lambda w: w.split(4), [0, 12]),
    "split with sizes": (lambda w: w.split([1, 0, 3, 2]), [0, 3, 12]),
    "the last of a split": (lambda w: w.split([1, 3, 2])[2:], [12]),
    "slices": (lambda w: (w[:2], w[2:]), [0, 6]),
    "slices from the end": (lambda w: (w[-6:-4], w[-1:100]), [0, 15]),
    "slices from before the beginning": (lambda w: (w[-9:2], w[3:-2]), [0, 9]),
    "slices with a gap": (lambda w: (w[4:5], w[1:2]), [3, 12]),
    "slices of slices": (lambda w: (w[1:5][1:3], w[4:]), [6, 12]),
    "the same slice twice": (lambda w: (w[1:4], w[1:4].tanh()), [3]),
    "rows": (lambda w: (w[1][None], w[-1][None]), [3, 15]),
    "rows, unbound": (lambda w: [row[None] for row in w.unbind()[::2]], [0, 6, 12]),
    "experts": (lambda w: w.view(3, 2, 3).unbind(), [0, 6, 12]),
    "an expert by number": (lambda w: (w.view(3, 2, 3)[2], w.view(3, 2, 3)[0]), [0, 12]),
    "behind an axis of length one": (lambda w: w[None].split(2, 1)[0], [0]),
    "after a split": (lambda w: (w.split(4)[0][1:3],), [3]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_keep_the_structure_of_their_gradients(name: str) -> None:
    part, beginnings = PARTS[name]
    grad = captured_and_right(lambda m, x: attended(x, *(p for p in part(m.w) if len(p))))
    assert isinstance(grad, Blocks) and list(grad.blocks) == beginnings
    tanh = name == "the same slice twice"
    assert all(isinstance(block, OuterProduct) or tanh for block in grad.blocks.values())


@pytest.mark.parametrize("part", [lambda w: w[:], lambda w: w.chunk(1)[0], lambda w: w[None][0]])
def test_a_part_that_is_the_whole_is_no_part(part: Callable[[Tensor], Tensor]) -> None:
    grad = captured_and_right(lambda m, x: attended(x, part(m.w), m.w))
    assert isinstance(grad, OuterProduct)


DENSE: dict[str, Callable[[Tensor], Any]] = {
    "every other row": lambda w: (w[::2], w[1::2]),
    "columns": lambda w: [F.pad(part, (0, 3 - part.shape[1])) for part in w.split(2, 1)],
    "a column": lambda w: (w[:, 1].view(2, 3),),
    "columns, unbound": lambda w: [column.view(2, 3) for column in w.unbind(1)],
}


@pytest.mark.parametrize("name", DENSE)
def test_parts_that_are_not_in_one_piece_are_right(name: str) -> None:
    assert isinstance(captured_and_right(lambda m, x: attended(x, *DENSE[name](m.w))), Dense)


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: attended(x, w[:4], w[2:]),
        lambda w, x: attended(x, w[:2], w),
        lambda w, x: attended(x, w, *w.chunk(3)) + (w[1] * x).sum(2),
        lambda w, x: attended(x, w[1:3], w.tanh()[1:3]),
    ],
    ids=["overlapping", "and the whole", "and one row", "of something computed"],
)
def test_parts_and_other_uses_of_a_weight_have_their_cross_terms(
    use: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model, x = wired(lambda self, x: use(self.layer.weight, x), layer=nn.Linear(3, 6)), draw(4, 2, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_queries_keys_and_values_of_an_attention_are_three_outer_products() -> None:
    def crossed(self: nn.Module, x: Tensor) -> Tensor:
        memory = x.cos()[:, :3]
        return self.own(x, memory, memory, need_weights=False)[0]

    model, x = wired(crossed, own=nn.MultiheadAttention(4, 2, batch_first=True)), draw(4, 5, 4)
    losses = lambda: sum_of_squares(model(x))  # noqa: E731
    assert_right_both_ways(model, losses)
    grad = read(model, losses()).grads[model.own.in_proj_weight]
    assert isinstance(grad, Blocks) and list(grad.blocks) == [0, 16]
    assert all(isinstance(block, OuterProduct) for block in grad.blocks.values())


def test_experts_of_a_stack_are_read_by_the_rows_that_are_sent_to_them() -> None:
    def routed(m: Any, x: Tensor) -> Tensor:
        rows, out = x.flatten(0, 1), torch.zeros(len(x) * 2, 3, dtype=x.dtype)
        for expert, weight in enumerate(m.w):
            chosen = (rows.argmax(1) == expert).nonzero()[:, 0]
            out = out.index_add(0, chosen, F.linear(rows[chosen], weight))
        return out.view(x.shape)

    grad = captured_and_right(routed, (3, 3, 3))
    assert isinstance(grad, Blocks) and set(grad.blocks) <= {0, 9, 18}
    assert all(isinstance(block, OuterProduct) for block in grad.blocks.values())


@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_this_torch_does_not_show_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(node: Node, name: str) -> Any:
        raise AttributeError(name)

    monkeypatch.setattr(graph, "saved", hidden)
    monkeypatch.setattr(graph, "saved_names", lambda node: [])
    part, _ = PARTS[name]
    grad = captured_and_right(lambda m, x: attended(x, *(p for p in part(m.w) if len(p))))
    assert not isinstance(grad, Blocks)
