"""What goes wrong elsewhere with losses and numbers: one test a phrase of the list of failures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchDotGrad, BatchGrad, BatchL2Grad, Variance
from tests.capture.reference import (
    assert_results,
    assert_right_both_ways,
    draw,
    expected,
    perceptron,
    sum_of_squares,
    wired,
)


class TestLosses:
    def test_the_mean_and_the_sum_of_losses_give_the_same_variances_and_norms(self) -> None:
        model, x = perceptron(), draw(4, 3)
        asked = Variance(), Variance(unbiased=True), BatchL2Grad()
        found = []
        for reduction in ("mean", "sum"):
            with gradbatch.compute(model, *asked, loss_reduction=reduction) as results:
                losses = sum_of_squares(model(x))
                (losses.mean() if reduction == "mean" else losses.sum()).backward()
            found.append(results)
        found.append(gradbatch.backward(model, sum_of_squares(model(x)), *asked))
        right = expected(model, lambda: sum_of_squares(model(x)))
        for results in found:
            assert_results(results, right)

    def test_a_loss_handed_over_in_a_tuple_is_right_by_both_of_its_parts(self) -> None:
        model, x = perceptron(), draw(4, 3)

        def step() -> tuple[Tensor, Tensor]:
            losses = sum_of_squares(model(x))
            return losses.mean(), losses

        right = expected(model, lambda: step()[1])
        assert_results(gradbatch.backward(model, step()[1], BatchGrad()), right)
        with gradbatch.compute(model, BatchGrad(), loss_reduction="mean") as results:
            step()[0].backward()
        assert_results(results, right)

    def test_a_loss_written_as_a_lambda_or_handed_over_in_a_tuple_is_right(self) -> None:
        model, x = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2)), draw(4, 3)
        both = lambda: ((losses := sum_of_squares(model(x))).mean(), losses)  # noqa: E731
        assert_right_both_ways(model, lambda: both()[1])

    def test_token_means_with_ignored_labels_are_right_by_their_own_normalisation(self) -> None:
        ids = torch.tensor([[0, 1, 1, 5], [2, 2, 2, 2], [0, 3, 5, 4]])
        model = wired(lambda self, ids: self.b(self.a(ids)), a=nn.Embedding(6, 4), b=nn.Linear(4, 6))
        labels = torch.tensor([[1, -100, -100, 2], [-100] * 4, [0, 3, -100, 1]])

        def losses() -> Tensor:
            tokens = F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none", ignore_index=-100)
            return tokens.sum(1) / (labels != -100).sum()

        assert_right_both_ways(model, losses)


def grouped() -> nn.Module:
    return wired(
        lambda self, x: self.b(torch.relu(self.a(x))), a=nn.Conv1d(2, 4, 2, groups=2), b=nn.Linear(4, 2)
    )


class TestNumbers:
    def test_a_variance_is_never_negative(self) -> None:
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2)).float()
        x = 1e4 + 1e-3 * draw(64, 3, dtype=torch.float32)
        found = gradbatch.backward(model, 1e4 * model(x).sum(1), Variance(), Variance(unbiased=True))
        assert all((value >= 0).all() for result in found.values() for value in result.values())

    @pytest.mark.parametrize("positions", [1, 3, 60])
    def test_norms_of_gradients_that_cancel_are_right_and_their_roots_exist(self, positions: int) -> None:
        # Every position appears again with the opposite sign, and the little that is left is what counts.
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 3))
        x = draw(4, positions, 3)
        signs = torch.cat([torch.ones(positions), -torch.ones(positions)]).double().view(-1, 1)
        doubled = torch.cat([x, x + 1e-5 * draw(4, positions, 3)], 1)
        losses = lambda: (model(doubled) * signs).flatten(1).sum(1)  # noqa: E731
        right = expected(model, losses)["layer.weight"].flatten(1)
        found = gradbatch.backward(model, losses(), BatchL2Grad(), BatchDotGrad())
        squares, gram = found[BatchL2Grad]["layer.weight"], found[BatchDotGrad]["layer.weight"]
        torch.testing.assert_close(squares, right.square().sum(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(gram, right @ right.T, rtol=1e-6, atol=1e-18)
        assert found[BatchL2Grad].total().sqrt().isfinite().all()

    def test_roots_of_gram_diagonals_exist_in_float32(self) -> None:
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 3)).float()
        x = draw(4, 30, 3, dtype=torch.float32)
        signs = torch.tensor([1.0, -1.0]).repeat(15).view(-1, 1)
        x[:, 1::2] = x[:, ::2]
        found = gradbatch.backward(model, (model(x) * signs).flatten(1).sum(1), BatchL2Grad(), BatchDotGrad())
        assert found[BatchL2Grad].total().sqrt().isfinite().all()
        assert found[BatchDotGrad].total().diagonal().sqrt().isfinite().all()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_non_finite_sample_does_not_poison_the_batch(self, value: float) -> None:
        model, x = grouped(), draw(4, 2, 5)
        right = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
        x[1] = value
        found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
        for name, gradient in right.items():
            torch.testing.assert_close(found[name][[0, 2, 3]], gradient[[0, 2, 3]])

    @pytest.mark.parametrize("samples", [0, 1])
    def test_a_batch_of_none_and_of_one_are_right(self, samples: int) -> None:
        model, x = grouped(), draw(samples, 2, 5)
        right = expected(model, lambda: sum_of_squares(model(x)))
        found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
        for name, gradient in right.items():
            torch.testing.assert_close(found[name], gradient)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_norm_far_below_its_terms_keeps_its_digits(self, dtype: torch.dtype) -> None:
        # Terms of size 1 leave a gradient of 1e-3: of the difference of two squares nothing would be left in float32.
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2, bias=False)).to(dtype)
        x, small = draw(4, 3), 1e-3 * draw(4, 3)
        inputs = torch.stack([x + small, -x], 1).to(dtype)
        losses = lambda: model(inputs).flatten(1).sum(1)  # noqa: E731
        exact = (inputs[:, 0].double() + inputs[:, 1].double()).square().sum(1) * 2
        found = gradbatch.backward(model, losses(), BatchL2Grad())[BatchL2Grad]["layer.weight"]
        tolerance = 1e-3 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=0)
