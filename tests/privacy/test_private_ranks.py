"""Private training on several ranks is that of one process; an error on one is an error on all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradbatch import privacy
from tests.privacy import private_cases as cases
from tests.privacy.processes import Processes

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)

OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {},
    "layers": {"per_layer": True},
    "adaptive": {"adaptive": privacy.AdaptiveClipping(count_noise=3.0)},
}


@pytest.fixture(scope="module", params=[2, 3])
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    started = Processes(request.param)
    yield started
    started.close()


@pytest.mark.parametrize("how", ["plain", "ddp"])
@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_several_ranks_train_as_one_does(
    processes: Processes, how: str, size: int | None, options: str
) -> None:
    right, epsilon, bound = cases.train(0, "plain", None, OPTIONS[options])
    results = processes.run(cases.train, how, size, OPTIONS[options])
    for parameters, spent, reached in results:
        assert spent == epsilon and reached == pytest.approx(bound, rel=1e-9)
        for name, parameter in parameters.items():
            assert parameter.equal(results[0][0][name])  # ranks do not drift apart
            torch.testing.assert_close(parameter, right[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", ["fsdp", "fsdp kept"])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("options", OPTIONS)
def test_shards_are_trained_as_whole_parameters_are(
    processes: Processes, how: str, size: int | None, options: str
) -> None:
    asked = OPTIONS[options] | {"noise": 0.0}
    if options == "adaptive":
        # The noise on the count comes after that on the gradients, of which shards draw others.
        asked["adaptive"] = privacy.AdaptiveClipping(count_noise=1e-9)
    right, epsilon, bound = cases.train(0, "plain", None, asked)
    for parameters, spent, reached in processes.run(cases.train, how, size, asked):
        assert spent == epsilon and reached == pytest.approx(bound, rel=1e-6)
        torch.testing.assert_close(parameters, right, rtol=1e-6, atol=1e-8)


def test_shards_have_noise(processes: Processes) -> None:
    with_noise, without = (processes.run(cases.train, "fsdp", None, {"noise": noise}) for noise in (1.0, 0.0))
    for name, parameter in with_noise[0][0].items():
        assert not torch.isclose(parameter, without[0][0][name]).any()
        assert all(parameters[name].equal(parameter) for parameters, *_ in with_noise)


@pytest.mark.parametrize("how", ["plain", "fsdp"])
def test_each_rank_resumes_where_it_was(processes: Processes, how: str) -> None:
    whole = processes.run(cases.train, how, None, {})
    for parameters, (right, *_) in zip(processes.run(cases.stopped_and_resumed, how), whole, strict=True):
        torch.testing.assert_close(parameters, right, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("how", "where", "says"),
    [
        ("plain", "backward", "no gradient today"),
        ("fsdp", "backward", "no gradient today"),
        ("plain", "step", "head.weight"),
        ("fsdp", "step", "head.weight"),
        ("plain", "parts", ""),  # forwards of fully_shard wait for each other by themselves
    ],
)
def test_an_error_on_one_rank_is_an_error_on_all_and_all_can_go_on(
    processes: Processes, how: str, where: str, says: str
) -> None:
    for rank, (name, message, unchanged) in enumerate(processes.run(cases.gone_wrong, how, where)):
        assert name and unchanged
        assert says in message
        if where != "parts":
            assert (name == "DistributedError") == (rank != 1)


@pytest.mark.parametrize("what", ["noise", "rate", "max_norm", "parameters"])
def test_ranks_that_were_given_something_else_are_told(processes: Processes, what: str) -> None:
    names = {"noise": "noise_multiplier", "rate": "schedule"}
    for name, message in processes.run(cases.other_arguments, what):
        assert name == "DistributedError" and names.get(what, what) in message


def test_an_error_of_one_rank_s_arguments_stops_all(processes: Processes) -> None:
    (first, _), *others = processes.run(cases.other_arguments, "model")
    assert first == "TypeError"
    assert all(name == "DistributedError" and "rank 0" in message for name, message in others)


def test_a_loader_that_deals_nothing_out_is_refused(processes: Processes) -> None:
    for message in processes.run(cases.a_loader_of_one):
        assert f"dealt out to 1 ranks, but there are {processes.size}" in message


@pytest.mark.parametrize(
    ("how", "error"), [("plain", "DistributedError"), ("fsdp", "RuntimeError")]
)  # the forward of fully_shard notices it first
def test_a_rank_that_dies_is_noticed(how: str, error: str) -> None:
    processes = Processes(2)
    try:
        assert processes.run_survivors(cases.dying, how) == [error]
    finally:
        processes.close()
