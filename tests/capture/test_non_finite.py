"""A sample that is not finite: the others' gradients are as without it, however its elements lie among theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, UnsupportedLayer
from gradbatch.capture import graph, paths
from gradbatch.capture.elements import NOBODY, SEVERAL
from gradbatch.capture.memory import STEPS
from gradbatch.capture.reach import owners_by_reach
from tests.capture.reference import (
    WAYS,
    draw,
    expected,
    sum_of_squares,
    wired,
)

pytestmark = pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
NAN, INF = float("nan"), float("inf")


class Scaled(torch.autograd.Function):
    """Sums over all samples in its backward, where zero times NaN is NaN."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum((0, 1))


class Hidden(torch.autograd.Function):
    """The same, keeping its operand where nobody can see it."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.x, ctx.scale = x, scale
        return x * scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * ctx.scale, (gradient * ctx.x).sum((0, 1))


def ragged(self, x: Tensor) -> Tensor:
    """Rows of samples of 2, 3 and 1 positions: without the middle one, as if there were 2 each."""
    rows = self.layer(torch.cat([x[0, :2], x[1, :3], x[2, :1]]))
    return rows.new_zeros(3, 4).index_add(0, torch.tensor([0, 0, 1, 1, 1, 2]), rows.tanh())


def table(self, x: Tensor) -> Tensor:
    """A row of a computed table for each sample, and the middle one's for the first as well."""
    rows = 0.5 * self.weight[:3]
    return (rows[torch.tensor([[0, 1], [1, 1], [2, 2]])] * x[:, :2]).tanh()


def killed(self, x: Tensor) -> Tensor:
    """Positions of which nothing becomes, so that zero meets NaN below them."""
    hidden = self.layer(x * self.weight[0])
    return torch.cat([hidden[:, :1], hidden[:, 1:]], 1)[:, 1:]


def in_groups(self, x: Tensor) -> Tensor:
    """A group of one convolution for each sample."""
    weight = self.weight[:, :, None].repeat(3, 1, 1)
    return F.conv1d(x.mT.reshape(1, -1, 3), weight, groups=3).view(3, -1, 3)


MODELS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "layer": lambda self, x: self.layer(x),
    "time major": lambda self, x: self.layer(x.transpose(0, 1))[-1],
    "ragged": ragged,
    "table": table,
    "killed": killed,
    "groups": in_groups,
    "function": lambda self, x: Scaled.apply(x, self.weight[0].exp()),
    "bag": lambda self, x: F.embedding_bag(
        torch.arange(9).view(3, 3) % 4, self.weight, mode="sum", per_sample_weights=x[..., 0]
    ),
    "split": lambda self, x: torch.stack([self.layer(sample).tanh() for sample in x]),
    "sorted": lambda self, x: self.layer(x[torch.tensor([2, 0, 1])])[torch.tensor([1, 2, 0])],
    "attention": lambda self, x: (
        F.softmax((h := self.layer(x)[..., :3]) @ h.mT + self.weight[0, 0], -1) @ x * self.weight[1]
    ),
    "bilinear": lambda self, x: F.bilinear(x * self.weight[0], x, self.weight[:, :, None] * self.weight[0]),
    "instance norm": lambda self, x: F.instance_norm(x.mT, weight=self.weight[0], bias=self.weight[1]),
}


def model_of(name: str) -> nn.Module:
    model = wired(MODELS[name], layer=nn.Linear(3, 4))
    model.weight = nn.Parameter(draw(4, 3))
    return model.double()


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_the_other_samples_are_as_without_it(way: str, name: str, value: float) -> None:
    for bad in range(3):
        model, x = model_of(name), draw(3, 3, 3)
        losses = lambda model=model, x=x: sum_of_squares(model(x))  # noqa: E731
        right = expected(model, losses)
        x.data[bad] = value
        alone = expected(model, losses)
        others = [n for n in range(3) if n != bad]
        found = WAYS[way](model, losses)[BatchGrad]
        for parameter, gradient in right.items():
            torch.testing.assert_close(found[parameter][others], gradient[others])
            if right[parameter][bad].any():
                assert not found[parameter][bad].isfinite().all()
        assert not all(gradient[bad].isfinite().all() for gradient in alone.values())


def test_what_a_function_keeps_out_of_sight_is_refused() -> None:
    model, x = (
        wired(lambda self, x: Hidden.apply(x, self.layer.bias)[..., :2], layer=nn.Linear(1, 3)),
        draw(3, 2, 3),
    )
    x[1] = NAN
    with pytest.raises(UnsupportedLayer, match="HiddenBackward is called on all samples at once"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(x)))


@pytest.mark.parametrize("samples", [2, 3, 8])
@pytest.mark.parametrize("way", WAYS)
def test_a_training_loop_survives_it_at_every_step(way: str, samples: int) -> None:
    model = wired(
        lambda self, x: torch.tanh(self.layer(x)) + self.table(torch.arange(5)),
        layer=nn.Linear(3, 4),
        table=nn.Embedding(5, 4),
    )
    # Before anything is remembered, where it is relied on, and where all of it is measured again.
    for step in range(STEPS + 3):
        x = draw(samples, 5, 3)
        losses = lambda x=x: sum_of_squares(model(x))  # noqa: E731
        right = expected(model, losses)
        others = torch.arange(samples) != step % samples
        if step in (0, 1, 5, STEPS - 1, STEPS):
            x[step % samples] = NAN
        found = WAYS[way](model, losses)[BatchGrad]
        for name, gradient in right.items():
            torch.testing.assert_close(found[name][others], gradient[others])


@pytest.mark.parametrize("way", WAYS)
def test_a_learned_state_of_a_recurrent_layer_is_not_lost_in_the_layer(way: str) -> None:
    # The path from it into the shared region leads through the layer, which claims it for its own parameters.
    model = wired(
        lambda self, x: self.layer(x, self.start.weight.expand(1, len(x), 2).contiguous())[0],
        layer=nn.GRU(4, 2, batch_first=True),
        start=nn.Linear(2, 1, bias=False),
    )
    x = draw(3, 2, 4)
    losses = lambda: sum_of_squares(model(x))  # noqa: E731
    right = expected(model, losses)
    x[0] = INF
    found = WAYS[way](model, losses)[BatchGrad]
    for name, gradient in right.items():
        torch.testing.assert_close(found[name][1:], gradient[1:])


def test_reach_tells_a_factor_of_zero_from_no_path() -> None:
    x = draw(2, 3).requires_grad_()
    zero = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    losses = torch.stack([(x * zero).sum(1), x[:1].sum(1).expand(2) * zero[:, 0]]).sum(0)
    walk = paths.walk([graph.node_of(losses)], [])
    end = next(node for node in walk.order() if graph.kind(node) == "MulBackward")
    leaf = next(node for node in walk.order() if graph.accumulated_variable(node) is x)
    roots = {(graph.node_of(losses), 0): torch.arange(2)}
    found = owners_by_reach(walk, 2, {}, roots, [(end, 0), (leaf, 0)])
    # The second loss reaches the first row, and but for the zero the first loss would: it may be anybody's.
    assert found[leaf, 0].tolist() == [[SEVERAL] * 3, [1, 1, 1]]
    losses = x[:1].sum(1).expand(2) * torch.tensor([0.0, 0.0], dtype=torch.float64)
    walk = paths.walk([graph.node_of(losses)], [])
    leaf = next(node for node in walk.order() if graph.accumulated_variable(node) is x)
    found = owners_by_reach(walk, 2, {}, {(graph.node_of(losses), 0): torch.arange(2)}, [(leaf, 0)])
    assert bool((found[leaf, 0] == NOBODY).all())


@pytest.mark.parametrize("ids", [None, [0, 1, 2, 3]])
@pytest.mark.parametrize("way", WAYS)
def test_a_saturated_sample_of_infinite_loss_is_not_finite(way: str, ids: list[int] | None) -> None:
    # The derivative of the sigmoid is exactly zero there: what is measured with a finite loss does not show the sample.
    model = wired(
        lambda self, x: torch.sigmoid(self.layer(x)[:, 0] * self.scale[0]),
        layer=nn.Linear(3, 1),
        scale=nn.ParameterList([nn.Parameter(torch.ones(1))]),
    ).double()
    x = draw(4, 3)
    x.data[2] = 1e4 * model.layer.weight.detach()[0].sign()
    for _ in range(4):
        losses = lambda: -torch.log1p(-model(x))  # noqa: E731
        sample_ids = None if ids is None else torch.tensor(ids)
        if way == "backward":
            found = gradbatch.backward(model, losses(), BatchGrad(), sample_ids=sample_ids)[BatchGrad]
        else:
            options = {"loss_reduction": "sum", "sample_ids": sample_ids}
            with gradbatch.compute(model, BatchGrad(), **options) as results:
                losses().sum().backward()
            found = results[BatchGrad]
        bad = 2 if ids is None else ids[2]
        for gradient in found.values():
            finite = gradient.flatten(1).isfinite().all(1)
            assert not finite[bad] and finite.sum() == len(finite) - 1
