"""Strips of patches are the unfolded patches, cut by the first dimension of the window."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from gradbatch.factors import OuterProduct, Permuted, outer_product
from gradbatch.plans import keeping
from gradbatch.plans.contractions import Planner
from gradbatch.plans.windows import Patches, Window


@st.composite
def some_patches(draw: st.DrawFn) -> Patches:
    dimensions = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    window = Window(each(1, 3), each(1, 3), each(0, 2), each(1, 2))
    size, groups, rows = each(1, 6), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    channels = groups * draw(st.integers(1, 2))
    source = torch.randn(draw(st.integers(0, 2)) * rows, channels, *size, dtype=torch.float64)
    # Windows at the end may be left out, as output_padding of a transposed convolution does.
    used = tuple(draw(st.integers(0, fit)) for fit in window.positions(size))
    return Patches(source, window, groups, used, rows)


@given(patches=some_patches(), channels_last=st.booleans())
def test_strips_are_the_unfolded_patches(patches: Patches, channels_last: bool) -> None:
    places, *others = patches.window.kernel
    channels = patches.source.shape[1] // patches.groups
    expected = patches.unfold().unflatten(2, (channels, places, math.prod(others)))
    strips = list(patches.strips(channels_last))
    assert len(strips) == places == patches.strip_sizes()[0]
    for place, strip in enumerate(strips):
        wanted = expected[:, :, :, place]
        assert torch.equal(strip, (wanted.transpose(2, 3) if channels_last else wanted).flatten(2, 3))


@given(patches=some_patches(), channels_last=st.booleans())
def test_what_is_copied_is_counted(patches: Patches, channels_last: bool) -> None:
    unfolded = patches._unfolded_but_first(channels_last)
    assert unfolded.numel() == patches.shape[0] * patches.strip_sizes()[1]


def test_strips_overlap_in_one_tensor() -> None:
    patches = Patches(torch.randn(2, 8, 16, 16), Window((5, 5), (1, 1), (0, 0), (1, 1)), 1)
    for channels_last in (False, True):
        storages = {strip.untyped_storage().data_ptr() for strip in patches.strips(channels_last)}
        assert len(storages) == 1
    assert patches.strip_sizes()[1] == 8 * 5 * 16 * 12  # unfolded, they are 8 * 25 * 12 * 12


@pytest.mark.parametrize(
    ("kind", "channels", "outputs", "groups", "size", "kernel", "stride"),
    [
        ("strips_last", 1, 16, 1, 28, 5, 1),
        ("strips_last", 64, 64, 1, 16, 3, 1),
        ("strips", 64, 64, 32, 32, 3, 1),
        ("grouped", 64, 64, 64, 32, 3, 1),
        ("grouped", 256, 256, 32, 8, 3, 1),
        ("unfold", 3, 192, 1, 32, 4, 4),
        ("unfold", 64, 128, 1, 32, 1, 2),
    ],
)
def test_what_gradients_are_materialised_by(
    kind: str, channels: int, outputs: int, groups: int, size: int, kernel: int, stride: int
) -> None:
    window = Window((kernel, kernel), (stride, stride), (kernel // 2 if stride == 1 else 0,) * 2, (1, 1))
    patches = Patches(torch.zeros(1).expand(16, channels, size, size), window, groups)
    left = torch.zeros(1).expand(16, groups, outputs // groups, patches.shape[3])
    plan = Planner(force={"sum_of_squares": "dense"}).plan("sum_of_squares", left, patches)
    assert plan.kernel == kind
    # Of next to nothing, in the fewest calls.
    few = Patches(torch.zeros(1).expand(1, 2 * groups, kernel, kernel), window, groups)
    left = torch.zeros(1).expand(1, groups, 3, few.shape[3])
    plan = Planner(force={"sum_of_squares": "dense"}).plan("sum_of_squares", left, few)
    assert plan.kernel == "unfold"


@pytest.mark.parametrize("method", ["strips", "strips_last"])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_kept_in_strips_is_what_is_asked(
    monkeypatch: pytest.MonkeyPatch, groups: int, method: str
) -> None:
    torch.manual_seed(0)
    window = Window((3, 2), (2, 1), (1, 0), (1, 2))
    patches = Patches(torch.randn(5, 2 * groups, 6, 7, dtype=torch.float64), window, groups)
    left = torch.randn(5, groups, 3, patches.shape[3], dtype=torch.float64)
    grad = OuterProduct(left, patches, (3 * groups, 2, 3, 2))
    monkeypatch.setattr(outer_product, "pays_to_keep", lambda *_: True)
    planner = Planner(budget=600, force={"dense": method})
    kept, growth = grad.with_planner(planner).keep(("squared_norm", "weighted_sum"), 2**20)
    assert isinstance(kept, Permuted) and growth == keeping.growth(left, patches)
    expected = torch.einsum("ngpt,ngdt->ngpd", left, patches.unfold()).reshape(5, *grad.shape)
    weights = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(kept.dense(), expected)
    torch.testing.assert_close(kept.squared_norm(), expected.square().flatten(1).sum(1))
    torch.testing.assert_close(kept.weighted_sum(weights), torch.einsum("n,n...->...", weights, expected))
