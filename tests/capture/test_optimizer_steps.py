"""Weights that change between a forward and the backward that needs them: harmless, or said plainly to have changed."""

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import StaleCapture
from tests.capture.reference import (
    QUANTITIES,
    WAYS,
    assert_results,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    wired,
)


class Raw(nn.Module):
    """No layers: what it multiplies with is read off the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain + self.shift).exp() * self.gain


def step_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), 0.1).step()


def test_an_optimizer_step_between_forward_and_backward_is_said_to_be_one() -> None:
    for model, named in ((perceptron(), "2.weight, 2.bias, 0.weight, 0.bias"), (Raw(), "gain, shift")):
        losses = sum_of_squares(gradbatch.extend(model.double())(draw(4, 3)))
        step_by_one(model)
        with pytest.raises(StaleCapture) as raised:
            gradbatch.backward(model, losses, *QUANTITIES)
        message = str(raised.value)
        assert message.startswith(f"{named}: changed in place after the forward, as optimizer.step() does")
        assert "Step after gradbatch.backward" in message and "freed" not in message
        assert isinstance(raised.value.__cause__, RuntimeError)


def test_the_user_s_own_backward_after_a_step_fails_as_it_always_does() -> None:
    model, x = perceptron(), draw(4, 3)

    def losses() -> Tensor:
        result = sum_of_squares(model(x))
        step_by_one(model)
        return result

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        WAYS["compute"](model, losses)


def test_after_a_whole_step_the_weights_and_the_freed_graph_are_both_named() -> None:
    model = gradbatch.extend(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))).double()
    losses = sum_of_squares(model(draw(4, 3)))
    losses.mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(
        StaleCapture, match=r"and 2 more: changed in place.*Besides, an earlier backward pass has freed"
    ):
        gradbatch.backward(model, losses, *QUANTITIES)


def test_a_step_inside_the_context_is_harmless_or_refused_with_the_place_for_it() -> None:
    lstm = wired(lambda self, x: self.own(x)[0].flatten(1), own=nn.LSTM(3, 2, batch_first=True))
    plain, x = perceptron(), draw(4, 3)

    def train(model: nn.Module, x: Tensor) -> gradbatch.Results:
        with gradbatch.compute(model, *QUANTITIES, loss_reduction="mean") as results:
            sum_of_squares(model(x)).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            torch.optim.SGD(model.parameters(), 0.1).step()
        return results

    right = expected(plain, lambda: sum_of_squares(plain(x)))
    assert_results(train(plain, x), right)
    with pytest.raises(StaleCapture, match=r"own \(LSTM\): weight_ih_l0 was changed .*behind the with block"):
        train(lstm, draw(4, 5, 3))


def test_an_activation_that_was_changed_in_place_is_no_weight() -> None:
    model = perceptron()
    hidden = model[:2](draw(4, 3))
    losses = sum_of_squares(model[2](hidden))
    hidden.detach().zero_()
    with pytest.raises(StaleCapture, match=r"needs was changed in place after the forward .*Clone it"):
        gradbatch.backward(model, losses, *QUANTITIES)
