"""A backward pass from a vector of losses is a sum: right as one, and refused where a mean was promised."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import gradbatch
from gradbatch import BatchGrad, UsageError
from gradbatch.capture import roots
from tests.capture.reference import (
    QUANTITIES,
    assert_results,
    draw,
    expected,
    perceptron,
    sum_of_squares,
)

SAMPLES = 5
GRADIENTS = {
    "ones": torch.ones(SAMPLES, dtype=torch.double),
    "a mean's": torch.full((SAMPLES,), 1 / SAMPLES, dtype=torch.double),
    "several": torch.arange(1.0, SAMPLES + 1, dtype=torch.double) * torch.tensor([1, -1, 1, 0, 1]),
}


def of_tensor(losses: Tensor, model: nn.Module, gradient: Tensor) -> None:
    losses.backward(gradient)


def of_function(losses: Tensor, model: nn.Module, gradient: Tensor) -> None:
    torch.autograd.backward([losses], [gradient])


def of_parameters(losses: Tensor, model: nn.Module, gradient: Tensor) -> None:
    torch.autograd.grad(losses, [*model.parameters()], gradient)


def of_edge(losses: Tensor, model: nn.Module, gradient: Tensor) -> None:
    torch.autograd.grad([get_gradient_edge(losses)], [*model.parameters()], [gradient])


CALLS = [of_tensor, of_function, of_parameters, of_edge]


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("call", CALLS)
def test_it_is_the_sum_of_the_losses_times_the_gradient_argument(call: Any, gradient: Tensor) -> None:
    model, x = perceptron(), draw(SAMPLES, 3)
    right = expected(model, lambda: sum_of_squares(model(x)) * gradient)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="sum") as results:
        call(sum_of_squares(model(x)), model, gradient)
    assert_results(results, right)


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("call", CALLS)
def test_it_is_no_mean(call: Any, gradient: Tensor) -> None:
    model, x = perceptron(), draw(SAMPLES, 3)
    with (
        pytest.raises(
            UsageError, match=r'"mean" promises.*losses\.mean\(\)\.backward\(\).*loss_reduction="sum"'
        ),
        gradbatch.compute(model, *QUANTITIES, loss_reduction="mean"),
    ):
        call(sum_of_squares(model(x)), model, gradient)


def test_the_gradient_of_the_parameter_is_left_as_it_came() -> None:
    model, x = perceptron(), draw(SAMPLES, 3)
    with pytest.raises(UsageError), gradbatch.compute(model, BatchGrad(), loss_reduction="mean"):
        sum_of_squares(model(x)).backward(GRADIENTS["several"])
    right = expected(model, lambda: sum_of_squares(model(x)) * GRADIENTS["several"])
    torch.testing.assert_close(model[0].weight.grad, right["0.weight"].sum(0))


def test_one_vector_among_scalars_is_refused() -> None:
    model, x = perceptron(), draw(SAMPLES, 3)

    def run() -> None:
        with gradbatch.compute(model, BatchGrad(), loss_reduction="mean"):
            sum_of_squares(model(x)).mean().backward()
            losses = sum_of_squares(model(x))
            torch.autograd.backward([losses.mean(), losses], [None, torch.ones_like(losses)])

    with pytest.raises(UsageError, match="promises"):
        run()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_is_a_scalar_whatever_its_shape(shape: tuple[int, ...]) -> None:
    model, x = perceptron(), draw(SAMPLES, 3)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="mean") as results:
        loss = sum_of_squares(model(x)).mean().view(shape)
        loss.backward(torch.full(shape, 3.0, dtype=torch.double))
    assert_results(results, expected(model, lambda: 3 * sum_of_squares(model(x))))


def test_the_mean_over_one_sample_is_its_sum() -> None:
    model, x = perceptron(), draw(1, 3)
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="mean") as results:
        sum_of_squares(model(x)).backward(torch.ones(1, dtype=torch.double))
    assert_results(results, expected(model, lambda: sum_of_squares(model(x))))


def test_a_pass_that_asks_for_no_parameter_may_start_from_a_vector() -> None:
    model, x = perceptron(), draw(SAMPLES, 3).requires_grad_()
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="mean") as results:
        losses = sum_of_squares(model(x))
        torch.autograd.grad(losses, x, torch.ones_like(losses), retain_graph=True)
        losses.mean().backward()
    assert_results(results, expected(model, lambda: sum_of_squares(model(x))))


def test_the_pass_inside_a_reentrant_checkpoint_is_none_of_the_user_s() -> None:
    model, x = perceptron(), draw(SAMPLES, 3).requires_grad_()
    with gradbatch.compute(model, *QUANTITIES, loss_reduction="mean") as results:
        sum_of_squares(checkpoint(model, x, use_reentrant=True)).mean().backward()
    assert_results(results, expected(model, lambda: sum_of_squares(model(x))))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_hook_sees_does_not_depend_on_its_thread(elsewhere: bool) -> None:
    """Hooks of a CUDA graph run on a thread of the engine's, while the caller waits."""
    seen: list[bool] = []
    with ThreadPoolExecutor(1) as pool:

        def look(_: Tensor) -> None:
            seen.append(
                pool.submit(roots.starts_from_vectors).result() if elsewhere else roots.starts_from_vectors()
            )

        x = draw(3).requires_grad_()
        y = x * 2
        y.register_hook(look)
        y.sum().backward(retain_graph=True)
        y.backward(torch.ones_like(y), retain_graph=True)
        torch.autograd.grad(y.sum(), x)
    assert seen == [False, True, False]


def test_outside_of_a_pass_there_is_no_vector() -> None:
    assert not roots.starts_from_vectors()
