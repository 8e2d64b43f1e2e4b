"""However activations and output gradients lie in memory, the per-sample gradients are the same numbers."""

import pytest
import torch

import gradbatch
from tests.convolution_cases import LAYOUTS, lay_out
from tests.oracle import TOLERANCE, assert_right, projection
from tests.rules.case import Case
from tests.rules.cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
]
STRIDED = [layout for layout in LAYOUTS if layout != "contiguous"]


def strided_input(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)  # over samples: normalised over positions, constants are zero
    return strided_target(tensor, layout)


def strided_target(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    return tensor[:, :1].expand(tensor.shape) if layout == "expanded" else lay_out(tensor, layout)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_strides_of_activations_and_output_gradients_change_nothing(case: Case, device: torch.device) -> None:
    plain, cotangent = case.batch(4, device)
    for layout in STRIDED:
        inputs, target = [strided_input(x, layout) for x in plain], strided_target(cotangent, layout)
        # torch is wrong, or crashes, for some strides of the output gradient of a GroupNorm or BatchNorm.
        expected = case.reference([x.contiguous() for x in inputs], target.contiguous())
        # As in the middle of a network, where a gradient flows on to what comes before.
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        model = gradbatch.extend(case.model(device))
        found = gradbatch.per_sample_grads(model, projection(model(*inputs), target))
        for name, gradients in expected.items():
            what = f"{name}, {layout}"
            assert_right(found[name], gradients, TOLERANCE[torch.double], what, per_sample=True)
