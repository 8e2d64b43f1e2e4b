"""Convolutions as layers, with any parameters at all: more of them with ``GRADBATCH_EXAMPLES=2000``."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import gradbatch
from gradbatch.plans.contractions import PLANS
from tests.convolution_cases import Case, convolutions, lay_out
from tests.oracle import TOLERANCE, assert_right, one_hot, projection, quantities, quantity, terms_of
from tests.rules.convolutions import CONVOLUTIONS, TRANSPOSED

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

forced_plans = st.fixed_dictionaries(
    {}, optional={operation: st.sampled_from(names) for operation, names in PLANS.items()}
)


@st.composite
def padding_modes(draw: st.DrawFn, case: Case) -> str:
    """One that torch takes: it reflects no more than there is, and wraps around at most once."""
    if case.transposed:
        return "zeros"
    most = [d * (k - 1) for k, d in zip(case.kernel, case.dilation, strict=True)]
    if isinstance(case.padding, int):
        most = [case.padding] * case.dimensions
    elif isinstance(case.padding, tuple):
        most = list(case.padding)
    room = list(zip(most, case.sizes, strict=True))
    modes = ["zeros", "replicate"]
    modes += ["circular"] * all(pad <= size for pad, size in room)
    modes += ["reflect"] * all(pad < size for pad, size in room)
    return draw(st.sampled_from(modes))


def layer(case: Case, mode: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    kinds = TRANSPOSED if case.transposed else CONVOLUTIONS
    options = {"output_padding": case.output_padding} if case.transposed else {"padding_mode": mode}
    result = kinds[case.dimensions](
        case.groups * case.inputs,
        case.groups * case.outputs,
        case.kernel,
        case.stride,
        case.padding,
        dilation=case.dilation,
        groups=case.groups,
        bias=case.bias,
        **options,
    ).to(device, dtype)
    _, weight, bias = case.tensors(device, dtype)
    with torch.no_grad():
        result.weight.copy_(weight)
        if bias is not None:
            result.bias.copy_(bias)
    return result


@given(data=st.data(), case=convolutions(), force=forced_plans, dtype=st.sampled_from([*TOLERANCE]))
def test_every_quantity_of_any_convolution_by_any_plan_is_that_of_the_oracle(
    data: st.DataObject, case: Case, force: dict[str, str], dtype: torch.dtype, device: torch.device
) -> None:
    mode = data.draw(padding_modes(case), label="padding mode")
    input, *_ = case.tensors(device, dtype)
    model = gradbatch.extend(layer(case, mode, device, dtype))
    output = model(input)
    generator = torch.Generator().manual_seed(case.seed)
    target = torch.randn(output.shape, generator=generator).to(device, dtype)
    target = lay_out(target, data.draw(st.sampled_from(["contiguous", "channels last", "reversed"])))
    reference = layer(case, mode, device, torch.double).double()
    with torch.no_grad():
        for exact, parameter in zip(reference.parameters(), model.parameters(), strict=True):
            exact.copy_(parameter)
    expected = one_hot(reference, projection, [input.double()], target.double())
    asked = quantities(case.samples, dtype, device)
    planner = gradbatch.Planner(force=force)
    results = gradbatch.backward(model, projection(output, target), *asked, planner=planner)
    for each in asked:
        if isinstance(each, gradbatch.Variance) and case.samples == 1:
            continue  # zero, or undefined: nothing to be relative to
        for name, gradients in expected.items():
            right = quantity(each, gradients, expected.values())
            what, terms = f"{each} of {name}", terms_of(each)
            assert_right(results[each][name], right, TOLERANCE[dtype], what, terms=terms)
