"""A run that was killed and resumed ends where the uninterrupted one does, bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradbatch import privacy
from gradbatch.errors import UsageError
from tests.privacy.runs import Run, losses_of, poisson

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers": {"per_layer": True},
    "adaptive": {"adaptive": privacy.AdaptiveClipping(count_noise=3.0)},
    "adaptive layers": {"adaptive": privacy.AdaptiveClipping(count_noise=3.0), "per_layer": True},
    "tight": {"accountant": "pld"},
    "workers": {"loader": lambda: poisson(num_workers=1)},
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def saved(run: Run) -> dict[str, Any]:
    """What a checkpoint on disk holds."""
    file = io.BytesIO()
    states = {"model": run.model, "optimizer": run.optimizer, "private": run.private}
    torch.save({name: part.state_dict() for name, part in states.items()}, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def resumed(state: dict[str, Any], **options: Any) -> Run:
    run = Run(optimizer=adam, **options)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.private.load_state_dict(state["private"])
    return run


@pytest.mark.parametrize(
    ("name", "killed_after", "size"),  # after so many steps; a pass has eight
    [
        ("plain", 1, None),
        ("plain", 5, 3),
        ("plain", 8, None),
        ("layers", 11, 3),
        ("adaptive", 5, None),
        ("adaptive layers", 11, 3),
        ("tight", 5, None),
        ("workers", 5, None),
        ("workers", 8, 3),
    ],
)
def test_killed_and_resumed_it_ends_at_the_same_parameters_and_epsilon(
    name: str, killed_after: int, size: int | None
) -> None:
    options = {"accountant": "rdp", "delta": 1e-3} | OPTIONS[name]
    whole = Run(optimizer=adam, **options)
    for _ in range(2):
        whole.train(size=size)

    run, state = Run(optimizer=adam, **options), None
    while state is None:
        for batch in run.private.loader:
            run.step(batch, size)
            if run.private.steps == killed_after:
                state = saved(run)
                break
    # What happens after the checkpoint must not matter.
    torch.randn(10)
    run = resumed(state, **options)
    assert run.private.steps == killed_after
    while run.private.steps < 16:
        run.train(size=size)
    assert run.private.steps == 16
    torch.testing.assert_close(run.parameters(), whole.parameters(), rtol=0, atol=0)
    assert run.private.epsilon() == whole.private.epsilon()
    assert run.private.max_norm == whole.private.max_norm


def test_a_batch_that_was_under_way_when_the_run_was_killed_is_drawn_again() -> None:
    whole, run = Run(optimizer=adam).train(), Run(optimizer=adam)
    for batch in run.private.loader:
        if run.private.steps == 3:
            for part in run.private.parts(batch, 2):
                run.private.backward(losses_of(run.model, part))
                break
            break
        run.step(batch)
        state = saved(run)
    run = resumed(state).train()
    torch.testing.assert_close(run.parameters(), whole.parameters(), rtol=0, atol=0)


def test_a_state_is_that_between_two_steps() -> None:
    run = Run()
    state = copy.deepcopy(run.private.state_dict())
    batch = next(iter(run.private.loader))
    for part in run.private.parts(batch, 3):
        with pytest.raises(UsageError, match="between two steps"):
            run.private.state_dict()
        with pytest.raises(UsageError, match="between two steps"):
            run.private.load_state_dict(state)
        run.private.backward(losses_of(run.model, part))
    run.private.discard()
    run.private.load_state_dict(state)


def in_numbers(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    return {key: in_numbers(value) for key, value in state.items()} if isinstance(state, dict) else state


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"noise_multiplier": 2.0}, "noise multiplier 1.0, this one 2.0"),
        ({"adaptive": privacy.AdaptiveClipping(count_noise=3.0)}, "clipping bounds"),
        ({"loader": lambda: poisson(rate=0.5)}, "sample_rate is 0.25, here it is 0.5"),
        ({"noise": privacy.GaussianNoise(secure=True)}, "secure=False"),
    ],
)
def test_the_state_of_another_run_is_refused(other: dict[str, Any], says: str) -> None:
    state = Run().train().private.state_dict()
    run = Run(**other)
    before = in_numbers(run.private.state_dict())
    with pytest.raises(UsageError, match=says):
        run.private.load_state_dict(state)
    assert in_numbers(run.private.state_dict()) == before


def test_what_is_no_state_is_refused() -> None:
    run = Run()
    with pytest.raises(UsageError, match="no state of a Private"):
        run.private.load_state_dict(run.optimizer.state_dict())


def optimizer_first(run: Run, state: dict[str, Any]) -> None:
    run.optimizer.load_state_dict(state["optimizer"])
    run.private.load_state_dict(state["private"])


def optimizer_last(run: Run, state: dict[str, Any]) -> None:
    run.private.load_state_dict(state["private"])
    run.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("load", [optimizer_first, optimizer_last])
def test_the_order_in_which_states_are_loaded_makes_no_difference(
    load: Callable[[Run, dict[str, Any]], None],
) -> None:
    whole, run = Run(optimizer=adam).train().train(), Run(optimizer=adam).train()
    state = saved(run)
    run = Run(optimizer=adam)
    run.model.load_state_dict(state["model"])
    load(run, state)
    run.train()
    torch.testing.assert_close(run.parameters(), whole.parameters(), rtol=0, atol=0)
