"""What arrives where the probe saw nothing: a few elements by chance are kept, more are somebody else's."""

from __future__ import annotations

import pytest
import torch

from gradbatch.capture.strays import Place
from gradbatch.errors import CoupledSamples
from gradbatch.rules import SampleLayout

ROWS = SampleLayout(16, 0, 1)


def arrive(count: int, owners: object = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """A gradient ``[16, 64]`` of ones, ``count`` of whose elements were zero when they were measured."""
    unseen = torch.zeros(16 * 64, dtype=torch.bool)
    unseen[:: 16 * 64 // max(count, 1)][:count] = True
    place = Place("layer", 16, unseen.view(16, 64), owners, None)
    return place.without_strays(torch.ones(16, 64, dtype=dtype), [])


@pytest.mark.parametrize(("dtype", "chance"), [(torch.float32, 8), (torch.float16, 12), (torch.bfloat16, 40)])
def test_as_many_as_rounding_makes_are_kept_and_no_more(dtype: torch.dtype, chance: int) -> None:
    assert torch.equal(arrive(chance, dtype=dtype), torch.ones(16, 64, dtype=dtype))
    with pytest.raises(CoupledSamples, match="arrived where none does"):
        arrive(chance + 1, dtype=dtype)


def test_where_samples_lie_irregularly_none_is() -> None:
    with pytest.raises(CoupledSamples, match="arrived where none does"):
        arrive(1, owners=None)
