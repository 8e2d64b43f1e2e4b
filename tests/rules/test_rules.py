"""Every rule, with every option: its per-sample gradients, and what is made of them, are those of the oracle."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gradbatch
from gradbatch.plans.contractions import PLANS
from tests.oracle import (
    JOINT_QUANTITIES,
    OPERATIONS,
    QUANTITIES,
    TOLERANCE,
    Arguments,
    Gradients,
    assert_right,
    projection,
    quantities,
    quantity,
    terms_of,
    trainable,
)
from tests.rules.case import Case
from tests.rules.cases import CASES

# torch's own remark on what it does inside, nothing that a user of the layer could act upon.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
precisions = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

SAMPLES = 4
PER_SAMPLE = (gradbatch.BatchGrad, gradbatch.BatchL2Grad)


@dataclass(frozen=True)
class Apply(gradbatch.Quantity):
    """Any operation at all, as a quantity: so it is evaluated by the planner that ``backward`` was given."""

    operation: Callable[[gradbatch.PerSampleGrad], Tensor]
    name = "apply"
    operations = ()

    def reduce(self, grad: gradbatch.PerSampleGrad) -> Tensor:
        return self.operation(grad)


def check_quantities(results: gradbatch.Results, expected: Gradients, tolerance: float) -> None:
    for asked in results:
        for name, gradients in expected.items():
            assert_right(
                results[asked][name],
                quantity(asked, gradients, expected.values()),
                tolerance,
                f"{asked} of {name}",
                isinstance(asked, PER_SAMPLE),
                terms_of(asked),
            )


def backward(
    case: Case, inputs: list[Tensor], target: Tensor, *asked: gradbatch.Quantity
) -> gradbatch.Results:
    model = gradbatch.extend(case.model(target.device, target.dtype))
    return gradbatch.backward(model, projection(model(*inputs), target), *asked)


def dense(case: Case, inputs: list[Tensor], target: Tensor) -> Gradients:
    return dict(backward(case, inputs, target, gradbatch.BatchGrad())[gradbatch.BatchGrad])


def check_same(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, gradients in expected.items():
        assert_right(actual[name], gradients, TOLERANCE[torch.double], name, per_sample=True)


@precisions
@every_case
def test_every_quantity_is_that_of_the_oracle(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    inputs, target = case.batch(SAMPLES, device, dtype)
    asked = quantities(SAMPLES, dtype, device)
    expected = case.reference(inputs, target)
    assert expected, "a case needs a layer with parameters"
    check_quantities(backward(case, inputs, target, *asked), expected, TOLERANCE[dtype])


@every_case
def test_every_quantity_is_that_of_the_oracle_in_the_users_own_backward(
    case: Case, device: torch.device
) -> None:
    inputs, target = case.batch(SAMPLES, device)
    model = gradbatch.extend(case.model(device))
    with gradbatch.compute(
        model, *quantities(SAMPLES, torch.double, device), loss_reduction="mean"
    ) as results:
        projection(model(*inputs), target).mean().backward()
    check_quantities(results, case.reference(inputs, target), TOLERANCE[torch.double])


# A kernel that materialises or sums is used by other operations on their way, if those are forced to do so.
RELATIVES = {
    "dense": tuple(OPERATIONS),
    "sum": ("sum", "weighted_sum", "weighted_sums", "sum_of_squares", "moments"),
    "weighted_sum": ("weighted_sum", "weighted_sums"),
    "sum_of_squares": ("sum_of_squares", "sum_of_centered_squares"),
    "gram": ("gram", "gram_of_two"),
    "squared_norm": ("squared_norm", "norm_of_sum"),
    "inner": ("inner", "norm_of_sum"),
}
THROUGH_DENSE = {
    operation: "dense" for operation, names in PLANS.items() if operation != "dense" and "dense" in names
}
PLANNERS: dict[str, tuple[gradbatch.Planner, tuple[str, ...]]] = {
    "one element at a time": (gradbatch.Planner(budget=1), tuple(OPERATIONS)),
    "free": (gradbatch.Planner(), tuple(OPERATIONS)),
    **{
        f"{operation} by {name}": (
            gradbatch.Planner(force={**(THROUGH_DENSE if operation == "dense" else {}), operation: name}),
            RELATIVES.get(operation, (operation,)),
        )
        for operation, names in PLANS.items()
        for name in names
    },
}


@every_case
def test_every_operation_is_that_of_the_dense_gradients_by_every_plan(
    case: Case, device: torch.device
) -> None:
    inputs, target = case.batch(SAMPLES, device)
    model = gradbatch.extend(case.model(device))
    losses = projection(model(*inputs), target)
    arguments, right = {}, {}
    for parameter, gradients in case.reference(inputs, target).items():
        shape = gradients.shape[1:]
        arguments[shape] = Arguments.draw(SAMPLES, shape, torch.double, device)
        right[parameter] = {name: of(gradients, arguments[shape]) for name, (_, of) in OPERATIONS.items()}
    kinds: set[type[gradbatch.PerSampleGrad]] = set()

    def applied(name: str) -> Apply:
        def run(grad: gradbatch.PerSampleGrad) -> Tensor:
            kinds.add(type(grad))
            return OPERATIONS[name][0](grad, arguments[grad.shape])

        return Apply(run)

    for title, (planner, operations) in PLANNERS.items():
        asked = {name: applied(name) for name in operations}
        results = gradbatch.backward(model, losses, *asked.values(), planner=planner)
        for name, apply in asked.items():
            for parameter, expected in right.items():
                what = f"{name}, {title}, {parameter}"
                assert_right(results[apply][parameter], expected[name], TOLERANCE[torch.double], what)
        # No other structure has plans to choose from.
        if title == "free" and gradbatch.OuterProduct not in kinds:
            return


@every_case
def test_the_sum_over_samples_is_the_gradient_of_the_summed_losses(case: Case, device: torch.device) -> None:
    if not case.adds_up:
        pytest.skip(
            "scale_grad_by_freq: torch divides by how often an id occurs in the batch, not in a sample"
        )
    inputs, target = case.batch(SAMPLES, device)
    model = gradbatch.extend(case.model(device))
    results = gradbatch.backward(
        model, projection(model(*inputs), target), gradbatch.BatchGrad(), reduction="sum"
    )
    for name, parameter in trainable(model).items():
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        assert_right(results[gradbatch.BatchGrad][name].sum(0), gradient, TOLERANCE[torch.double], name)


@every_case
def test_permuting_the_batch_permutes_the_result(case: Case, device: torch.device) -> None:
    inputs, target = case.batch(SAMPLES, device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    permuted = dense(case, [x[order] for x in inputs], target[order])
    check_same(permuted, {name: g[order] for name, g in dense(case, inputs, target).items()})


@every_case
def test_micro_batches_change_nothing(case: Case, device: torch.device) -> None:
    inputs, target = case.batch(SAMPLES, device)
    model = gradbatch.extend(case.model(device))
    asked = quantities(SAMPLES, torch.double, device)

    def in_two_parts() -> gradbatch.Results:
        with gradbatch.compute(model, *asked, loss_reduction="sum") as results:
            for part in (slice(0, 1), slice(1, 4)):
                projection(model(*(x[part] for x in inputs)), target[part]).sum().backward()
        return results

    if case.rereads:
        with pytest.raises(gradbatch.StaleCapture, match=r"layer .*: (weight|running_mean) was changed"):
            in_two_parts()
    else:
        check_quantities(in_two_parts(), case.reference(inputs, target), TOLERANCE[torch.double])


@every_case
def test_a_batch_of_one_is_one_sample_of_a_larger_batch(case: Case, device: torch.device) -> None:
    inputs, target = case.batch(SAMPLES, device)
    expected = case.reference(inputs, target)
    for n in (0, 2):
        single = dense(case, [x[n : n + 1] for x in inputs], target[n : n + 1])
        check_same(single, {name: g[n : n + 1] for name, g in expected.items()})


@every_case
def test_an_empty_batch_gives_empty_results(case: Case, device: torch.device) -> None:
    plain = case.model(device)
    try:
        inputs, target = case.batch(0, device)
        projection(plain(*inputs), target).sum().backward()
    except (RuntimeError, ValueError, IndexError) as error:
        pytest.skip(f"torch itself takes no empty batch here: {error}")
    results = backward(case, inputs, target, *quantities(0, torch.double, device))
    for name, parameter in trainable(plain).items():
        assert results[gradbatch.BatchGrad][name].shape == (0, *parameter.shape)
        assert results[gradbatch.BatchL2Grad][name].shape == (0,)
        assert results[gradbatch.BatchDotGrad][name].shape == (0, 0)
        assert not results[gradbatch.SumGradSquared][name].any()


@every_case
def test_a_frozen_parameter_has_no_result_and_changes_no_other(case: Case, device: torch.device) -> None:
    inputs, target = case.batch(SAMPLES, device)
    expected = dense(case, inputs, target)
    for frozen in expected if len(expected) > 1 else ():
        model = gradbatch.extend(case.model(device))
        model.get_parameter(frozen).requires_grad_(False)
        found = gradbatch.per_sample_grads(model, projection(model(*inputs), target))
        check_same(found, {name: g for name, g in expected.items() if name != frozen})


def test_every_rule_has_a_case() -> None:
    covered = {type(case.build()) for case in CASES}
    taught = {
        kind
        for kind in gradbatch.rules.taught_types()
        # Rules registered by examples and other tests are theirs to check.
        if kind.__module__.startswith("torch.")
    }
    assert taught, "no rule at all?"
    missing = sorted(kind.__name__ for kind in taught - covered)
    assert not missing, f"add cases to tests/rules for {', '.join(missing)}"


def test_every_quantity_has_an_oracle() -> None:
    defined = {
        value
        for value in vars(gradbatch.quantities).values()
        if isinstance(value, type) and issubclass(value, gradbatch.Quantity)
    } - {gradbatch.Quantity}
    drawn = {type(asked) for asked in quantities(SAMPLES, torch.double, torch.device("cpu"))}
    missing = sorted(
        kind.__name__ for kind in defined - ((QUANTITIES.keys() | JOINT_QUANTITIES.keys()) & drawn)
    )
    assert not missing, f"add a definition to tests/oracle.py for {', '.join(missing)}"


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
