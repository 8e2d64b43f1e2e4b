"""Weights that several calls share, outputs that nobody reads, and everything in between."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, BatchL2Grad
from tests.capture.reference import (
    assert_right_both_ways,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    wired,
)


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_layer_called_several_times_adds_its_calls_with_their_cross_terms(times: int) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.tanh(self.layer(x))
        return x

    model, x = wired(forward, layer=nn.Linear(3, 3)), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_layer_called_on_different_numbers_of_positions_adds_them() -> None:
    model = wired(lambda self, x: self.layer(x).sum(1) + self.layer(x[:, 0]), layer=nn.Linear(3, 3))
    x = draw(4, 5, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_residuals_are_right() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(torch.relu(x)) * x

    model, x = wired(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 3)), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_modules_that_share_a_weight_add_and_either_name_finds_it() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = wired(lambda self, x: self.second(torch.tanh(self.first(x))), first=first, second=second)
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    grads = gradbatch.backward(model, sum_of_squares(model(x)), BatchGrad())[BatchGrad]
    assert grads["second.weight"] is grads["first.weight"] is grads[model.second.weight]
    assert list(grads) == ["first.weight", "first.bias", "second.bias"]


def test_one_parameter_in_two_roles_adds_up() -> None:
    first, second = nn.LayerNorm(3), nn.LayerNorm(3)
    second.weight = first.bias
    nn.init.normal_(first.bias)
    model = wired(lambda self, x: self.second(torch.tanh(self.first(x))), first=first, second=second)
    x = draw(4, 5, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_one_parameter_in_two_roles_of_one_layer_adds_up() -> None:
    norm = nn.LayerNorm(3)
    norm.bias = norm.weight
    model, x = gradbatch.extend(nn.Sequential(norm, nn.Tanh()).double()), draw(4, 5, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_an_embedding_tied_with_the_head_has_cross_terms() -> None:
    embedding, head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
    head.weight = embedding.weight
    model = wired(
        lambda self, ids: self.head(torch.tanh(self.embedding(ids))), embedding=embedding, head=head
    )
    ids = torch.randint(0, 6, (4, 5))
    assert_right_both_ways(model, lambda: sum_of_squares(model(ids)))
    assert list(expected(model, lambda: sum_of_squares(model(ids)))) == ["embedding.weight"]


def test_a_functional_head_on_the_embedding_weight_is_right_with_cross_terms() -> None:
    model = wired(
        lambda self, ids: F.linear(self.embedding(ids), self.embedding.weight), embedding=nn.Embedding(6, 3)
    )
    ids = torch.randint(0, 6, (4, 5))
    assert_right_both_ways(model, lambda: sum_of_squares(model(ids)))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.layer(x) * self.layer.weight.sum(),
        lambda self, x: self.layer(x) + self.layer.bias,
        lambda self, x: x @ self.layer.weight.T,
        lambda self, x: F.linear(x, self.layer.weight, self.layer.bias),
        lambda self, x: self.layer(x) @ self.layer(self.layer.weight),
        lambda self, x: self.layer(x) @ self.layer(self.layer.weight * 2),
        lambda self, x: self.layer(x) + 1e-12 * self.layer.weight.square().sum(),
        lambda self, x: self.layer(x, ) + self.layer.forward(x),
    ],
    ids=["scale", "bias", "matmul", "functional", "of_itself", "of_its_double", "decay", "forward_called"],
)  # fmt: skip
def test_a_use_of_a_weight_outside_of_its_layer_is_right(forward) -> None:
    model, x = wired(forward, layer=nn.Linear(3, 3)), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_an_unused_branch_has_zero_gradients_also_after_it_was_used() -> None:
    model = wired(
        lambda self, x, wide: self.second(self.first(x)) if wide else self.first(x),
        first=nn.Linear(3, 3),
        second=nn.Linear(3, 3),
    )
    x = draw(4, 3)
    for wide in (True, False, True, False):
        assert_right_both_ways(model, lambda wide=wide: sum_of_squares(model(x, wide)))


def test_a_layer_whose_output_is_dropped_has_zero_gradients() -> None:
    model = wired(
        lambda self, x: (self.dropped(x), self.layer(x))[1], dropped=nn.Linear(3, 3), layer=nn.Linear(3, 3)
    )
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs_unused_is_right(used: int) -> None:
    model = wired(
        lambda self, x: (self.a(x), self.b(torch.tanh(self.a(x)))), a=nn.Linear(3, 3), b=nn.Linear(3, 2)
    )
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)[used]))


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_chunks_of_a_layer_unused_is_right(used: int) -> None:
    model = wired(lambda self, x: torch.tanh(self.a(x)).chunk(2, -1)[used], a=nn.Linear(3, 6))
    x = draw(4, 5, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_frozen_parameters_have_no_results_and_the_others_are_right() -> None:
    model, x = perceptron(), draw(5, 3)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_layer_used_in_two_models_counts_the_calls_of_the_graph_at_hand() -> None:
    shared = nn.Linear(3, 3)
    one = wired(lambda self, x: self.layer(x).tanh(), layer=shared)
    two = wired(lambda self, x: self.layer(x).sigmoid(), layer=shared)
    x = draw(4, 3)
    assert_right_both_ways(one, lambda: sum_of_squares(one(x)))
    assert_right_both_ways(two, lambda: sum_of_squares(two(x)))
    joint = lambda: sum_of_squares(one(x)) + sum_of_squares(two(x))  # noqa: E731
    gradients = expected(one, joint)
    found = gradbatch.backward(one, joint(), BatchL2Grad())[BatchL2Grad]
    torch.testing.assert_close(found["layer.weight"], gradients["layer.weight"].flatten(1).square().sum(1))


def test_gradients_of_a_model_behind_another_one_are_right() -> None:
    front = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    model, x = perceptron(), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(front(x))))
