"""Torch's own database of modules: every entry is right, or refused by an error that names the layer."""

from collections import Counter

import pytest
import torch

from docs import module_database
from docs.module_database import Outcome


@pytest.fixture(scope="module")
def outcomes(device: torch.device) -> list[Outcome]:
    return list(module_database.outcomes(device))


def test_every_entry_is_right_or_refused_and_none_is_wrong(outcomes: list[Outcome]) -> None:
    counts = Counter(outcome.kind for outcome in outcomes)
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())))  # noqa: T201 - with -s
    wrong = [outcome for outcome in outcomes if outcome.kind not in ("right", "refused", "skipped")]
    assert not wrong, "\n".join(map(str, wrong))
    assert counts["right"] >= 80, "the database has become small, or much of it refused"


def test_layers_with_a_rule_are_right_unless_they_couple_samples(outcomes: list[Outcome]) -> None:
    taught = {
        f"nn.{lazy}{kind.__name__}"
        for kind in module_database.gradbatch.rules.taught_types()
        for lazy in ("", "Lazy")
    }
    refused = [o for o in outcomes if o.layer in taught and o.kind == "refused"]
    assert all(o.why.startswith("CoupledSamples") and "BatchNorm" in o.layer for o in refused), refused


def test_every_refusal_names_the_layer(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.kind == "refused":
            kinds = [name for name in vars(torch.nn) if f"({name})" in outcome.why]
            assert kinds or "(NonDynamicallyQuantizableLinear)" in outcome.why, outcome


def test_nothing_is_left_out_but_for_a_reason_of_the_entry(outcomes: list[Outcome]) -> None:
    reasons = {outcome.why for outcome in outcomes if outcome.kind == "skipped"}
    assert reasons <= {
        "no parameters",
        "input without a batch axis",
        "output without a batch axis (a loss that is reduced already)",
    }


def test_the_page_in_the_documentation_is_up_to_date(outcomes: list[Outcome], device: torch.device) -> None:
    if (module_database.release(), device.type) != (module_database.described_release(), "cpu"):
        pytest.skip("the page was made with another version of torch, on the CPU")
    assert module_database.PAGE.read_text() == module_database.page(outcomes), (
        "run python -m docs.module_database"
    )
