"""The block map says how far two tensors are apart and shows where, whatever it is given."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from gradbatch.blockmap import block_map


def gradients(*shape: int, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def section(text: str, title: str) -> list[str]:
    """Lines of the map under ``title``, with the labels that stand in front of the marks."""
    sections = text.split("\n\n")
    (found,) = [lines for lines in sections if lines.splitlines()[0].strip().startswith(title)]
    return found.splitlines()[1:]


def test_tensors_that_agree_are_one_sentence() -> None:
    expected = gradients(3, 4, 2, 3, 3)
    text = block_map(expected * (1 + 1e-14), expected, groups=2)
    assert text.startswith("All 216 elements agree within 1e-10") and "\n" not in text


def test_a_wrong_group_of_one_sample_is_named_and_drawn() -> None:
    expected = gradients(4, 6, 2, 3, 3)
    actual = expected.clone()
    actual[2, 4, 1, 0, 2] += 1
    text = block_map(actual, expected, groups=2)
    assert text.startswith(
        "1 of 432 elements differ by more than 1e-10, in 1 of 4 samples and 1 of 2 groups."
    )
    assert (
        f"sample 2 at [4, 1, 0, 2]: {actual[2, 4, 1, 0, 2]:.6g}, expected {expected[2, 4, 1, 0, 2]:.6g}."
        in text
    )
    sample, agreeing = section(text, "samples x groups")
    assert sample.split()[:3] == ["2", ".", "x"] and agreeing == "and 3 samples that agree"
    rows = [line.split()[-2:] for line in section(text, "sample 2: output channels x input channels")]
    assert rows == [["0", ".."], ["1", ".."], ["2", ".."], ["3", ".."], ["4", ".x"], ["5", ".."]]
    assert [line.strip() for line in section(text, "sample 2: kernel")] == ["..x", "...", "..."]


def test_a_block_that_differs_everywhere_is_told_from_one_that_differs_in_part() -> None:
    expected = gradients(2, 4, 3, 2)
    actual = expected.clone()
    actual[:, :2] *= 2
    actual[:, 2, 0] *= 2
    lines = section(block_map(actual, expected, groups=2), "samples x groups")
    assert [line.split()[1] for line in lines] == ["#", "#"] and [line.split()[3] for line in lines] == [
        "x",
        "x",
    ]


def test_the_largest_error_of_a_block_is_relative_to_its_own_sample() -> None:
    expected = torch.ones(2, 4, 1, dtype=torch.double)
    expected[1] *= 1e-3
    actual = expected.clone()
    actual[1, 3] *= 1.25
    assert "# 2e-01" in section(block_map(actual, expected, groups=4), "samples x groups")[0]


def test_rounding_in_a_sample_without_a_gradient_is_no_error() -> None:
    expected = gradients(3, 5)
    expected[1] = 0
    actual = expected.clone()
    actual[1] = 1e-17
    assert block_map(actual, expected).startswith("All 15 elements agree")
    assert "5 of 5 elements differ" in block_map(torch.ones(1, 5), torch.zeros(1, 5))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.double, 1e-10), (torch.float, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_the_tolerance_is_the_promise_of_the_dtype_unless_given(dtype: torch.dtype, tolerance: float) -> None:
    expected = torch.ones(2, 3, dtype=torch.double)
    actual = expected * (1 + 3 * tolerance)
    assert "differ" in block_map(actual, expected.to(dtype))
    assert "agree" in block_map(expected * (1 + tolerance / 3), expected.to(dtype))
    assert "agree" in block_map(actual, expected.to(dtype), tolerance=4 * tolerance)


def test_many_samples_and_groups_are_elided_and_what_is_left_out_is_counted() -> None:
    expected = torch.ones(500, 128, 1, 3, 3)
    actual = expected.clone()
    actual[100:200, 7] += torch.arange(1, 101).reshape(-1, 1, 1, 1)
    text = block_map(actual, expected, groups=128)
    lines = section(text, "samples x groups")
    assert [line.split()[0] for line in lines[:12]] == [str(sample) for sample in range(188, 200)]
    assert lines[12:] == ["and 88 more samples that differ less", "and 400 samples that agree"]
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) < 120
    channels = section(text, "sample 199: output channels")
    assert "group 7 " in "".join(channels) and channels[-1].endswith("more groups, 0 of which differ")


def test_summed_gradients_have_no_samples() -> None:
    expected = gradients(4, 2, 3)
    actual = expected.clone()
    actual[0, 0, 1:] += 1
    text = block_map(actual, expected, groups=2, per_sample=False)
    assert "sample" not in text and "in 1 of 2 groups" in text
    assert section(text, "output channels")[0].split() == ["group", "0", "0", "x."]


def test_biases_are_drawn_as_one_line_a_group() -> None:
    expected = gradients(3, 8)
    actual = expected.clone()
    actual[0, 5] += 1
    assert [line.split()[-1] for line in section(block_map(actual, expected, groups=2), "sample 0")] == [
        "....",
        ".#..",
    ]
    assert section(block_map(actual, expected), "sample 0")[0].strip() == ".....#.."


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_agrees_with_itself_only(value: float) -> None:
    expected = gradients(3, 4, 2)
    actual = expected.clone()
    actual[1, 2, 0] = value
    text = block_map(actual, expected)
    assert text.startswith("1 of 24 elements") and "Largest relative error inf, sample 1 at [2, 0]" in text
    assert "1 of 24 elements" in block_map(expected, actual)
    assert "agree" in block_map(actual, actual.clone())


def test_different_shapes_and_impossible_groups_are_said_and_not_raised() -> None:
    assert block_map(torch.ones(2, 3), torch.ones(3)) == "Shapes differ: actual [2, 3], expected [3]."
    assert "The 2 groups do not split [3]; drawn as one." in block_map(
        torch.ones(2, 3), torch.zeros(2, 3), groups=2
    )


@given(
    st.lists(st.integers(0, 4), min_size=0, max_size=5),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 2**16),
)
def test_it_never_fails_and_counts_right(shape: list[int], per_sample: bool, groups: int, seed: int) -> None:
    if per_sample and not shape:
        shape = [1]
    generator = torch.Generator().manual_seed(seed)
    expected = torch.rand(shape, generator=generator) + 1
    wrong = torch.rand(shape, generator=generator) < 0.3
    text = block_map(torch.where(wrong, -expected, expected), expected, groups, per_sample=per_sample)
    count = int(wrong.sum())
    assert text.startswith(
        f"{count} of {wrong.numel()} elements differ" if count else f"All {wrong.numel()} elements"
    )
