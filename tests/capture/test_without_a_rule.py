"""Layers and parameters that nobody taught a rule: their calls are read off the autograd graph, and are right."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradbatch
from gradbatch import CoupledSamples
from tests.capture.reference import (
    WAYS,
    assert_refused,
    assert_results,
    assert_right_both_ways,
    draw,
    driven,
    expected,
    perceptron,
    sum_of_squares,
    wired,
)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def test_a_layer_without_a_rule_is_right_left_out_and_frozen() -> None:
    model, x = gradbatch.extend(nn.Sequential(nn.Linear(3, 3), nn.Sequential(Scale()))).double(), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    right = expected(model, lambda: sum_of_squares(model(x)))
    for patterns in ("0.*", "1.0.gain"):
        found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)), parameters=patterns)
        assert found and all(name in right for name in found)
        torch.testing.assert_close(dict(found), {name: right[name] for name in found})
    model[1].requires_grad_(False)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LSTM(3, 2, batch_first=True), (4, 5, 3)),
        (nn.MultiheadAttention(3, 1, batch_first=True), (4, 5, 3)),
        (nn.GRUCell(3, 2), (4, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_of_many_operations_are_right(layer: nn.Module, shape: tuple[int, ...]) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        output = self.own(x, x, x) if isinstance(layer, nn.MultiheadAttention) else self.own(x)
        return output[0] if isinstance(output, tuple) else output

    model, x = wired(forward, own=layer), draw(*shape)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


USES = {
    "product of itself": lambda self, x: x @ (self.layer.weight.T @ self.layer.weight),
    "einsum": lambda self, x: torch.einsum("nti,oi->nto", x, self.layer.weight),
    "normalised": lambda self, x: F.linear(
        x, self.layer.weight / self.layer.weight.norm(dim=1, keepdim=True)
    ),
    "softmax": lambda self, x: torch.einsum("nti,oi->no", x, self.layer.weight.softmax(0)),
    "cumulated": lambda self, x: F.linear(x, self.layer.weight.cumsum(0)),
    "joined": lambda self, x: F.linear(x, torch.cat([self.layer.weight, 2 * self.layer.weight]).tanh()),
    "taken apart": lambda self, x: torch.stack([b * x.sum(-1) for b in self.layer.bias.unbind()], 1),
    "a token in front": lambda self, x: torch.cat([self.layer.weight[:1].expand(len(x), 1, 4), x], 1).tanh(),
    "a table": lambda self, x: (x[:, :3] + self.layer.weight).tanh(),
    "one row a sample": lambda self, x: torch.stack([self.layer.weight[n % 3] * x[n] for n in range(len(x))]),
    "keys and values": lambda self, x: F.scaled_dot_product_attention(
        x, *[self.layer.weight.expand(len(x), 3, 4)] * 2
    ),
    "convolution": lambda self, x: F.conv1d(x.mT, self.layer.weight.unsqueeze(-1), self.layer.bias),
    "distances": lambda self, x: torch.cdist(x, self.layer.weight),
    "in place": lambda self, x: x.clone().mul_(self.layer.weight[0]).add_(1.0),
    "where": lambda self, x: torch.where(x > 0, x, self.layer.weight[0]),
    "largest": lambda self, x: x * self.layer.weight.max(0).values,
    "spectrum": lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.layer.weight[0])),
    "checkpointed": lambda self, x: checkpoint(
        lambda h: F.linear(h, 2 * self.layer.weight), x, use_reentrant=False
    ),
}


@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_any_use_of_a_parameter_is_right_whatever_sizes_collide(samples: int, use: str) -> None:
    model, x = wired(USES[use], layer=nn.Linear(4, 3)), draw(samples, 5, 4)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_constant_that_could_be_the_samples_data_is_refused_unless_it_is_a_buffer() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return (x + self.layer.bias[self.order if hasattr(self, "order") else order]).tanh()

    order = torch.tensor([0, 1, 2, 0])
    model, x = wired(forward, layer=nn.Linear(4, 3)), draw(4, 4)
    assert_refused(model, lambda: sum_of_squares(model(x)), CoupledSamples, r"shape \(4,\).*make it a buffer")
    model.register_buffer("order", order)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_layer_added_after_extend_is_right_before_and_after_extending_again() -> None:
    model, x = perceptron(), draw(4, 3)
    model.append(nn.Linear(2, 2).double())
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    gradbatch.extend(model)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_forward_from_before_extend_is_right() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    losses = sum_of_squares(model(draw(4, 3)))
    gradbatch.extend(model)
    assert_results(driven(model, lambda: losses), expected(model, lambda: losses))


def test_a_value_of_the_region_that_is_not_sent_on_is_an_error_and_no_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing may get lost on the way, whatever goes wrong there."""
    model, x = wired(lambda self, x: x @ torch.tanh(self.a.weight), a=nn.Linear(3, 3)), draw(4, 3)
    monkeypatch.setattr("gradbatch.capture.evaluate.Totals.pull_back", lambda self, node: None)
    for way in WAYS:
        with pytest.raises(gradbatch.UnsupportedLayer, match="TanhBackward"):
            WAYS[way](model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_operation_is_warned_of_where_the_user_called_us(way: str) -> None:
    model, x = wired(USES["distances"], layer=nn.Linear(4, 3)), draw(3, 5, 4)
    losses = sum_of_squares(model(x))
    with pytest.warns(gradbatch.SlowPathWarning, match="CdistBackward") as warned:
        WAYS[way](model, lambda: losses if way == "backward" else sum_of_squares(model(x)))
    assert [warning.filename for warning in warned] == [WAYS[way].__code__.co_filename]


def test_what_is_computed_behind_the_model_is_said_to_be_there() -> None:
    model, x = perceptron(), draw(4, 3)
    losses = torch.cdist(model(x)[:, None], model[2].weight[:, :2]).sum((1, 2))
    where = "the computation between the model's outputs and the losses"
    with pytest.warns(gradbatch.SlowPathWarning, match=f"^{where}: CdistBackward has no rule"):
        gradbatch.per_sample_grads(model, losses)


def _reversed_and_doubled(ctx, x: Tensor) -> Tensor:
    return 2 * x.flip(-1)


def _scaled(ctx, x: Tensor, scale: Tensor) -> Tensor:
    ctx.save_for_backward(x, scale)
    return x * scale


def _scaled_back(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    return gradient * scale, (gradient * x).sum(0)


def _product_back(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight, gradient.T @ x


def _product(ctx, x: Tensor, weight: Tensor) -> Tensor:
    ctx.save_for_backward(x, weight)
    return x @ weight.T


FUNCTIONS = {
    "of a weight": (
        _reversed_and_doubled,
        _reversed_and_doubled,
        lambda f, self, x: F.linear(x, f(self.weight)),
    ),
    "elementwise": (_scaled, _scaled_back, lambda f, self, x: f(self.layer(x), self.weight[0])),
    "product": (_product, _product_back, lambda f, self, x: f(x, self.weight)),
}


@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
@pytest.mark.parametrize("name", ["Squeeze", "Clone", "T", "Mul", "Add", "Mm", "Embedding", "Relu", "Sum"])
@pytest.mark.parametrize("use", FUNCTIONS)
def test_a_function_of_somebodys_is_not_the_operation_it_is_called_after(use: str, name: str) -> None:
    forward, backward, call = FUNCTIONS[use]
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), methods)
    model = wired(lambda self, x: call(function.apply, self, x), layer=nn.Linear(4, 4))
    model.weight = nn.Parameter(draw(4, 4))  # as many rows as samples
    model, x = model.double(), draw(4, 4)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no kernel does a whole LSTM here")
def test_a_slow_layer_is_named_whichever_of_its_outputs_is_used() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.slow(x)[1][0][-1])

    slow = nn.LSTM(3, 2, num_layers=2, dropout=0.1)
    model = wired(forward, slow=slow, head=nn.Linear(2, 2)).float()  # in float64, no kernel does all of it
    with pytest.warns(gradbatch.SlowPathWarning, match=r"slow \(LSTM\)"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(draw(4, 3, 3, dtype=torch.float32))))
