"""Several processes train as one: the same sums, one noise, and no process waits for one that has failed."""

import math

import pytest
import torch

from gradbatch import privacy
from gradbatch.privacy.distributed import _buckets, fingerprint, noise_of_rank, noised_sums, whole_parameters
from gradbatch.privacy.ranks import Ranks
from tests.privacy import distributed_cases as cases
from tests.privacy.processes import Processes

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


@pytest.fixture(scope="module", params=[2, 3])
def processes(request):
    started = Processes(request.param)
    yield started
    started.close()


@pytest.fixture(scope="module")
def alone():
    """Parameters after training in one process, by noise."""
    return {std: cases.train(0, "plain", std)[0] for std in (0.0, 0.7)}


# ---- one training


@pytest.mark.parametrize("how", ["plain", "ddp"])
@pytest.mark.parametrize("std", [0.0, 0.7])
def test_training_on_several_ranks_is_training_on_one(processes, alone, how, std):
    results = processes.run(cases.train, how, std)
    first, _ = results[0]
    assert sum(empty for _, empty in results) > 0  # some rank had nothing to do in some step
    for parameters, _ in results:
        for name, parameter in parameters.items():
            assert torch.equal(parameter, first[name])  # ranks do not drift apart
            torch.testing.assert_close(parameter, alone[std][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", ["fsdp", "fsdp kept"])
def test_training_with_shards_is_training_on_one_process(processes, alone, how):
    for parameters, _ in processes.run(cases.train, how, 0.0):
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, alone[0.0][name], rtol=1e-10, atol=1e-12)


# ---- sums and noise


@pytest.mark.parametrize("rows", [6, 5, 1, 0])
def test_shards_get_their_part_of_the_sum(processes, rows):
    ranks = processes.size
    results = processes.run(cases.sums_and_noise, rows, 1, 0.0)
    for total, _ in results:
        assert torch.equal(total, torch.full((rows, 3), ranks * (ranks + 1) / 2, dtype=torch.float64))
    assert torch.equal(torch.cat([shard for _, shard in results]), results[0][0])


def test_each_shard_has_noise_of_its_own_although_generators_had_one_seed(processes):
    ranks, rows = processes.size, 30_000
    results = processes.run(cases.sums_and_noise, rows, 1, 2.0)
    noise = (results[0][0] - ranks * (ranks + 1) / 2) / 2
    z = noise.flatten()
    assert abs(z.mean()) < 6.1 / math.sqrt(len(z))
    assert abs(z.square().mean() - 1) < 6.1 * math.sqrt(2 / len(z))
    shards = [shard - ranks * (ranks + 1) / 2 for _, shard in results]
    for index, shard in enumerate(shards):
        for other in shards[:index]:
            rows = min(len(shard), len(other))
            assert abs((shard[:rows] * other[:rows]).mean() / 4) < 6.1 / math.sqrt(3 * rows)
    # Rank 0 uses the generator as it is.
    own = privacy.GaussianNoise(cases.seeded(1)).draw(shards[0].shape, 2.0, torch.float64)
    torch.testing.assert_close(shards[0], own, rtol=0, atol=1e-12)


def test_replicas_of_a_shard_have_the_same_noise():
    processes = Processes(4)
    try:
        results = processes.run(cases.sums_and_noise, 5, 2, 1.0)
    finally:
        processes.close()
    (_, first), (_, second), (_, third), (_, fourth) = results
    assert torch.equal(first, third) and torch.equal(second, fourth)
    assert all(torch.equal(total, results[0][0]) for total, _ in results)
    noise = results[0][0] - 10
    assert noise.std() > 0.3 and noise.abs().max() < 6  # once, not on each replica


@pytest.mark.parametrize("secure", [False, True])
def test_what_all_ranks_hold_gets_the_noise_of_rank_0_once_and_is_the_same_on_all(processes, secure):
    ranks = processes.size
    count = ranks * (ranks + 1) / 2
    results = processes.run(cases.shared_sums, secure)
    for tensors in results:
        assert all(map(torch.equal, tensors, results[0]))
    first, second, transposed, exact, none = results[0]
    assert exact.tolist() == [count, count] and none.shape == (0, 3)
    assert [t.dtype for t in (first, second, transposed)] == [torch.float32, torch.float64, torch.float32]
    if secure:
        assert (first != count).all() and (first - count).abs().max() < 7
        multiples = second / (2.0 * 2.0**-20)
        assert torch.equal(multiples, multiples.round())
        return
    alone = [torch.full((4, 5), count), torch.full((3,), count, dtype=torch.float64)]
    alone.append(torch.arange(6.0).view(2, 3).t() * count)
    privacy.GaussianNoise(cases.seeded(0)).add_to(alone, [1.0, 2.0, 3.0])
    torch.testing.assert_close([first, second, transposed], alone, rtol=1e-6, atol=1e-6)


def test_one_process_adds_noise_to_its_own_sums():
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.largest(3)) == (0, 1, 3)
    totals = noised_sums(ranks, {"a": torch.ones(3)}, privacy.GaussianNoise(cases.seeded(0)), 2.0)
    expected = 1 + privacy.GaussianNoise(cases.seeded(0)).draw((3,), 2.0)
    torch.testing.assert_close(totals["a"], expected)
    with pytest.raises(ZeroDivisionError), ranks.together("a step", fact=1):
        raise ZeroDivisionError
    with whole_parameters(torch.nn.Linear(1, 1)):
        pass


def test_small_tensors_are_sent_together_and_large_ones_as_they_are(monkeypatch):
    monkeypatch.setattr("gradbatch.privacy.distributed._BUCKET_BYTES", 64)
    tensors = [torch.rand(n) for n in (4, 100, 3, 9, 12)] + [torch.rand(3, 2).t(), torch.rand(2).double()]
    flats, views = _buckets(tensors)
    assert [flat.numel() for flat in flats] == [4, 100, 12, 12, 6, 2]
    assert flats[1] is tensors[1]
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor) and view.shape == tensor.shape
    for flat in flats:
        flat.fill_(7)
    assert all((view == 7).all() for view in views)


def test_noise_of_a_rank_goes_by_generator_and_rank():
    ranks, drawn = Ranks(), []
    for ranks.rank in (0, 1, 2):
        for seed in (0, 1):
            noise = noise_of_rank(ranks, privacy.GaussianNoise(cases.seeded(seed)))
            again = noise_of_rank(ranks, privacy.GaussianNoise(cases.seeded(seed)))
            drawn.append(noise.draw((4,), 1.0))
            assert torch.equal(again.draw((4,), 1.0), drawn[-1])
    assert len({tuple(each.tolist()) for each in drawn}) == 6
    secure = privacy.GaussianNoise(secure=True)
    assert noise_of_rank(ranks, secure) is secure


# ---- agreement


def test_an_error_on_one_rank_is_an_error_on_all_and_all_can_go_on(processes):
    for fails in range(processes.size):
        results = processes.run(cases.failing_together, fails)
        for rank, (kind, message) in enumerate(results):
            if rank == fails:
                assert (kind, message) == ("ZeroDivisionError", "a loss of nothing")
            else:
                assert kind == "DistributedError"
                assert message.startswith(f"clipping failed on rank {fails}")
                assert "ZeroDivisionError: a loss of nothing" in message


@pytest.mark.parametrize(
    ("facts", "others", "message"),
    [
        ({"max_norm": 1.0}, {"max_norm": 1.0}, ""),
        ({"max_norm": 1.0}, {"max_norm": 2.0}, "a step: max_norm is 2.0 on rank 1, but 1.0 on rank 0"),
        ({"max_norm": 1.0}, {}, "a step: max_norm is None on rank 1, but 1.0 on rank 0"),
        ({}, {"steps": 3}, "a step: steps is 3 on rank 1, but None on rank 0"),
    ],
)
def test_ranks_that_disagree_are_told_about_what(processes, facts, others, message):
    assert set(processes.run(cases.other_facts, facts, others)) == {message}


def test_ranks_that_make_different_calls_are_told(processes):
    [message] = set(processes.run(cases.other_calls))
    assert message == "rank 1 is at call 1 while rank 0 is at call 0; all ranks have to make the same calls"


def test_the_largest_number_of_all_ranks(processes):
    assert processes.run(cases.largest) == [10] * processes.size


def test_a_rank_that_does_not_arrive_is_not_waited_for_longer_than_said():
    processes = Processes(2)
    try:
        first, _ = processes.run(cases.late)
    finally:
        processes.close()
    assert "another rank is gone, or does not answer rank 0" in first


@pytest.mark.parametrize("where", ["together", "sums"])
def test_a_rank_that_dies_is_an_error_on_the_others_at_once(where):
    processes = Processes(3)
    try:
        results = processes.run_survivors(cases.dying, where)
    finally:
        processes.close()
    assert len(results) == 2
    assert all("another rank is gone" in result for result in results)


def test_fingerprints_tell_parameters_apart(processes):
    results = processes.run(cases.fingerprints)
    assert all(before == results[0][0] for before, _ in results)
    assert len({tuple(after) for _, after in results}) == processes.size
    assert fingerprint([torch.zeros(3, dtype=torch.complex64), torch.zeros(2, dtype=torch.bfloat16)]) == [
        0,
        0,
    ]


# ---- whole parameters


def test_parameters_are_whole_for_a_backward_pass_and_sharded_before_and_after(processes):
    for kinds in processes.run(cases.whole_for_a_while):
        assert kinds == ["DTensor", "Tensor", "DTensor"] * 3


def test_a_pass_that_fails_on_one_rank_leaves_every_rank_able_to_go_on(processes):
    results = processes.run(cases.after_an_error)
    assert "no gradient today" in results[0][0] and not any(message for message, _ in results[1:])
    assert all(error < 1e-12 for _, error in results)


def test_an_ordinary_backward_after_a_private_one_is_what_it_was(processes):
    assert max(processes.run(cases.ordinary_training_goes_on)) < 1e-14


def test_what_cannot_be_made_whole_is_refused_and_so_are_shards(processes):
    for messages in processes.run(cases.refusals):
        parallel, older, sharded, watched = messages
        assert "weight is a DTensor that fully_shard does not gather" in parallel
        assert "is a FullyShardedDataParallel, which flattens parameters" in older
        for message in (sharded, watched):
            assert "is sharded over processes" in message and "whole_parameters(model)" in message


# ---- sampling


def test_the_ranks_of_a_loader_share_one_sample_and_one_state(processes):
    results = processes.run(cases.batches)
    for step in range(8):
        parts = [drawn[step] for drawn, _ in results]
        assert all(index % processes.size == rank for rank, part in enumerate(parts) for index in part)
    assert all(same for _, same in results)
    assert sum(len(part) for drawn, _ in results for part in drawn) > 30
