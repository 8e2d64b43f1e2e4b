"""An oracle may lie as well: wherever several of them can run, they agree."""

import pytest
import torch

from tests.oracle import TOLERANCE, assert_right, relative_error
from tests.rules.case import Case
from tests.rules.cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracles_of_a_case_agree(case: Case, device: torch.device) -> None:
    inputs, target = case.batch(4, device)
    first, *others = (case.reference(inputs, target, oracle) for oracle in case.oracles)
    for other in others:
        for name, gradients in first.items():
            assert_right(other[name], gradients, TOLERANCE[torch.double], name, per_sample=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.stand_in], ids=lambda case: case.name)
def test_a_stand_in_computes_what_the_layer_computes(case: Case, device: torch.device) -> None:
    inputs, _ = case.batch(4, device)
    model = case.model(device)
    expected = model(*inputs)
    assert case.stand_in is not None
    model.layer = case.stand_in(model.layer)
    assert_right(model(*inputs), expected, TOLERANCE[torch.double])


def test_an_error_is_relative_and_never_overlooked() -> None:
    right = torch.tensor([[1.0, 0.0], [1e6, 1.0], [0.0, 0.0]], dtype=torch.double)
    assert relative_error(right, right) == relative_error(right, right, per_sample=True) == 0
    off = right + torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert relative_error(off, right) == pytest.approx(5e-7)
    assert relative_error(off, right, per_sample=True) == 0.5
    assert relative_error(right.new_ones(2), right.new_zeros(2)) > 1
    assert relative_error(torch.tensor([torch.nan]), torch.ones(1)) == float("inf")
