"""Rounds, budgets and memory."""

import sys
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.measure import LEAST_ROUNDS, describe, time_steps
from benchmarks.memory import peak_bytes
from benchmarks.phases import profile
from benchmarks.run import options

CPU = torch.device("cpu")


def test_medians_lie_between_their_quartiles() -> None:
    assert describe((4.0, 1.0, 2.0, 3.0, 5.0)) == (3.0, 2.0, 4.0)
    assert describe((2.0,)) == (2.0, 2.0, 2.0)


def test_ratios_are_to_the_plain_step_of_the_same_round() -> None:
    taken = time_steps({"plain": lambda: None, "other": lambda: None}, CPU, 6, budget=1.0)
    plain, other = taken["plain"], taken["other"]
    assert plain.ratios == (1.0,) * 6
    assert other.ratios == tuple(a / b for a, b in zip(other.seconds, plain.seconds, strict=True))


def test_who_has_used_up_its_share_drops_out_after_three_rounds_and_the_others_go_on() -> None:
    steps: dict[str, Callable[[], object]] = {
        "plain": lambda: time.sleep(0.02),
        "slow": lambda: time.sleep(0.02),
        "quick": lambda: None,
    }
    taken = time_steps(steps, CPU, 10, budget=0.09)
    assert {name: len(timing.seconds) for name, timing in taken.items()} == {
        "plain": 10,
        "slow": LEAST_ROUNDS,
        "quick": 10,
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the peak of a process is coarser")
def test_memory_is_what_a_step_adds() -> None:
    plain, ours = (peak_bytes("mlp", "BatchGrad", name, CPU, 8) for name in ("plain", "gradbatch"))
    gradient = 4 * (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
    assert gradient < plain < 3 * gradient
    assert 8 * gradient < ours < 16 * gradient


def test_the_profile_accounts_for_the_whole_step() -> None:
    text = profile("lstm", "BatchL2Grad", CPU, repeats=2)
    lines = {line[:17].strip(): line for line in text.splitlines() if "plain steps" in line}
    assert {"forward", "book-keeping", "backward pass", "rules", "reduction", "the rest", "together"} <= {
        *lines
    }
    parts = {name: float(line.split()[-5]) for name, line in lines.items()}
    together = parts.pop("together")
    assert sum(parts.values()) == pytest.approx(together, abs=0.1)
    assert all(spent > -0.01 for spent in parts.values())


def test_only_a_complete_run_is_written_down() -> None:
    assert options([]).complete
    assert not options(["--quick"]).complete
    assert not options(["--models", "cnn"]).complete
    assert not options(["--peers"]).complete
    assert options(["--quick", "--quantities", "Variance"]).quantities == ["Variance"]
