"""One record more or less moves the clipped sum by at most the bound, whatever the record is.

What floating point adds is stated: rounding of the norm, the factor and the sum for ordinary gradients, and
``2 ** -10`` of the bound for gradients whose own terms cancel each other. What a record does to the *other* records'
gradients by a changed order of summation in the framework's kernels is rounding too, and not covered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import ClippedSum, privacy
from tests.privacy.models import distance, gradients
from tests.privacy.runs import seeded

N, WHO = 6, 3  # records, and the one that is added or removed
REST = torch.tensor([n for n in range(N) if n != WHO])
CLOSE, CANCELLING = 1e-5, 2**-10  # in float32, of the bound


class Sequences(nn.Module):
    """Layers at 16 positions of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 5, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(input)))


class Words(nn.Module):
    """A table that is looked up at 16 positions of a record, and is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.table(input), self.table.weight)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "sequences": (Sequences, lambda: torch.randn(N, 16, 8)),
    "words": (Words, lambda: torch.randint(9, (N, 16))),
    "images": (images, lambda: torch.randn(N, 2, 8, 8)),
}
STYLES: dict[str, dict[str, Any]] = {
    "flat": {"max_norm": 0.7},
    "layers": {"max_norm": 0.7, "per_layer": True},
    "groups": {"max_norm": {"*weight": 0.3, "*": 0.4}},
    "normalised": {"max_norm": 0.7, "style": "normalise"},
}


def with_and_without(
    model: nn.Module, x: Tensor, directions: Tensor, style: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Clipped sums of losses whose gradient with respect to the outputs is ``directions [N, ...]``."""
    patterns = [name for name, _ in model.named_parameters()]
    if isinstance(style["max_norm"], dict) and all(name.endswith("weight") for name in patterns):
        style = {"max_norm": {"*": 0.5}}
    sums = []
    for chosen in (torch.arange(N), REST):
        for _ in range(2):
            model.zero_grad()
            outputs = model(x[chosen])
            privacy.clipped_gradients(model, (outputs * directions[chosen]).flatten(1).sum(1), **style)
        sums.append({name: grad.double() for name, grad in gradients(model).items()})
    return sums[0], sums[1]


def moved(model: nn.Module, x: Tensor, directions: Tensor, style: dict[str, Any]) -> float:
    """How far the record moves the sum, in units of what it may."""
    both, rest = with_and_without(model, x, directions, style)
    assert all(grad.isfinite().all() for grad in both.values())
    return distance(both, rest) / ClippedSum(style["max_norm"]).sensitivity


def built(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, draw = MODELS[name]
    model, x = gradbatch.extend(make()), draw()
    with torch.no_grad():
        return model, x, torch.randn_like(model(x))


def like_another(x: Tensor, directions: Tensor, factor: float) -> None:
    x[WHO], directions[WHO] = x[0], factor * directions[0]


RECORDS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "ordinary": lambda x, directions: None,
    "a duplicate": lambda x, directions: like_another(x, directions, 1.0),
    "the opposite of another": lambda x, directions: like_another(x, directions, -1.0),
    "a duplicate, far larger": lambda x, directions: like_another(x, directions, 1e12),
    "without a gradient": lambda x, directions: directions[WHO].zero_(),
    **{
        f"times {scale:g}": lambda x, directions, scale=scale: directions[WHO].mul_(scale)
        for scale in (1e-38, 1e-20, 1e-3, 1e4, 1e15, 1e30, torch.inf, torch.nan)
    },
    "one element alone infinite": lambda x, directions: directions[WHO].flatten()[:1].fill_(torch.inf),
    "sizes of every order": lambda x, directions: directions[WHO].mul_(
        torch.logspace(-30, 15, directions[WHO].numel()).reshape(directions[WHO].shape)
    ),
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MODELS)
def test_no_record_moves_the_sum_by_more_than_the_bound(name: str, style: str, record: str) -> None:
    model, x, directions = built(name)
    RECORDS[record](x, directions)
    assert moved(model, x, directions, STYLES[style]) <= 1 + CLOSE


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e18, torch.inf, torch.nan])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["sequences", "images"])
def test_no_input_moves_the_sum_by_more_than_the_bound(name: str, style: str, scale: float) -> None:
    model, x, directions = built(name)
    x[WHO] *= scale
    assert moved(model, x, directions, STYLES[style]) <= 1 + CANCELLING


# ---------------------------------------------------------------- gradients whose terms cancel


def opposite_halves(directions: Tensor, order: Tensor) -> Tensor:
    """``[T, ...]``: what the second half of the positions has is the negative of the first."""
    half = len(directions) // 2
    return torch.cat([directions[:half], -directions[:half]])[order]


@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8, 1e12, 1e18])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["sequences", "words"])
def test_positions_that_cancel_each_other_move_no_sum_by_more(
    name: str, style: str, scale: float, rest: float
) -> None:
    """In real numbers the gradient is small, or zero; its terms are not."""
    model, x, directions = built(name)
    order = torch.randperm(16)
    x[WHO] = torch.cat([x[WHO, :8], x[WHO, :8]])[order]
    directions[WHO] = scale * (opposite_halves(directions[WHO], order) + rest * directions[WHO])
    assert moved(model, x, directions, STYLES[style]) <= 1 + CANCELLING


@pytest.mark.parametrize("positions", [2, 64, 512])
@pytest.mark.parametrize("width", [10, 128])
@pytest.mark.parametrize("scale", [1e2, 1e6, 1e12, 1e18])
def test_however_many_positions_cancel(positions: int, width: int, scale: float) -> None:
    model = gradbatch.extend(nn.Linear(width, width, bias=False))
    x, directions = torch.randn(N, positions, width), torch.randn(N, positions, width)
    order = torch.randperm(positions)
    x[WHO] = torch.cat([x[WHO, ::2], x[WHO, ::2]])[order]
    directions[WHO] = scale * opposite_halves(directions[WHO], order)
    assert moved(model, x, directions, STYLES["flat"]) <= 1 + CANCELLING


@pytest.mark.parametrize("value", [1e2, 1e4, 1e6, 1e8, 1e10])
@pytest.mark.parametrize("style", STYLES)
def test_an_image_of_one_bright_colour_moves_the_sum_by_no_more(style: str, value: float) -> None:
    """Behind a convolution, GroupNorm's gradients add up to zero over an image: times a constant they cancel."""
    model, x, directions = built("images")
    x[WHO] = value
    x[WHO, :, 0, 0] += value / 2
    assert moved(model, x, directions, STYLES[style]) <= 1 + CANCELLING


def test_a_record_whose_terms_cancel_leaves_the_others_as_they_are() -> None:
    """Added up one by one, terms of 1e18 would wipe out all that was in the sum before."""
    model = gradbatch.extend(nn.Linear(10, 10, bias=False))
    x, directions = torch.randn(N, 2, 10), torch.randn(N, 2, 10)
    x[WHO, 1] = x[WHO, 0]
    directions[WHO, 1] = -directions[WHO, 0]
    directions[WHO] *= 1e18
    both, rest = with_and_without(model, x, directions, {"max_norm": 1.0})
    torch.testing.assert_close(both, rest, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- what is released


@pytest.mark.parametrize(
    "options", [{}, {"per_layer": True}, {"adaptive": privacy.AdaptiveClipping(count_noise=2.0)}]
)
@pytest.mark.parametrize("part", [1, 4, 100])
@pytest.mark.parametrize("scale", [1e-3, 1e20, torch.nan])
def test_no_record_moves_a_step_by_more_than_the_bound(
    options: dict[str, Any], part: int, scale: float
) -> None:
    model, x, directions = built("sequences")
    directions[WHO] *= scale
    sums = []
    for chosen in (torch.arange(N), REST):
        loader = privacy.poisson_loader(range(len(chosen)), sample_rate=1.0, steps=1, generator=seeded())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        private = privacy.make_private(
            model, optimizer, loader, noise_multiplier=0.0, max_norm=0.7, **options
        )
        for batch in private.loader:
            for drawn in private.parts(batch, part):
                rows = chosen[drawn]
                private.backward((model(x[rows]) * directions[rows]).flatten(1).sum(1))
            optimizer.step()
        sums.append({n: g.double() * private.expected_batch_size for n, g in gradients(model).items()})
        private.close()
        optimizer.zero_grad()
    assert 0 < distance(*sums) <= 0.7 * (1 + CLOSE) or scale != scale
    assert distance(*sums) <= 0.7 * (1 + CLOSE)
