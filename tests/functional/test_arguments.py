"""What the convolutions take, as the framework does, and what they refuse, saying why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradbatch import functional
from gradbatch.errors import UsageError


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "groups that do not divide": (
        lambda: functional.conv2d(ones(1, 4, 5, 5), ones(6, 2, 3, 3), groups=4),
        r"weight \[6, 2, 3, 3\], groups = 4: groups has to be a positive divisor of weight.shape\[0\] = 6",
    ),
    "groups that are none": (
        lambda: functional.conv1d(ones(1, 4, 5), ones(6, 4, 3), groups=0),
        "positive divisor",
    ),
    "too many channels": (
        lambda: functional.conv2d(ones(1, 8, 5, 5), ones(6, 2, 3, 3), groups=2),
        r"input has 8 channels, the weight reads groups \* weight.shape\[1\] = 2 \* 2 = 4. Pass groups = ",
    ),
    "too many transposed": (
        lambda: functional.conv_transpose2d(ones(8, 5, 5), ones(6, 2, 3, 3), groups=2),
        r"8 channels, the weight reads weight.shape\[0\] = 6",
    ),
    "a bias of another size": (
        lambda: functional.conv1d(ones(1, 4, 5), ones(6, 4, 3), ones(5)),
        r"bias has shape \[5\], the output needs \[6\]",
    ),
    "a transposed bias": (
        lambda: functional.conv_transpose1d(ones(1, 4, 5), ones(4, 3, 3), ones(3), groups=2),
        r"bias has shape \[3\], the output needs \[6\]",
    ),
    "another dimension": (
        lambda: functional.conv1d(ones(1, 4, 5, 5), ones(6, 4, 3, 3)),
        r"input \[1, 4, 5, 5\], weight \[6, 4, 3, 3\].*with 1 spatial dimension\.",
    ),
    "an input of another rank": (
        lambda: functional.conv3d(ones(4, 5), ones(6, 4, 3, 3, 3)),
        "3 spatial dimensions",
    ),
    "same with a stride": (
        lambda: functional.conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), stride=(1, 2), padding="same"),
        r"'same' with stride = \(1, 2\).*Pass the padding as numbers",
    ),
    "an unknown padding": (
        lambda: functional.conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), padding="full"),
        "'full'; pass 'same', 'valid', an integer or 2 of them",
    ),
    "a transposed padding by name": (
        lambda: functional.conv_transpose1d(ones(1, 1, 5), ones(1, 1, 3), padding="same"),  # type: ignore[arg-type]
        "'same', but a transposed convolution pads by numbers",
    ),
    "too many sides": (
        lambda: functional.conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), padding=(1, 1, 1)),
        r"padding = \(1, 1, 1\), but it has to be one integer or 2 of them",
    ),
    "no stride": (
        lambda: functional.conv1d(ones(1, 1, 5), ones(1, 1, 3), stride=0),
        "stride = 0.*at least 1",
    ),
    "a negative padding": (lambda: functional.conv1d(ones(1, 1, 5), ones(1, 1, 3), padding=-1), "at least 0"),
    "a kernel that does not fit": (
        lambda: functional.conv1d(ones(1, 1, 4), ones(1, 1, 3), dilation=2),
        r"no window fits: weight \[1, 1, 3\] with dilation \(2,\) spans \(5,\) elements.*\(4,\)",
    ),
    "too much output padding": (
        lambda: functional.conv_transpose1d(ones(1, 1, 5), ones(1, 1, 3), stride=2, output_padding=2),
        r"output_padding = \(2,\) has to be smaller than the stride",
    ),
    "an empty transposed output": (
        lambda: functional.conv_transpose1d(ones(1, 1, 1), ones(1, 1, 1), padding=1),
        r"output of size \(-1,\)",
    ),
    "complex numbers": (lambda: functional.conv1d(ones(1, 1, 5) * 1j, ones(1, 1, 3)), "pass real tensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_with_shapes_and_a_way_out(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("padding", ["valid", 0, (0,), [1, 0], (1, 1)])
@pytest.mark.parametrize("stride", [1, (2,), [2, 1]])
def test_sides_may_be_given_as_the_framework_takes_them(padding: Any, stride: Any) -> None:
    input, weight = ones(1, 2, 5, 5), ones(2, 1, 3, 3)
    ours = functional.conv2d(input, weight, None, stride, padding, groups=2)
    assert torch.equal(ours, F.conv2d(input, weight, None, stride, padding, groups=2))
