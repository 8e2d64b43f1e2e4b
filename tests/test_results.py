"""What is looked up in results that do not have it: a KeyError that says what there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradbatch
from gradbatch import BatchGrad, BatchL2Grad, UsageError
from tests.capture.reference import draw, perceptron, sum_of_squares


@pytest.mark.parametrize("key", ["weight", 3, None, ("0.weight",)])
def test_an_unknown_parameter_of_a_result_is_a_key_error_with_the_names_there_are(key: Any) -> None:
    model = perceptron()
    result = gradbatch.backward(model, sum_of_squares(model(draw(4, 3))), BatchGrad())[BatchGrad]
    for error in (KeyError, UsageError):
        with pytest.raises(error, match=r"^no BatchGrad for .*There are: 0\.weight, 0\.bias"):
            result[key]
    with pytest.raises(UsageError, match=r"no BatchGrad for a parameter of shape \(5,\)"):
        result[nn.Parameter(torch.zeros(5))]


def test_a_quantity_that_was_not_asked_for_is_a_key_error_with_those_there_are() -> None:
    model = perceptron()
    results = gradbatch.backward(model, sum_of_squares(model(draw(4, 3))), BatchGrad())
    for error in (KeyError, UsageError):
        with pytest.raises(error, match=r"BatchL2Grad was not computed; there are: BatchGrad\(\)"):
            results[BatchL2Grad]
        with pytest.raises(error, match=r"ClippedSum\(max_norm=1\.0, .*\) was not computed"):
            results[gradbatch.ClippedSum(1.0)]


@pytest.mark.parametrize("key", ["0.weight", "grad_batch", 0, nn.Parameter(torch.zeros(4, 3)), nn.Module])
def test_what_is_no_quantity_is_a_key_error_that_shows_the_two_keys(key: Any) -> None:
    model = perceptron()
    results = gradbatch.backward(model, sum_of_squares(model(draw(4, 3))), BatchL2Grad(), BatchGrad())
    with pytest.raises(
        KeyError, match=r"is no quantity.*as in results\[BatchL2Grad\]\['0\.weight'\]; there are: BatchL2"
    ):
        results[key]


def test_a_total_of_what_does_not_add_up_is_refused() -> None:
    model = perceptron()
    with pytest.raises(UsageError, match=r"BatchGrad has no total.*additive"):
        gradbatch.backward(model, sum_of_squares(model(draw(4, 3))), BatchGrad())[BatchGrad].total()
