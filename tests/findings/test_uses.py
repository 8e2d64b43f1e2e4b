"""What goes wrong elsewhere with shared weights, raw parameters and the place of the samples: one test a phrase."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, UsageError
from tests.capture.reference import (
    assert_refused,
    assert_results,
    assert_right_both_ways,
    draw,
    driven,
    expected,
    sum_of_squares,
    wired,
)
from tests.findings.whole_models import assert_model_is_right

IDS = torch.tensor([[0, 1, 1, 5], [2, 2, 2, 2], [0, 3, 5, 4]])


class TestSharing:
    def test_a_module_called_twice_is_right_with_cross_terms(self) -> None:
        twice = lambda self, x: self.layer(torch.tanh(self.layer(x)))  # noqa: E731
        assert_model_is_right(twice, draw(4, 3), layer=nn.Linear(3, 3))
        assert_model_is_right(twice, draw(3, 2, 7, 6), layer=nn.Conv2d(2, 2, 3, groups=2))

    @pytest.mark.parametrize("used", [0, 1])
    def test_one_of_two_outputs_unused_is_right(self, used: int) -> None:
        both = lambda self, x: (self.a(x), self.b(self.a(x)))[used]  # noqa: E731
        assert_model_is_right(both, draw(4, 3), a=nn.Linear(3, 3), b=nn.Linear(3, 2))

    def test_tied_modules_are_right(self) -> None:
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight, other.bias = one.weight, one.bias
        assert_model_is_right(lambda self, x: self.b(torch.tanh(self.a(x))), draw(4, 3), a=one, b=other)

    def test_a_functional_head_on_the_embedding_is_right_with_cross_terms(self) -> None:
        forward = lambda self, ids: F.linear(self.table(ids).mean(1), self.table.weight)  # noqa: E731
        assert_model_is_right(forward, IDS, table=nn.Embedding(6, 3))

    def test_a_head_tied_to_the_embedding_is_right_with_cross_terms(self) -> None:
        table, head = nn.Embedding(6, 3), nn.Linear(3, 6)
        head.weight = table.weight
        forward = lambda self, ids: self.head(torch.tanh(self.table(ids)))  # noqa: E731
        assert_model_is_right(forward, IDS, table=table, head=head)

    def test_two_forwards_then_the_backwards_in_forward_order_are_right(self) -> None:
        model, x, z = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2)), draw(4, 3), draw(2, 3)
        with gradbatch.compute(model, BatchGrad(), loss_reduction="mean") as results:
            first, second = sum_of_squares(model(x)).mean(), sum_of_squares(model(z)).mean()
            first.backward()
            second.backward()
        for name, gradient in results[BatchGrad].items():
            right = [expected(model, lambda v=v: sum_of_squares(model(v)))[name] for v in (x, z)]
            torch.testing.assert_close(gradient, torch.cat(right))

    @pytest.mark.parametrize("positions", [1, 7])
    def test_norms_of_a_weight_used_twice_have_cross_terms(self, positions: int) -> None:
        model = wired(lambda self, x: self.layer(x) - self.layer(x + 1e-3), layer=nn.Linear(3, 2))
        x = draw(4, positions, 3)
        # The two uses nearly cancel, so that norms added without their cross terms would be far too large.
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


class Holder(nn.Module):
    """Some parameters, and nothing else."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(draw(*shape)))


class TestRawParameters:
    def test_a_cls_token_is_right(self) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return self.body(torch.cat([self.own.token.expand(len(x), -1, -1), x], 1))[:, 0]

        assert_model_is_right(forward, draw(4, 5, 3), own=Holder(token=(1, 1, 3)), body=nn.Conv1d(6, 4, 2))

    @pytest.mark.parametrize("samples", [4, 5])
    def test_a_positional_table_is_right(self, samples: int) -> None:
        forward = lambda self, x: self.body(torch.tanh(self.body(x) + self.own.table))  # noqa: E731
        assert_model_is_right(forward, draw(samples, 5, 3), own=Holder(table=(5, 3)), body=nn.Linear(3, 3))

    def test_a_layer_scale_is_right(self) -> None:
        forward = lambda self, x: x + self.own.scale * self.body(x)  # noqa: E731
        assert_model_is_right(forward, draw(4, 5, 3), own=Holder(scale=(3,)), body=nn.Linear(3, 3))

    def test_scores_times_gammas_are_right(self) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            scores = self.q(x).unflatten(-1, (2, 2)).transpose(1, 2)
            return ((scores @ scores.mT) * self.own.gammas).softmax(-1) @ scores

        assert_model_is_right(forward, draw(3, 5, 4), own=Holder(gammas=(2, 1, 1)), q=nn.Linear(4, 4))

    def test_a_parameter_list_is_right(self) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            for weight in self.list:
                x = torch.tanh(x @ weight)
            return x

        model = wired(forward, list=nn.ParameterList(draw(3, 3) for _ in range(3)))
        x = draw(4, 3)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_a_model_made_only_of_parameters_is_right(self) -> None:
        class Only(Holder):
            def forward(self, x: Tensor) -> Tensor:
                return torch.relu(x @ self.first + self.bias) @ self.second

        model = gradbatch.extend(Only(first=(3, 5), bias=(5,), second=(5, 2)))
        x = draw(4, 3)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_expert_weights_indexed_per_token_are_right(self) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            gates = self.router(x)
            chosen = gates.argmax(-1)
            outputs = torch.einsum("nti,ntio->nto", x, self.own.experts[chosen])
            return outputs * gates.softmax(-1).gather(-1, chosen.unsqueeze(-1))

        assert_model_is_right(forward, draw(4, 5, 3), own=Holder(experts=(3, 3, 2)), router=nn.Linear(3, 3))

    def test_experts_that_take_their_own_tokens_are_right(self) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            chosen, output = self.router(rows).argmax(-1), torch.zeros_like(rows)
            for number, expert in enumerate((self.one, self.other)):
                mine = (chosen == number).nonzero().squeeze(1)
                output = output.index_add(0, mine, expert(rows[mine]))
            return output.view_as(x)

        experts = {name: nn.Linear(3, 3) for name in ("one", "other")}
        router = nn.Linear(3, 2).requires_grad_(False)
        assert_model_is_right(forward, draw(4, 5, 3), **experts, router=router)


class TestSampleAxis:
    @pytest.mark.parametrize("samples", [5, 4])
    def test_a_table_of_positions_looked_up_by_a_range_is_right(self, samples: int) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return self.body(torch.tanh(self.body(x) + self.table(torch.arange(x.shape[1]))))

        assert_model_is_right(forward, draw(samples, 5, 3), body=nn.Linear(3, 3), table=nn.Embedding(7, 3))

    @pytest.mark.parametrize("samples", [5, 4])
    def test_position_ids_of_one_row_added_to_all_samples_are_right(self, samples: int) -> None:
        def forward(self: nn.Module, ids: Tensor) -> Tensor:
            positions = torch.arange(ids.shape[1]).unsqueeze(0)
            return self.head(torch.tanh(self.words(ids) + self.table(positions)))

        ids = torch.randint(6, (samples, 5))
        layers = {"words": nn.Embedding(6, 3), "table": nn.Embedding(5, 3), "head": nn.Linear(3, 2)}
        assert_model_is_right(forward, ids, **layers)

    def test_positions_flattened_into_rows_before_a_linear_layer_are_right(self) -> None:
        forward = lambda self, x: self.body(x.reshape(-1, 3)).view(len(x), -1)  # noqa: E731
        assert_model_is_right(forward, draw(4, 5, 3), body=nn.Linear(3, 2))

    @pytest.mark.parametrize("samples", [5, 4])
    def test_time_major_inner_layers_are_right(self, samples: int) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x.transpose(0, 1)))).transpose(0, 1)

        assert_model_is_right(forward, draw(samples, 5, 3), body=nn.Linear(3, 3), head=nn.Linear(3, 2))

    def test_two_inputs_that_go_through_a_siamese_network_together_are_right(self) -> None:
        def forward(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            left, right = self.body(torch.cat([x, y])).chunk(2)
            return left - right

        assert_model_is_right(forward, draw(4, 3), draw(4, 3), body=nn.Linear(3, 2))

    def test_nodes_of_graphs_as_rows_are_right(self) -> None:
        sizes = torch.tensor([2, 4, 1])
        graph_of = torch.arange(3).repeat_interleave(sizes)
        adjacency = (graph_of == graph_of.unsqueeze(1)).double()

        def forward(self: nn.Module, nodes: Tensor, sizes: Tensor) -> Tensor:
            nodes = torch.tanh(adjacency @ self.first(nodes))
            pooled = nodes.new_zeros(len(sizes), 3).index_add(0, graph_of, nodes)
            return self.head(pooled)

        assert_model_is_right(forward, draw(7, 3), sizes, first=nn.Linear(3, 3), head=nn.Linear(3, 2))

    def test_nodes_as_rows_without_their_number_of_samples_are_refused_with_the_ways_out(self) -> None:
        pool: Any = lambda self, x: self.body(x).unflatten(0, (3, 2)).sum(1)  # noqa: E731
        model, x = wired(pool, body=nn.Linear(3, 2)), draw(6, 3)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731
        assert_results(driven(model, losses), expected(model, losses))
        assert_refused(model, losses, UsageError, "what is a sample", ways=("compute",))
