"""A quantity of the user's that is wrong says which one it is, and where it failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchL2Grad, PerSampleGrad, Quantity, QuantityError, UsageError, Variance, WeightedSum
from tests.capture.reference import draw, perceptron, sum_of_squares


def quantity(reduce: Callable[[PerSampleGrad], Any], **attributes: Any) -> Quantity:
    """An instance of a new class ``Mine``."""
    methods = {"reduce": lambda self, grad: reduce(grad), "name": "mine"}
    return type("Mine", (Quantity,), methods | attributes)()


def preparing(prepare: Callable[[Mapping[str, PerSampleGrad]], Any]) -> Quantity:
    return quantity(lambda grad: grad.sum(), joint=True, prepare=lambda self, grads: prepare(grads))


def driven(model: nn.Module, asked: Quantity, **options: Any) -> gradbatch.Results:
    return gradbatch.backward(model, sum_of_squares(model(draw(4, 3))), asked, **options)


def watched(model: nn.Module, asked: Quantity, **options: Any) -> gradbatch.Results:
    with gradbatch.compute(model, asked, loss_reduction="mean", **options) as results:
        sum_of_squares(model(draw(4, 3))).mean().backward()
    return results


WAYS = {"backward": driven, "compute": watched}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("reduce", "message", "cause"),
    [
        (lambda grad: 1 / 0, "ZeroDivisionError: division by zero$", ZeroDivisionError),
        (lambda grad: {}["key"], "KeyError: 'key'$", KeyError),
        (lambda grad: grad.mean(0), r"no attribute 'mean'.*grad\.dense\(\) is a tensor", AttributeError),
        (lambda grad: torch.sum(grad), r"Tensor, not OuterProduct.*grad\.dense\(\) is a tensor", TypeError),
        (lambda grad: grad**2, r"'OuterProduct' and 'int'.*grad\.dense\(\) is a tensor", TypeError),
        (lambda: None, "takes 0 positional arguments but 1 was given$", TypeError),
    ],
    ids=["arithmetic", "key", "method", "function", "operator", "signature"],
)
def test_what_reduce_raises_is_the_cause_of_an_error_with_quantity_and_parameter(
    way: str, reduce: Callable[..., Any], message: str, cause: type[Exception]
) -> None:
    with pytest.raises(
        QuantityError, match=rf"^Mine\.reduce failed on \d\.weight \[4, \d, \d\].*{message}"
    ) as raised:
        WAYS[way](perceptron(), quantity(reduce))
    assert isinstance(raised.value.__cause__, cause)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("value", "words"), [(None, "None"), (1.0, "a float"), ((torch.ones(2),), "a tuple"), ([], "a list")]
)
def test_what_is_no_tensor_is_refused_with_quantity_and_parameter(
    way: str, value: object, words: str
) -> None:
    with pytest.raises(
        QuantityError, match=rf"Mine\.reduce returned {words} for \d\.weight.*return a tensor"
    ):
        WAYS[way](perceptron(), quantity(lambda grad: value))


def test_the_parameter_that_is_named_is_the_one_that_failed() -> None:
    def reduce(grad: PerSampleGrad) -> Tensor:
        if grad.shape == (2,):
            raise ValueError("two")
        return grad.sum()

    with pytest.raises(QuantityError, match=r"on 2\.bias \[4, 2\]: ValueError: two"):
        driven(perceptron(), quantity(reduce))


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_wrong_in_prepare_names_the_quantity(way: str) -> None:
    with pytest.raises(QuantityError, match=r"Mine\.prepare failed on 4 parameters: ZeroDivision") as raised:
        WAYS[way](perceptron(), preparing(lambda grads: 1 / 0))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    for value, words in ((None, "None"), (BatchL2Grad, "a ABCMeta")):
        with pytest.raises(
            QuantityError, match=rf"Mine\.prepare returned {words}; let it return the quantity"
        ):
            WAYS[way](perceptron(), preparing(lambda grads, value=value: value))


def test_an_error_of_ours_keeps_its_kind() -> None:
    with pytest.raises(UsageError, match=r"^WeightedSum\.reduce on \d\.weight \[4, \d, \d\]: weights \[3\]"):
        driven(perceptron(), WeightedSum(torch.ones(3)))


def test_running_out_of_memory_stays_what_it_is() -> None:
    def reduce(grad: PerSampleGrad) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match=r"^no room$"):
        driven(perceptron(), quantity(reduce))


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_leaves_the_model_usable(way: str) -> None:
    model = perceptron()
    with pytest.raises(QuantityError):
        WAYS[way](model, quantity(lambda grad: None))
    assert WAYS[way](model, quantity(lambda grad: grad.sum()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (quantity(lambda grad: grad.sum(), name=None), 'Mine has no name.*name = "mine"'),
        (
            quantity(lambda grad: grad.sum(), operations="dense"),
            r"Mine\.operations is 'dense'; it is a tuple",
        ),
        (quantity(lambda grad: grad.sum(), operations=("norm",)), r"is \('norm',\).*squared_norm"),
        (
            quantity(lambda grad: grad.sum(), prepare=lambda self, grads: self),
            r"Mine\.prepare would never be called; set joint = True",
        ),
    ],
    ids=["name", "string", "unknown", "joint"],
)
def test_a_class_that_is_put_together_wrongly_is_refused_before_anything_runs(
    way: str, asked: Quantity, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        WAYS[way](perceptron(), asked)


@pytest.mark.parametrize("way", WAYS)
def test_attributes_that_would_hide_others_are_refused(way: str) -> None:
    with pytest.raises(UsageError, match=r"Mine is named 'norm', which every tensor has"):
        WAYS[way](perceptron(), quantity(lambda grad: grad.squared_norm(), name="norm"), attach=True)
    model = perceptron()
    losses = sum_of_squares(model(draw(4, 3)))
    both = Variance(), Variance(unbiased=True)
    with pytest.raises(UsageError, match=r"Variance\(unbiased=False\) and .* are both named 'variance'"):
        gradbatch.backward(model, losses, *both, attach=True)
    assert len(gradbatch.backward(model, losses, *both)) == 2


def test_a_total_of_tensors_of_several_shapes_is_refused_even_if_they_broadcast() -> None:
    model = gradbatch.extend(nn.Linear(3, 3)).double()
    results = driven(model, quantity(lambda grad: grad.sum(), additive=True))
    with pytest.raises(UsageError, match=r"Mine does not add up.*\[3, 3\] for weight and \[3\] for bias"):
        next(iter(results.values())).total()


def test_a_plain_class_is_called_by_its_name() -> None:
    results = driven(perceptron(), quantity(lambda grad: grad.sum()))
    with pytest.raises(KeyError, match=r"BatchL2Grad was not computed; there are: Mine\(\)$"):
        results[BatchL2Grad]
