"""Operations in place behind, before and around a layer: right, or noticed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import StaleCapture
from tests.capture.reference import (
    WAYS,
    assert_refused,
    assert_right_both_ways,
    draw,
    expected,
    refusal_of,
    sum_of_squares,
    wired,
)


def relu_(h: Tensor, x: Tensor) -> Tensor:
    return h.relu_()


def add_input(h: Tensor, x: Tensor) -> Tensor:
    h += x
    return h


def multiply_and_add(h: Tensor, x: Tensor) -> Tensor:
    return h.mul_(2.0).add_(x).sigmoid_()


def assign_features(h: Tensor, x: Tensor) -> Tensor:
    h[..., 1:] = 0.5
    return h


def assign_values(h: Tensor, x: Tensor) -> Tensor:
    h[..., :1] = x[..., 1:2] * h[..., 2:3]
    return h


def assign_a_sample(h: Tensor, x: Tensor) -> Tensor:
    h[1] = 3.0
    return h


def through_a_view(h: Tensor, x: Tensor) -> Tensor:
    view = h.transpose(0, 1)
    view.mul_(2.0)
    view[0] += 1.0
    return h


def view_and_itself(h: Tensor, x: Tensor) -> Tensor:
    view = h.flatten()
    view.add_(1.0)
    h.tanh_()
    return h * view.view_as(h)


def masked(h: Tensor, x: Tensor) -> Tensor:
    return h.masked_fill_(x > 0, 0.0)


def clamped(h: Tensor, x: Tensor) -> Tensor:
    return h.clamp_(-0.5, 0.5)


CHANGES = [
    relu_,
    add_input,
    multiply_and_add,
    assign_features,
    assign_values,
    assign_a_sample,
    through_a_view,
    view_and_itself,
    masked,
    clamped,
]
LAYERS = {
    "linear": (lambda: nn.Linear(3, 3), (4, 3)),
    "linear with positions": (lambda: nn.Linear(3, 3), (4, 5, 3)),
    "linear without bias": (lambda: nn.Linear(3, 3, bias=False), (4, 5, 3)),
    "layer norm": (lambda: nn.LayerNorm(3), (4, 5, 3)),
    "rms norm": (lambda: nn.RMSNorm(3), (4, 5, 3)),
    "conv1d": (lambda: nn.Conv1d(5, 5, 3, padding=1), (4, 5, 3)),
    "conv2d": (lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2), (4, 2, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(5, 5, 3, padding=1), (4, 5, 3)),
    "group norm": (lambda: nn.GroupNorm(1, 5), (4, 5, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(5, affine=True), (4, 5, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(5), (4, 5, 3)),
    "prelu": (lambda: nn.PReLU(5), (4, 5, 3)),
    "bilinear": (lambda: nn.Bilinear(3, 3, 3), (4, 5, 3)),
    "embedding": (lambda: nn.Embedding(7, 3), (4, 5, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_result_changed_in_place_afterwards_is_right(kind: str, change) -> None:
    make, shape = LAYERS[kind]
    ids = torch.arange(20).view(4, 5) % 7

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        arguments = {"bilinear": (x, x.tanh()), "embedding": (ids,)}.get(kind, (x,))
        return self.after(change(self.layer(*arguments), x))

    model, x = wired(forward, layer=make(), after=nn.Linear(3, 2)).eval(), draw(*shape)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_in_place_activations_between_layers_are_right() -> None:
    layers = [
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Hardtanh(inplace=True),
    ]
    model = gradbatch.extend(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2)).double())
    x = draw(3, 2, 6, 6)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_an_in_place_residual_of_a_network_is_right() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        out = F.relu_(self.norm(self.first(x)))
        out = self.second(out)
        out += self.shortcut(x)
        return F.relu_(out)

    model = wired(
        forward,
        first=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        norm=nn.GroupNorm(1, 3),
        second=nn.Conv2d(3, 3, 3, padding=1),
        shortcut=nn.Conv2d(2, 3, 1),
    )
    x = draw(3, 2, 5, 5)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", ["linear", "linear with positions", "conv2d", "layer norm", "group norm", "prelu"]
)
def test_an_input_changed_in_place_later_is_never_used_as_it_is_now(kind: str, way: str) -> None:
    make, shape = LAYERS[kind]
    model, x = wired(lambda self, x: self.layer(x), layer=make()), draw(*shape)

    def losses() -> Tensor:
        given = x.clone()
        result = sum_of_squares(model(given))
        given.mul_(2.0)
        return result

    # torch itself refuses where its own check sees it; what it prunes away is ours to refuse.
    with pytest.raises(RuntimeError, match="modified"):
        WAYS[way](model, losses)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("table", [nn.Embedding(6, 3), nn.EmbeddingBag(6, 3)], ids=["embedding", "bag"])
def test_ids_changed_in_place_later_are_refused_by_the_layers_name(table: nn.Module, way: str) -> None:
    model, ids = wired(lambda self, ids: self.table(ids), table=table), torch.randint(0, 6, (4, 5))

    def losses() -> Tensor:
        given = ids.clone()
        result = sum_of_squares(model(given))
        given.fill_(0)
        return result

    with pytest.raises(RuntimeError, match=r"table|modified by an inplace"):
        WAYS[way](model, losses)


def test_a_first_layers_input_changed_later_is_refused_by_the_layers_name() -> None:
    # Only the bias is trained, so autograd saves no input and would not notice.
    model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2))
    model.layer.weight.requires_grad_(False)
    x = draw(4, 3)
    losses = sum_of_squares(model(x))
    right = expected(model, lambda: losses)
    x.mul_(2.0)
    refusal = refusal_of(lambda: torch.testing.assert_close(gradbatch.per_sample_grads(model, losses), right))
    assert refusal is None or "layer" in refusal


@pytest.mark.parametrize(
    ("layer", "buffer"),
    [
        (nn.BatchNorm2d(2), "running_mean"),
        (nn.BatchNorm2d(2), "running_var"),
        (nn.InstanceNorm2d(2, affine=True, track_running_stats=True), "running_mean"),
        (nn.InstanceNorm2d(2, affine=True, track_running_stats=True), "running_var"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_statistics_changed_between_forward_and_backward_are_noticed(layer: nn.Module, buffer: str) -> None:
    model, x = wired(lambda self, x: self.layer(x), layer=layer).eval(), draw(3, 2, 4, 4)

    def losses() -> Tensor:
        result = sum_of_squares(model(x))
        getattr(model.layer, buffer).add_(1.0)
        return result

    assert_refused(model, losses, StaleCapture, "layer.*running", ways=("backward",))


def test_statistics_that_a_later_forward_updates_are_noticed() -> None:
    model = wired(
        lambda self, x: self.layer(x), layer=nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    )
    x = draw(3, 2, 4)

    def losses() -> Tensor:
        result = sum_of_squares(model.eval()(x))
        model.train()(x + 5.0)
        return result

    assert_refused(model, losses, StaleCapture, "layer.*running", ways=("backward",))
