"""Low and mixed precision, loud and quiet samples, non-finite samples, batches of every size."""

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchDotGrad, BatchGrad, BatchL2Grad
from tests.capture.reference import (
    QUANTITIES,
    WAYS,
    Losses,
    assert_results,
    assert_right_both_ways,
    draw,
    expected,
    perceptron,
    refusal_of,
    sum_of_squares,
    watched,
    wired,
)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def network(time_major: bool = True) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x.transpose(0, 1) if time_major else x)))
        x = self.second(x + self.first(x))
        return self.conv(x.transpose(0, 1) if time_major else x)

    return wired(
        forward, first=nn.Linear(4, 4), norm=nn.LayerNorm(4), second=nn.Linear(4, 4), conv=nn.Conv1d(3, 2, 2)
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("time_major", [False, True])
def test_parameters_of_any_precision_are_right_to_their_precision(
    dtype: torch.dtype, time_major: bool
) -> None:
    model, x = network(time_major).to(dtype), draw(3, 3, 4, dtype=dtype)
    losses = lambda: sum_of_squares(model(x).float())  # noqa: E731
    right = {name: gradient.float() for name, gradient in expected(model, losses).items()}
    found = gradbatch.backward(model, losses(), BatchGrad())
    assert_results(found, right, TOLERANCE[dtype])
    assert_results(selected(watched(model, losses)), right, TOLERANCE[dtype])
    assert {gradient.dtype for gradient in found[BatchGrad].values()} == {torch.float32}


def selected(results: gradbatch.Results) -> dict:
    return {q: found for q, found in results.items() if isinstance(q, BatchGrad)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_autocast_is_right_to_the_lower_precision(dtype: torch.dtype, shared: bool) -> None:
    model, x = network().float(), draw(3, 3, 4, dtype=torch.float32)

    def losses() -> Tensor:
        with torch.autocast("cpu", dtype):
            out = model(x)
            return sum_of_squares((model(x * 2) * out if shared else out).float())

    right = expected(model, losses)
    assert_results(gradbatch.backward(model, losses(), BatchGrad()), right, 3e-2)
    assert_results(selected(watched(model, losses)), right, 3e-2)
    with torch.autocast("cpu", dtype):
        assert_results(gradbatch.backward(model, losses(), BatchGrad()), right, 3e-2)
        assert_results(selected(watched(model, losses)), right, 3e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("factor", [1e-36, 1e-20, 1e-8, 1e8, 1e16, 1e20, 1e30])
def test_the_scale_of_the_losses_does_not_matter(factor: float, dtype: torch.dtype) -> None:
    model, x = network().to(dtype), draw(3, 3, 4, dtype=dtype)
    losses = lambda: sum_of_squares(model(x)) * factor  # noqa: E731
    right = expected(model, losses)
    assert_results(gradbatch.backward(model, losses(), BatchGrad()), right)
    assert_results(selected(watched(model, losses, "sum")), right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "factors",
    [(1e8, 1e-12, 1.0), (1e-12, 1e-12, 1e8), (0.0, 1e-12, 1e8), (1e8, 0.0, 0.0), (1e-30, 1.0, 1e-30)],
)
@pytest.mark.parametrize("time_major", [False, True])
def test_quiet_samples_beside_loud_ones_are_right(
    time_major: bool, factors: tuple[float, ...], dtype
) -> None:
    model, x = network(time_major).to(dtype), draw(3, 3, 4, dtype=dtype)
    scale = torch.tensor(factors, dtype=dtype)
    right = expected(model, lambda: sum_of_squares(model(x)) * scale)
    for results in (
        gradbatch.backward(model, sum_of_squares(model(x)) * scale, BatchGrad()),
        selected(watched(model, lambda: sum_of_squares(model(x)) * scale)),
    ):
        for name, gradient in right.items():
            for ours, theirs in zip(results_of(results)[name], gradient, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def results_of(results):
    return next(iter(results.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 1e-36, 1e-12, 1e12])
def test_a_shared_table_is_right_at_every_scale(factor: float, dtype: torch.dtype) -> None:
    model = wired(lambda self, x: torch.tanh(x + self.table(torch.arange(3))), table=nn.Embedding(3, 4)).to(
        dtype
    )
    x = draw(3, 3, 4, dtype=dtype)
    scale = torch.tensor([1e8, 1e-12, 1.0], dtype=dtype)
    assert_right_at_any_size(model, lambda: sum_of_squares(model(x)) * factor)
    assert_right_at_any_size(model, lambda: sum_of_squares(model(x)) * scale * factor)


def assert_right_at_any_size(model: nn.Module, losses: Losses) -> None:
    """Each sample's gradient is right by its own size; their products need not fit into the dtype."""
    right = expected(model, losses)
    for results in (
        gradbatch.backward(model, losses(), BatchGrad()),
        selected(watched(model, losses, "sum")),
    ):
        for name, gradient in right.items():
            for ours, theirs in zip(results_of(results)[name], gradient, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["whole sample", "one position", "loss"])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_non_finite_sample_leaves_the_others_alone(
    way: str, time_major: bool, where: str, value: float
) -> None:
    model, x = network(time_major), draw(4, 3, 4)
    right = expected(model, lambda: sum_of_squares(model(x)))
    bad, factors = x.clone(), torch.ones(4, dtype=torch.float64)
    if where == "loss":
        factors[2] = value
    else:
        bad[2, slice(None) if where == "whole sample" else 1] = value
    results = WAYS[way](model, lambda: sum_of_squares(model(bad)) * factors)
    others = [0, 1, 3]
    for name, gradient in right.items():
        torch.testing.assert_close(results[BatchGrad][name][others], gradient[others])
        flat = gradient.flatten(1)
        torch.testing.assert_close(results[BatchL2Grad][name][others], flat.square().sum(1)[others])
        torch.testing.assert_close(
            results[BatchDotGrad][name][others][:, others], (flat @ flat.T)[others][:, others]
        )
    assert not any(gradient[2].isfinite().all() for gradient in results[BatchGrad].values())
    assert not results[BatchL2Grad].total()[2].isfinite()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_non_finite_sample_is_not_mistaken_for_its_neighbour(way: str, bad: int) -> None:
    model = wired(lambda self, x: self.layer(x.transpose(0, 1))[-1], layer=nn.Linear(3, 4))
    x = draw(2, 2, 3)
    right = expected(model, lambda: sum_of_squares(model(x)))
    x[bad] = float("nan")

    def leave_the_neighbour_alone() -> None:
        found = WAYS[way](model, lambda: sum_of_squares(model(x)))[BatchGrad]["layer.weight"]
        torch.testing.assert_close(found[1 - bad], right["layer.weight"][1 - bad])

    refusal = refusal_of(leave_the_neighbour_alone)
    assert refusal is None or "layer" in refusal


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("samples", [0, 1, 2, 40, 64, 65, 70, 128, 700])
def test_batches_of_every_size_are_right(samples: int, dtype: torch.dtype) -> None:
    model, x = perceptron(dtype), draw(samples, 3, dtype=dtype)
    right = expected(model, lambda: sum_of_squares(model(x)))
    for way in WAYS:
        if way == "compute" and not samples:
            results = watched(model, lambda: sum_of_squares(model(x)), "sum")
        else:
            results = WAYS[way](model, lambda: sum_of_squares(model(x)))
        assert_results(results, right)


@pytest.mark.parametrize("samples", [40, 70, 700])
def test_large_time_major_batches_and_large_shared_tables_are_right(samples: int) -> None:
    model = wired(lambda self, x: self.layer(x.transpose(0, 1)).transpose(0, 1), layer=nn.Linear(2, 2))
    x = draw(samples, 2, 2)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    square = draw(70, 70, 1)
    model = wired(lambda self, x: x * self.table(torch.arange(70)), table=nn.Embedding(70, 1))
    assert_right_both_ways(model, lambda: sum_of_squares(model(square)))


@pytest.mark.parametrize("dead", [[1], [0, 1, 2], [0, 1, 2, 3]])
def test_samples_with_no_gradient_have_zeros(dead: list[int]) -> None:
    model, x = perceptron(), draw(4, 3)
    factors = torch.ones(4, dtype=torch.float64)
    factors[dead] = 0.0
    right = expected(model, lambda: sum_of_squares(model(x)) * factors)
    for run in WAYS.values():
        assert_results(run(model, lambda: sum_of_squares(model(x)) * factors), right)


def test_an_empty_batch_gives_empty_results_of_the_right_shapes() -> None:
    model = network()
    results = gradbatch.backward(
        model, sum_of_squares(model(draw(0, 3, 4))), *QUANTITIES, gradbatch.Variance(), reduction="sum"
    )
    for name, parameter in model.named_parameters():
        assert results[BatchGrad][name].shape == (0, *parameter.shape)
        assert results[BatchL2Grad][name].shape == (0,)
        assert results[BatchDotGrad][name].shape == (0, 0)
        assert not results[gradbatch.SumGradSquared][name].any()
        assert results[gradbatch.Variance][name].isnan().all()


@pytest.mark.parametrize("factor", [1e-300, 1e-12, 1.0, 1e12, 1e100])
@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv2d(3, 2, 2), nn.InstanceNorm1d(3, affine=True)])
def test_one_sample_without_a_batch_axis_is_right_at_every_scale(layer: nn.Module, factor: float) -> None:
    model = wired(lambda self, x: torch.tanh(self.layer(x)), layer=layer)
    x = draw(*{nn.Linear: (3,), nn.Conv2d: (3, 4, 4), nn.InstanceNorm1d: (3, 4)}[type(layer)])
    losses = lambda: factor * model(x).exp().sum().unsqueeze(0)  # noqa: E731
    assert_results(gradbatch.backward(model, losses(), BatchGrad()), expected(model, losses))
