"""Records that an audit plants, a model in which each has a place of its own, and what a private run lets out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradbatch import privacy
from tests.privacy.runs import seeded


class Places(nn.Module):
    """Two tables. A record's gradient is two numbers, in its place in each, whatever the weights are."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(places, 1), nn.Embedding(places, 1)

    def forward(self, place: Tensor, sizes: Tensor) -> Tensor:
        """``[N]``, ``[N, 2]`` to one loss a record, ``[N]``."""
        return sizes[:, 0] * self.first(place)[:, 0] + sizes[:, 1] * self.second(place)[:, 0]


@dataclass(frozen=True)
class Records:
    """A data set.

    Args:
        places: how many there are.
        place: that of each record, ``[n]``.
        sizes: of each record's gradient in the first and the second table, ``[n, 2]``.
    """

    places: int
    place: Tensor
    sizes: Tensor

    def __len__(self) -> int:
        return len(self.place)


@dataclass(frozen=True)
class Claim:
    """What a run claims of itself."""

    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float

    @property
    def epsilon(self) -> float:
        return privacy.epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
            delta=self.delta,
        )


def released(
    claim: Claim,
    records: Records,
    *,
    part: int | None = None,
    noise: privacy.GaussianNoise | None = None,
    seed: int = 5,
) -> Tensor:
    """What each step of a private run lets out: noised sums in all places of both tables, ``[T, places, 2]``.

    In units of the clipping norm, and as the attacker gets them: divided by the *expected* batch size, times it. A
    record's own share in them has a norm of at most 1.

    Args:
        claim: noise, rate and steps.
        records: to train on.
        part: batches are worked off in parts of so many records.
        noise: by default from a generator.
        seed: of batches and noise.
    """
    model = Places(records.places).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = privacy.poisson_loader(
        range(len(records)),
        sample_rate=claim.sample_rate,
        steps=claim.steps,
        generator=seeded(seed),
        collate_fn=lambda drawn: torch.tensor(drawn, dtype=torch.int64),
        collates_empty=True,
    )
    private = privacy.make_private(
        model,
        optimizer,
        loader,
        noise_multiplier=claim.noise_multiplier,
        max_norm=1.0,
        noise=noise or privacy.GaussianNoise(seeded(seed + 1)),
    )
    trace = []
    for batch in private.loader:
        for drawn in private.parts(batch, part) if part else [batch]:
            private.backward(model(records.place[drawn], records.sizes[drawn].double()))
        optimizer.step()
        trace.append(torch.cat([table.weight.grad for table in (model.first, model.second)], 1))
        optimizer.zero_grad()
    return torch.stack(trace) * private.expected_batch_size
