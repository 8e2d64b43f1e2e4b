"""The hand-written convolutions: first and second derivatives, per sample and summed."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from gradbatch import functional
from tests.convolution_cases import CONVOLUTIONS, LAYOUTS, TRANSPOSED, Case, convolutions, lay_out

# The framework says so of its own "same" padding, which is only the reference here.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

FUNCTIONS = {
    (1, False): functional.Conv1dFunction,
    (2, False): functional.Conv2dFunction,
    (3, False): functional.Conv3dFunction,
    (1, True): functional.ConvTranspose1dFunction,
    (2, True): functional.ConvTranspose2dFunction,
    (3, True): functional.ConvTranspose3dFunction,
}
FRIENDLY = {
    (1, False): functional.conv1d,
    (2, False): functional.conv2d,
    (3, False): functional.conv3d,
    (1, True): functional.conv_transpose1d,
    (2, True): functional.conv_transpose2d,
    (3, True): functional.conv_transpose3d,
}

# groups, input channels and output channels of a group
CHANNELS = {"one group": (1, 2, 2), "two groups": (2, 2, 1), "depthwise": (3, 1, 1), "multiplier": (2, 1, 2)}


def run(case: Case, module: nn.Module | None, *tensors: Tensor | None) -> Tensor:
    return FUNCTIONS[case.dimensions, case.transposed].apply(*tensors, *case.arguments(), module)


def leaves(case: Case) -> list[Tensor | None]:
    tensors = case.tensors(torch.device("cpu"))
    return [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]


def given_only(tensors: list[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def test_the_question_two_groups_three_by_three_kernel_four_by_four_input_one_sample() -> None:
    input, weight, bias = double(1, 4, 4, 4), double(6, 2, 3, 3), double(6)
    layer = nn.Module()
    for padding in (0, 1):
        arguments = (1, padding, 1, 2, layer)
        assert gradcheck(
            lambda *x, a=arguments: functional.Conv2dFunction.apply(*x, *a), (input, weight, bias)
        )
        assert gradgradcheck(
            lambda *x, a=arguments: functional.Conv2dFunction.apply(*x, *a), (input, weight, bias)
        )
        weight.grad = None
        functional.Conv2dFunction.apply(input, weight, bias, *arguments).square().sum().backward()
        assert layer.grad_batch["weight"].shape == (1, 6, 2, 3, 3)
        torch.testing.assert_close(layer.grad_batch["weight"][0], weight.grad)


def matrix() -> Iterator[Any]:
    """Every combination of dimension, channels, padding, stride, dilation and bias; sizes that leave a remainder."""
    for n, (name, channels) in itertools.product((1, 2, 3), CHANNELS.items()):
        paddings = (1, tuple(range(n)), "same", "valid")
        for padding, stride, dilation, bias in itertools.product(paddings, (1, 2), (1, 2), (False, True)):
            if padding == "same" and stride > 1:
                continue
            kernel = (2, 3, 1)[:n]  # an even side: its "same" padding differs between front and back
            sizes = tuple(d + 4 + i % 2 for i, d in enumerate((dilation,) * n)) if n < 3 else (4, 5, 2)
            geometry = (
                sizes,
                kernel,
                (stride,) * n,
                padding,
                (dilation,) * n,
                (0,) * n,
                bias,
                "contiguous",
                0,
            )
            yield pytest.param(
                Case(n, False, 2, *channels, *geometry),
                id=f"{n}d {name} {padding} s{stride} d{dilation} b{bias:d}",
            )
        for stride, padding, dilation, extra in itertools.product((1, 2), (0, 1), (1, 2), (0, 1)):
            if extra < max(stride, dilation):
                sizes, kernel = (3, 2, 2)[:n], (2, 3, 2)[:n]
                geometry = (sizes, kernel, (stride,) * n, (padding,) * n, (dilation,) * n, (extra,) * n, True)
                yield pytest.param(
                    Case(n, True, 2, *channels, *geometry, "contiguous", 0),
                    id=f"transposed {n}d {name} p{padding} s{stride} d{dilation} o{extra}",
                )


@pytest.mark.parametrize("case", list(matrix()))
def test_first_and_second_derivatives_are_those_of_finite_differences(case: Case) -> None:
    tensors = leaves(case)

    def function(*given: Tensor) -> Tensor:
        return run(case, None, *given, *[None] * (3 - len(given)))

    assert gradcheck(function, given_only(tensors), fast_mode=True)
    assert gradgradcheck(function, given_only(tensors), fast_mode=True)


@given(convolutions())
def test_outputs_and_gradients_are_the_frameworks_and_those_of_a_sample_are_vmaps(case: Case) -> None:
    tensors = leaves(case)
    expected = case.reference(*tensors)
    layer = nn.Module()
    actual = run(case, layer, *tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    # A gradient that is not contiguous, as the layers above would give it.
    grad_output = lay_out(torch.randn_like(expected), LAYOUTS[case.seed % len(LAYOUTS)])
    wanted = given_only(tensors)
    close = {"rtol": 1e-10, "atol": 1e-10}
    for ours, theirs in zip(
        torch.autograd.grad(actual, wanted, grad_output),
        torch.autograd.grad(expected, wanted, grad_output),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **close)

    def loss(parameters: list[Tensor], input: Tensor, grad: Tensor) -> Tensor:
        return (case.reference(input[None], *parameters, *[None] * (2 - len(parameters)))[0] * grad).sum()

    input, *parameters = (tensor.detach() for tensor in wanted)
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, input, grad_output)
    assert list(layer.grad_batch) == ["weight", "bias"][: len(parameters)]
    for ours, theirs in zip(layer.grad_batch.values(), per_sample, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@given(convolutions())
def test_the_friendly_functions_under_vmap_of_grad_agree_with_the_framework(case: Case) -> None:
    input, weight, bias = case.tensors(torch.device("cpu"))
    friendly = FRIENDLY[case.dimensions, case.transposed]

    def per_sample(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def loss(weight: Tensor, one: Tensor) -> Tensor:
            return function(one, weight, bias, *case.arguments()).square().sum()

        return torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(weight, input)

    reference = (TRANSPOSED if case.transposed else CONVOLUTIONS)[case.dimensions]
    for ours, theirs in zip(per_sample(friendly), per_sample(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("transposed", [False, True])
def test_strided_activations_and_gradients_on_any_device(
    memory_format: torch.memory_format, transposed: bool, device: torch.device
) -> None:
    input = (
        torch.randn(3, 4, 6, 5, dtype=torch.double).to(device, memory_format=memory_format).requires_grad_()
    )
    weight = torch.randn(4, 2, 3, 3, dtype=torch.double).to(device).requires_grad_()
    grads = []
    for convolve in (FRIENDLY[2, transposed], (TRANSPOSED if transposed else CONVOLUTIONS)[2]):
        output = convolve(input.transpose(2, 3), weight, padding=1, groups=2)
        output.flatten(2).transpose(1, 2).cumsum(1).square().mean().backward()
        grads.append((input.grad, weight.grad))
        input.grad = weight.grad = None
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_one_sample_without_a_sample_axis_is_a_batch_of_one(dimensions: int, transposed: bool) -> None:
    input, weight, bias = double(4, *[5] * dimensions), double(4, 2, *[2] * dimensions), double(4)
    layer = nn.Module()
    output = FRIENDLY[dimensions, transposed](input, weight, bias, groups=2, module=layer)
    expected = (TRANSPOSED if transposed else CONVOLUTIONS)[dimensions](input, weight, bias, groups=2)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(
        torch.autograd.grad(output.square().sum(), (input, weight, bias)),
        torch.autograd.grad(expected.square().sum(), (input, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    assert layer.grad_batch["weight"].shape == (1, *weight.shape)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_empty_batch_gives_no_samples_and_zero_gradients(transposed: bool) -> None:
    weight, bias, layer = double(4, 2, 3, 3), double(4), nn.Module()
    FRIENDLY[2, transposed](double(0, 4, 6, 6), weight, bias, groups=2, module=layer).sum().backward()
    assert layer.grad_batch["weight"].shape == (0, 4, 2, 3, 3) and layer.grad_batch["bias"].shape == (0, 4)
    assert not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_only_what_is_needed_is_computed_and_left_on_the_module(
    wanted: tuple[bool, ...], transposed: bool
) -> None:
    tensors = [tensor.detach() for tensor in (double(2, 4, 6, 6), double(4, 2, 3, 3), double(4))]
    for tensor, needed in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(needed)
    layer = nn.Module()
    output = FRIENDLY[2, transposed](*tensors, groups=2, module=layer)
    assert output.requires_grad == any(wanted) and not hasattr(layer, "grad_batch")
    if any(wanted):
        output.sum().backward()
        assert set(layer.grad_batch) == {
            name for name, need in zip(("weight", "bias"), wanted[1:], strict=True) if need
        }
    assert [tensor.grad is not None for tensor in tensors] == list(wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_each_backward_overwrites_what_the_last_one_left_and_leaves_no_state(transposed: bool) -> None:
    input, weight, layer = double(2, 4, 6, 6), double(4, 2, 3, 3), nn.Conv2d(1, 1, 1)
    keys = set(layer.state_dict())
    output = FRIENDLY[2, transposed](input, weight, groups=2, module=layer)
    output.sum().backward(retain_graph=True)
    first = layer.grad_batch["weight"]
    (3 * output).sum().backward()
    torch.testing.assert_close(layer.grad_batch["weight"], 3 * first)
    assert set(layer.state_dict()) == keys


@pytest.mark.parametrize("transposed", [False, True])
def test_a_double_backward_leaves_the_first_ones_gradients_or_none_but_never_a_part(transposed: bool) -> None:
    input, weight, layer = double(2, 4, 6, 6), double(4, 2, 3, 3), nn.Module()
    output = FRIENDLY[2, transposed](input, weight, groups=2, module=layer)
    (grad,) = torch.autograd.grad(output.square().sum(), weight, create_graph=True)
    left = layer.grad_batch["weight"]
    assert grad.requires_grad and not left.requires_grad
    torch.testing.assert_close(left.sum(0), grad.detach())
    grad.square().sum().backward(retain_graph=True)
    assert layer.grad_batch == {}, "the square of the output brings the second derivative through here again"

    output = FRIENDLY[2, transposed](input, weight, groups=2, module=layer)
    (grad,) = torch.autograd.grad(output.sum(), input, create_graph=True)
    penalised = output.square().sum() + grad.square().sum()
    penalised.backward()
    assert layer.grad_batch == {}, "a penalty reaches the weight by another way too"


def test_gradients_of_samples_are_not_divided_by_their_number() -> None:
    input, weight, layer = double(4, 2, 5, 5), double(2, 1, 3, 3), nn.Module()
    losses = functional.conv2d(input, weight, groups=2, module=layer).square().flatten(1).sum(1)
    losses.sum().backward()
    for sample in range(4):
        own = F.conv2d(input[sample : sample + 1], weight, groups=2).square().sum()
        torch.testing.assert_close(layer.grad_batch["weight"][sample], torch.autograd.grad(own, weight)[0])


@pytest.mark.parametrize("transposed", [False, True])
def test_lower_precisions_are_accumulated_in_float32(transposed: bool, device: torch.device) -> None:
    input, weight, bias = (
        tensor.detach().to(device, torch.bfloat16).requires_grad_()
        for tensor in (double(2, 4, 16, 16), double(4, 2, 3, 3), double(4))
    )
    layer = nn.Module()
    output = FRIENDLY[2, transposed](input, weight, bias, groups=2, module=layer)
    output.sum().backward()
    assert output.dtype == input.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.bfloat16
    assert {grad.dtype for grad in layer.grad_batch.values()} == {torch.float32}
    exact = [tensor.detach().double().requires_grad_() for tensor in (input, weight, bias)]
    (TRANSPOSED if transposed else CONVOLUTIONS)[2](*exact, groups=2).sum().backward()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.testing.assert_close(
            layer.grad_batch["weight"].sum(0).double(), exact[1].grad, rtol=1e-5, atol=1e-3
        )


def test_autocast_runs_the_forward_in_half_precision_and_keeps_the_gradients_dtypes() -> None:
    input, weight, bias = (
        tensor.detach().float().requires_grad_()
        for tensor in (double(2, 4, 6, 6), double(4, 2, 3, 3), double(4))
    )
    layer = nn.Module()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = functional.conv2d(input, weight, bias, groups=2, module=layer)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert input.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    torch.testing.assert_close(layer.grad_batch["weight"].sum(0), weight.grad)


def test_a_training_step_in_another_thread_leaves_its_gradients_too() -> None:
    weight, layer = double(2, 1, 3), nn.Module()
    output = functional.conv1d(double(3, 2, 6), weight, groups=2, module=layer)
    thread = threading.Thread(target=output.sum().backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(layer.grad_batch["weight"].sum(0), weight.grad)
