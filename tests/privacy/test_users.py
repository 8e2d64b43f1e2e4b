"""Users with several records: they are what is drawn, counted and clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradbatch import privacy
from gradbatch.errors import UsageError
from tests.privacy.models import clipped_sum, gradients, one_by_one
from tests.privacy.runs import Run, dataset, losses_of, seeded

USERS, RATE = 16, 0.4


def by_user() -> Any:
    """Users with one to four records each; a batch has all records of those drawn, and whose each is."""
    x, y = dataset().tensors
    ends = (torch.arange(USERS) % 4 + 1).cumsum(0)
    users = [(x[end - 1 - n % 4 : end], y[end - 1 - n % 4 : end]) for n, end in enumerate(ends)]

    def collate(drawn: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        if not drawn:
            return x[:0], y[:0], torch.zeros(0, dtype=torch.long)
        ids = [torch.full((len(own),), n) for n, (own, _) in enumerate(drawn)]
        return torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn]), torch.cat(ids)

    return privacy.poisson_loader(
        users, sample_rate=RATE, steps=6, generator=seeded(), collate_fn=collate, collates_empty=True
    )


def test_a_user_is_clipped_with_all_records() -> None:
    run, counts = Run(loader=by_user, noise_multiplier=0.0, max_norm=0.3), []
    for x, y, users in run.private.loader:
        grads = one_by_one(run.model, losses_of(run.model, (x, y)))
        count = int(users.max()) + 1
        of_users = {
            name: torch.zeros(count, *grad.shape[1:]).double().index_add(0, users, grad)
            for name, grad in grads.items()
        }
        clipped = run.private.backward(losses_of(run.model, (x, y)), sample_ids=users)
        run.optimizer.step()
        right = {name: total / (USERS * RATE) for name, total in clipped_sum(of_users, 0.3).items()}
        torch.testing.assert_close(gradients(run.model), right, rtol=1e-9, atol=1e-12)
        run.optimizer.zero_grad()
        assert len(clipped.norms) == count < len(x)
        counts.append(count)
    assert run.private.steps == 6 and len(set(counts)) > 1


def test_records_that_nobody_is_named_for_are_refused() -> None:
    run = Run(loader=by_user)
    x, y, _ = next(iter(run.private.loader))
    with pytest.raises(UsageError, match="each record may be clipped once"):
        run.private.backward(losses_of(run.model, (x, y)))


def test_a_user_whose_records_come_in_two_parts_is_refused() -> None:
    run = Run(loader=by_user)
    batch = next(iter(run.private.loader))

    def in_parts() -> None:
        for x, y, users in run.private.parts(batch, 1):
            own = users.unique(return_inverse=True)[1]
            run.private.backward(losses_of(run.model, (x, y)), sample_ids=own)

    with pytest.raises(UsageError, match="each record may be clipped once"):
        in_parts()
