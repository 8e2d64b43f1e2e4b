"""Windows, patches, and every way to correlate with them, against plain loops and the framework's own convolutions."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradbatch.errors import UsageError
from gradbatch.plans.convolutions import (
    CORRELATE_METHODS,
    SUM_METHODS,
    Patches,
    Window,
    correlate,
    correlate_sum,
    fold,
    same_padding,
    unfold,
)
from tests.convolution_cases import LAYOUTS, lay_out

WINDOW = Window((3, 2), (2, 1), (1, 0), (1, 2))
SIZE = (6, 7)


def loops(source: Tensor, window: Window, groups: int, positions: tuple[int, ...]) -> Tensor:
    """Read every element of every patch on its own, ``[R, G, D, T]``; what lies outside of the source is 0."""
    rows, channels, *size = source.shape
    patches = source.new_zeros(rows, channels, math.prod(window.kernel), math.prod(positions))
    for t, position in enumerate(itertools.product(*map(range, positions))):
        for k, offset in enumerate(itertools.product(*map(range, window.kernel))):
            place = zip(position, offset, window.stride, window.padding, window.dilation, strict=True)
            at = [p * step + o * dilation - pad for p, o, step, pad, dilation in place]
            if all(0 <= i < length for i, length in zip(at, size, strict=True)):
                patches[:, :, k, t] = source[(..., *at)]
    return patches.reshape(rows, groups, channels // groups * math.prod(window.kernel), math.prod(positions))


@st.composite
def patched(draw: st.DrawFn) -> tuple[Patches, int]:
    """Patches of 0 to 3 samples in 1 to 3 dimensions, and a number of outputs; some with too little room to fit."""
    n = draw(st.integers(1, 3))
    window = Window(
        *(tuple(draw(st.integers(*bounds)) for _ in range(n)) for bounds in ((1, 3), (1, 3), (0, 2), (1, 2)))
    )
    size = tuple(draw(st.integers(1, 7)) for _ in range(n))
    positions = tuple(max(0, most - draw(st.integers(0, 1))) for most in window.positions(size))
    groups, channels, rows = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shape = (draw(st.integers(0, 3)) * rows, groups * channels, *size)
    source = lay_out(
        torch.randn(shape, generator=generator, dtype=torch.double), draw(st.sampled_from(LAYOUTS))
    )
    return Patches(source, window, groups, positions, rows), draw(st.integers(1, 2))


def left_of(patches: Patches, outputs: int) -> Tensor:
    samples, groups, _, positions = patches.shape
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(positions, outputs, groups, samples, generator=generator, dtype=torch.double)
    return left.permute(3, 2, 1, 0).to(patches.source)


@given(patched())
def test_unfold_reads_what_plain_loops_read(drawn: tuple[Patches, int]) -> None:
    patches, _ = drawn
    window, positions = patches.window, patches.positions
    expected = loops(patches.source, window, patches.groups, positions)
    assert torch.equal(unfold(patches.source, window, patches.groups, positions), expected)
    samples, groups, inputs, total = patches.shape
    by_sample = expected.reshape(samples, patches.rows, groups, inputs, math.prod(positions))
    assert torch.equal(
        patches.unfold(), by_sample.permute(0, 2, 3, 1, 4).reshape(samples, groups, inputs, total)
    )


@given(patched())
def test_fold_is_the_adjoint_of_unfold(drawn: tuple[Patches, int]) -> None:
    patches, _ = drawn
    source, window, positions = patches.source, patches.window, patches.positions
    unfolded = unfold(source, window, patches.groups, positions)
    weights = torch.randn_like(unfolded)
    folded = fold(weights, window, source.shape[2:], positions)
    assert folded.shape == source.shape
    torch.testing.assert_close((folded * source).sum(), (weights * unfolded).sum())


@given(patched())
def test_every_method_correlates_alike_whatever_the_window_and_the_layout(drawn: tuple[Patches, int]) -> None:
    patches, outputs = drawn
    left = left_of(patches, outputs)
    expected = torch.einsum("ngpt,ngdt->ngpd", left, patches.unfold())
    for method in CORRELATE_METHODS:
        torch.testing.assert_close(
            correlate(left, patches, method), expected, rtol=1e-10, atol=1e-12, msg=method
        )
    for method in SUM_METHODS:
        actual = correlate_sum(left, patches, method)
        torch.testing.assert_close(actual, expected.sum(0), rtol=1e-10, atol=1e-12, msg=method)


@pytest.mark.parametrize("method", CORRELATE_METHODS)
def test_the_correlation_is_the_weight_gradient_of_the_convolution(method: str, device: torch.device) -> None:
    input = torch.randn(3, 4, *SIZE, dtype=torch.double).to(device)
    weight = torch.randn(6, 2, *WINDOW.kernel, dtype=torch.double).to(device).requires_grad_()
    output = F.conv2d(input, weight, None, WINDOW.stride, WINDOW.padding, WINDOW.dilation, groups=2)
    grad_output = torch.randn_like(output)
    actual = correlate(grad_output.reshape(3, 2, 3, -1), Patches(input, WINDOW, 2), method)
    for sample in range(3):
        (one,) = torch.autograd.grad(output[sample], weight, grad_output[sample], retain_graph=True)
        torch.testing.assert_close(actual[sample].reshape(weight.shape), one)


@pytest.mark.parametrize("method", CORRELATE_METHODS)
@pytest.mark.parametrize(
    "window", [Window((1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4), Window((2,), (3,), (0,), (2,))]
)
def test_four_dimensions_and_one_position(method: str, window: Window) -> None:
    patches = Patches(torch.randn(2, 2, *[3] * len(window.kernel), dtype=torch.double), window, 2)
    left = left_of(patches, 3)
    expected = torch.einsum("ngpt,ngdt->ngpd", left, loops(patches.source, window, 2, patches.positions))
    torch.testing.assert_close(correlate(left, patches, method), expected)


@pytest.mark.parametrize("method", CORRELATE_METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precisions_and_mixtures_of_them(method: str, dtype: torch.dtype, device: torch.device) -> None:
    exact = Patches(torch.randn(3, 4, *SIZE, dtype=torch.double).to(device, dtype).double(), WINDOW, 2)
    left = left_of(exact, 2).to(dtype)
    expected = torch.einsum("ngpt,ngdt->ngpd", left.double(), exact.unfold())
    tolerance = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps * float(expected.abs().max())}
    # Convolutions on CUDA round float32 to TF32 first, unless told otherwise.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        actual = correlate(left, exact.to(dtype), method)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, **tolerance)
        mixed = correlate(left, exact, method)
        assert mixed.dtype == torch.double
        torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("method", CORRELATE_METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_with_its_sample_and_its_group(
    method: str, value: float, device: torch.device
) -> None:
    patches = Patches(torch.randn(3, 4, *SIZE, dtype=torch.double).to(device), WINDOW, 2)
    left = left_of(patches, 2)
    clean = correlate(left, patches, method)
    patches.source[1, :2] = value
    actual = correlate(left, patches, method)
    assert not actual[1, 0].isfinite().any()
    assert actual[1, 1].equal(clean[1, 1]) and actual[::2].equal(clean[::2])


@given(patched(), st.data())
def test_patches_are_selected_and_regrouped_by_sample(
    drawn: tuple[Patches, int], data: st.DataObject
) -> None:
    patches, _ = drawn
    samples, groups, inputs, total = patches.shape
    unfolded = patches.unfold()
    index = torch.tensor(
        data.draw(st.lists(st.integers(0, samples - 1), max_size=4)) if samples else [], dtype=torch.long
    )
    assert torch.equal(patches.select(index).unfold(), unfolded[index])
    mask = torch.arange(samples) % 2 == 0
    assert torch.equal(patches.select(mask).unfold(), unfolded[mask])
    k = data.draw(st.sampled_from([k for k in range(1, samples + 1) if samples % k == 0] or [1]))
    regrouped = patches.regroup(k)
    assert regrouped.shape == (samples // k, groups, inputs, k * total)
    together = unfolded.reshape(samples // k, k, groups, inputs, total).permute(0, 2, 3, 1, 4)
    assert torch.equal(regrouped.unfold(), together.reshape(regrouped.shape))


def test_unfold_and_fold_are_twice_differentiable() -> None:
    source = torch.randn(2, 4, *SIZE, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unfold(x, WINDOW, 2).square(), source, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: unfold(x, WINDOW, 2).square(), source, fast_mode=True)
    patches = unfold(source, WINDOW, 2).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fold(x, WINDOW, SIZE).square(), patches, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: fold(x, WINDOW, SIZE).square(), patches, fast_mode=True)


@pytest.mark.parametrize("size", [(1, 1), (2, 6), (9, 9)])
def test_positions_are_those_of_the_output_of_the_convolution(size: tuple[int, int]) -> None:
    if 0 in WINDOW.positions(size):
        with pytest.raises(RuntimeError, match="Kernel size"):
            F.conv2d(torch.ones(1, 1, *size), torch.ones(1, 1, 3, 2), None, (2, 1), (1, 0), (1, 2))
    else:
        output = F.conv2d(torch.ones(1, 1, *size), torch.ones(1, 1, 3, 2), None, (2, 1), (1, 0), (1, 2))
        assert WINDOW.positions(size) == output.shape[2:]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_same_padding_is_the_frameworks(kernel: int, dilation: int) -> None:
    input, weight = torch.randn(1, 1, 9, dtype=torch.double), torch.randn(1, 1, kernel, dtype=torch.double)
    (before,), (after,) = same_padding((kernel,), (dilation,))
    padded = F.conv1d(F.pad(input, (before, after)), weight, dilation=dilation)
    torch.testing.assert_close(padded, F.conv1d(input, weight, padding="same", dilation=dilation))


class LargestTensor(TorchDispatchMode):
    """Sees every operation below autograd and vmap, and remembers the most elements any of their results has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, list | tuple) else [results]:
            if isinstance(result, Tensor):
                # A view of few elements, expanded, costs nothing; its storage is what counts.
                self.numel = max(
                    self.numel, result.untyped_storage().nbytes() // max(1, result.element_size())
                )
        return results


@pytest.mark.parametrize("outputs", [1, 2], ids=["depthwise", "multiplier"])
@pytest.mark.parametrize("method", [*CORRELATE_METHODS, *(f"sum {method}" for method in SUM_METHODS)])
def test_no_method_forms_a_product_of_one_group_with_another(method: str, outputs: int) -> None:
    samples, groups, size = 4, 64, 6
    window = Window((3, 3), (1, 1), (1, 1), (1, 1))
    patches = Patches(torch.randn(samples, groups, size, size), window, groups)
    left = left_of(patches, outputs)
    function = correlate_sum if method.startswith("sum") else correlate
    with LargestTensor() as largest:
        function(left, patches, method.removeprefix("sum "))
    needed = max(patches.shape.numel(), left.numel(), samples * groups * outputs * 9)
    assert 0 < largest.numel <= needed < samples * (groups * outputs) * groups * 9


def test_what_cannot_be_is_refused_with_the_choices_and_the_shapes() -> None:
    patches = Patches(torch.randn(2, 4, *SIZE), WINDOW, 2)
    with pytest.raises(UsageError, match=r"'fastest'.*unfold, grouped, vmap, loop"):
        correlate(left_of(patches, 1), patches, "fastest")
    with pytest.raises(UsageError, match=r"'loop'.*native, unfold"):
        correlate_sum(left_of(patches, 1), patches, "loop")
    for source, groups, rows in [((2, 4, 6), 2, 1), ((2, 4, 6, 7), 3, 1), ((3, 4, 6, 7), 2, 2)]:
        with pytest.raises(UsageError, match=r"source \[") as refusal:
            Patches(torch.randn(source), WINDOW, groups, rows=rows)
        assert str(list(source)) in str(refusal.value)
