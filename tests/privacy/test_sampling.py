"""Poisson batches: each record in each batch with one probability, independently; none lost, none twice, resumable."""

import copy
import io
import math
from collections import namedtuple
from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from gradbatch import privacy
from gradbatch.errors import UsageError

DEVIATIONS = (
    6.1  # a correct sampler is further off once in a billion runs; those of the system differ each time
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def numbered(n):
    return TensorDataset(torch.arange(n))


def indices(loader):
    return [batch[0].tolist() for batch in loader]


def memberships(sampler):
    """``[steps, n]``: who is in which batch."""
    rows = torch.zeros(sampler.steps, sampler.n)
    for row, batch in zip(rows, sampler, strict=True):
        assert batch == sorted(set(batch))
        row[batch] = 1
    return rows


@pytest.mark.parametrize(
    "options", [{"generator": seeded()}, {}, {"secure": True}], ids=["generator", "system", "secure"]
)
@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_each_record_joins_each_batch_with_the_rate_independently_of_all_else(options, rate):
    n, steps = 40, 20_000
    drawn = memberships(privacy.PoissonSampler(n, sample_rate=rate, steps=steps, **options))
    std = math.sqrt(rate * (1 - rate))
    assert (drawn.mean(0) - rate).abs().max() < DEVIATIONS * std / math.sqrt(steps)
    z = (drawn - rate) / std
    # Between records of a batch, and between a record's memberships in batches one after another.
    between = (z.T @ z / steps - torch.eye(n)).fill_diagonal_(0)
    assert between.abs().max() < DEVIATIONS / math.sqrt(steps)
    assert (z[1:] * z[:-1]).mean(0).abs().max() < DEVIATIONS / math.sqrt(steps)
    sizes = drawn.sum(1)
    variance = n * rate * (1 - rate)
    fourth = variance * (1 + (3 * n - 6) * rate * (1 - rate))
    assert abs(sizes.mean() - n * rate) < DEVIATIONS * math.sqrt(variance / steps)
    bound = DEVIATIONS * math.sqrt((fourth - variance**2) / steps)
    assert abs((sizes - n * rate).square().mean() - variance) < bound


def test_rates_below_the_resolution_of_float32_are_kept():
    # Of 24 bits, this rate is a tenth of the smallest positive number: every draw of 0 would be a member.
    rate, n, steps = 0.1 * 2.0**-24, 2_000_000, 30
    total = sum(map(len, privacy.PoissonSampler(n, sample_rate=rate, steps=steps, generator=seeded())))
    assert total <= 5  # 0.36 expected, 3.6 at the resolution of float32
    everyone = privacy.PoissonSampler(5, sample_rate=1, steps=2, generator=seeded())
    assert list(everyone) == [[0, 1, 2, 3, 4]] * 2


def test_a_generator_makes_batches_repeatable_and_the_seed_of_the_script_does_not():
    def drawn(**options):
        return list(privacy.PoissonSampler(50, sample_rate=0.3, steps=5, **options))

    assert drawn(generator=seeded(1)) == drawn(generator=seeded(1)) != drawn(generator=seeded(2))
    torch.manual_seed(0)
    first = drawn()
    torch.manual_seed(0)
    assert drawn() != first


@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_of_one_generator_make_up_the_sample_of_one_process(world_size):
    def share(rank):
        return list(
            privacy.PoissonSampler(
                11, sample_rate=0.4, steps=30, generator=seeded(), rank=rank, world_size=world_size
            )
        )

    whole = list(privacy.PoissonSampler(11, sample_rate=0.4, steps=30, generator=seeded()))
    joint = [sorted(chain(*parts)) for parts in zip(*map(share, range(world_size)), strict=True)]
    assert joint == whole


def test_shares_of_generators_with_one_seed_are_independent_of_each_other():
    """Had each rank drawn for its own records alone, equal seeds would tie records of different ranks together."""
    n, steps = 10, 20_000
    parts = [
        memberships(
            privacy.PoissonSampler(
                n, sample_rate=0.5, steps=steps, generator=seeded(), rank=rank, world_size=2
            )
        )
        for rank in range(2)
    ]
    z = 2 * sum(parts) - 1
    assert ((z.T @ z / steps).fill_diagonal_(0)).abs().max() < DEVIATIONS / math.sqrt(steps)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_the_samplers_batches_and_empty_ones_keep_structure_and_dtype(workers):
    data = TensorDataset(torch.arange(6), torch.randn(6, 3, 2), torch.zeros(6, dtype=torch.bool))
    loader = privacy.poisson_loader(data, sample_rate=0.2, steps=40, generator=seeded(), num_workers=workers)
    sampler = privacy.PoissonSampler(6, sample_rate=0.2, steps=40, generator=seeded())
    assert len(loader) == 40
    empty = 0
    for expected, (index, x, flag) in zip(sampler, loader, strict=True):
        assert index.tolist() == expected
        torch.testing.assert_close(x, data.tensors[1][expected], rtol=0, atol=0)
        assert (index.dtype, x.dtype, flag.dtype) == (torch.int64, torch.float32, torch.bool)
        assert x.shape == (len(expected), 3, 2) and flag.shape == (len(expected),)
        empty += not expected
    assert empty > 3


def test_passes_differ_and_each_has_all_its_steps():
    loader = privacy.poisson_loader(numbered(30), sample_rate=0.3, steps=5, generator=seeded())
    first, second = indices(loader), indices(loader)
    assert len(first) == len(second) == 5 and first != second
    whole = privacy.PoissonSampler(30, sample_rate=0.3, steps=10, generator=seeded())
    assert first + second == list(whole)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_pass_left_early_changes_nothing_of_the_next_however_far_workers_were_ahead(workers, persistent):
    loader = privacy.poisson_loader(
        numbered(30),
        sample_rate=0.3,
        steps=20,
        generator=seeded(),
        num_workers=workers,
        persistent_workers=persistent,
    )
    seen = []
    for batch in loader:
        seen.append(batch[0].tolist())
        if len(seen) == 3:
            break
    seen += indices(loader)
    assert seen == list(privacy.PoissonSampler(30, sample_rate=0.3, steps=23, generator=seeded()))


@pytest.mark.parametrize("stopped_at", [0, 1, 7, 11, 12])
@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (2, 0), (0, 1)])
def test_resuming_in_the_middle_of_a_pass_yields_exactly_the_remaining_batches(stopped_at, workers):
    def loader(workers, seed=0):
        return privacy.poisson_loader(
            numbered(25), sample_rate=0.2, steps=12, generator=seeded(seed), num_workers=workers
        )

    uninterrupted = loader(0)
    expected = indices(uninterrupted) + indices(uninterrupted)
    killed = loader(workers[0])
    seen, state, passing = [], killed.state_dict(), iter(killed)
    for _ in range(stopped_at):
        seen.append(next(passing)[0].tolist())
        state = killed.state_dict()
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    resumed = loader(workers[1], seed=99)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert resumed.state_dict()["consumed"] == stopped_at
    rest = indices(resumed)
    assert len(rest) == 12 - stopped_at
    assert seen + rest + indices(resumed) == expected


def test_a_state_taken_between_passes_begins_with_a_whole_one():
    loader = privacy.poisson_loader(numbered(25), sample_rate=0.2, steps=6, generator=seeded())
    indices(loader)
    state = copy.deepcopy(loader.state_dict())
    expected = indices(loader)
    resumed = privacy.poisson_loader(numbered(25), sample_rate=0.2, steps=6)
    resumed.load_state_dict(state)
    assert indices(resumed) == expected and len(expected) == 6


def test_secure_sampling_resumes_with_as_many_batches_as_were_left():
    loader = privacy.poisson_loader(numbered(25), sample_rate=0.5, steps=6, secure=True, num_workers=1)
    passing = iter(loader)
    next(passing), next(passing)
    resumed = privacy.poisson_loader(numbered(25), sample_rate=0.5, steps=6, secure=True)
    resumed.load_state_dict(loader.state_dict())
    assert len(indices(resumed)) == 4 and len(indices(resumed)) == 6


def test_two_passes_at_once_are_refused():
    loader = privacy.poisson_loader(numbered(25), sample_rate=0.5, steps=6)
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(UsageError, match="another pass over this loader has begun"):
        next(first)
    assert len([*second]) == 5


def test_the_state_of_another_loader_is_refused_and_changes_nothing():
    loader = privacy.poisson_loader(numbered(25), sample_rate=0.2, steps=6, generator=seeded())
    other = privacy.poisson_loader(numbered(25), sample_rate=0.3, steps=6)
    with pytest.raises(UsageError, match=r"whose sample_rate is 0\.3, here it is 0\.2"):
        loader.load_state_dict(other.state_dict())
    secure = privacy.poisson_loader(numbered(25), sample_rate=0.2, steps=6, secure=True)
    with pytest.raises(UsageError, match="whose secure is True"):
        loader.load_state_dict(secure.state_dict())
    assert indices(loader) == list(privacy.PoissonSampler(25, sample_rate=0.2, steps=6, generator=seeded()))


def test_size_and_number_of_batches_in_either_unit():
    by_size = privacy.poisson_loader(numbered(200), expected_batch_size=8, epochs=2.5)
    assert (by_size.sample_rate, by_size.steps, by_size.expected_batch_size) == (0.04, 62, 8)
    by_rate = privacy.poisson_loader(numbered(200), sample_rate=0.04)
    assert (by_rate.steps, by_rate.expected_batch_size) == (25, 8)


Named = namedtuple("Named", ["x", "names"])


class Records(Dataset):
    """Samples that only a function of their own makes batches of: sequences, with lengths, offsets and names."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((index % 3 + 1, 2), float(index)), f"record {index}"


def packed(samples):
    xs, names = zip(*samples, strict=True)
    lengths = torch.tensor([len(x) for x in xs])
    padded = torch.nn.utils.rnn.pad_sequence(xs)
    return {
        "time first": padded.squeeze(2),
        "rows": torch.cat(xs),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "named": Named(lengths, list(names)),
        "number": len(samples),
        "number as tensor": torch.tensor(len(samples)),
        "task": "none",
        "labels": None,
        "table": torch.eye(2),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_batch_of_any_structure_is_what_grows_with_samples_continued_to_none(workers):
    loader = privacy.poisson_loader(
        Records(), sample_rate=1e-6, steps=2, collate_fn=packed, num_workers=workers, generator=seeded()
    )
    first, second = loader
    for batch in (first, second):
        assert batch["time first"].shape == (1, 0, 2) and batch["rows"].shape == (0, 2)
        assert batch["offsets"].tolist() == [0] and batch["offsets"].dtype == torch.int64
        assert type(batch["named"]) is Named and batch["named"].names == []
        assert batch["named"].x.shape == (0,) and batch["named"].x.dtype == torch.int64
        assert batch["number"] == 0 and batch["number as tensor"].item() == 0
        assert (
            batch["task"] == "none"
            and batch["labels"] is None
            and batch["table"].tolist() == [[1, 0], [0, 1]]
        )
        batch["table"].zero_()  # the next batch is not this one


def test_empty_batches_of_data_sets_that_fetch_lists_and_of_nested_samples():
    nested = StackDataset(x=numbered(4), y=StackDataset(numbered(4), ["a", "b", "c", "d"]))
    for data in (nested, Subset(nested, [2, 0])):
        [batch] = privacy.poisson_loader(data, sample_rate=1e-9, steps=1, generator=seeded())
        assert batch["x"][0].shape == (0,) and batch["y"][0][0].shape == (0,)
        assert list(batch["y"][1]) == []


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda samples: torch.randn(len(samples) ** 2), r"batch is of shape \[1\] with one sample, \[4\] with two"),
        (lambda samples: {"size": 1 / len(samples)}, r"batch\['size'\] is 1.0 with one sample, 0.5 with two"),
        (lambda samples: [torch.rand(3)], r"batch\[0\] is of shape \[3\] with one sample, \[3\] with two"),
        (lambda samples: samples[0] if len(samples) == 1 else None, "of type tuple with one sample, NoneType with"),
    ],
)  # fmt: skip
def test_an_empty_batch_that_cannot_be_told_is_refused_unless_the_users_function_makes_it(collate, message):
    with pytest.raises(UsageError, match=message):
        privacy.poisson_loader(numbered(4), sample_rate=0.5, collate_fn=collate)
    loader = privacy.poisson_loader(
        numbered(4), sample_rate=1e-9, steps=1, collate_fn=lambda samples: len(samples), collates_empty=True
    )
    assert list(loader) == [0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either sample_rate or expected_batch_size"),
        ({"sample_rate": 0.5, "expected_batch_size": 2}, "either sample_rate or expected_batch_size"),
        ({"sample_rate": 0.0}, r"sample_rate is 0\.0"),
        ({"sample_rate": 1.5}, r"sample_rate is 1\.5"),
        ({"expected_batch_size": 5}, "expected_batch_size is 5.* at most the 4 samples"),
        ({"expected_batch_size": 0}, "expected_batch_size is 0"),
        ({"sample_rate": 0.5, "steps": 1, "epochs": 1}, "either steps or epochs"),
        ({"sample_rate": 0.5, "steps": -1}, "steps is -1"),
        ({"sample_rate": 0.5, "epochs": -1}, "epochs is -1"),
        ({"sample_rate": 0.5, "batch_size": 4}, "batch_size: which samples make a batch"),
        ({"sample_rate": 0.5, "shuffle": True, "drop_last": True}, "drop_last, shuffle: which samples"),
        ({"sample_rate": 0.5, "in_order": False}, "in_order=False"),
        ({"sample_rate": 0.5, "rank": 2, "world_size": 2}, "rank is 2 of 2"),
        ({"sample_rate": 0.5, "generator": torch.Generator(), "secure": True}, "either a generator or secure"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_poisson_sample_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        privacy.poisson_loader(numbered(4), **options)


def test_data_without_length_or_without_samples_is_refused():
    with pytest.raises(UsageError, match="Stream is no map-style data set with a length"):
        privacy.poisson_loader(Stream(), sample_rate=0.5)
    with pytest.raises(UsageError, match="the data set is empty"):
        privacy.poisson_loader(Subset(numbered(4), []), sample_rate=0.5)
    with pytest.raises(UsageError, match="n is 0"):
        privacy.PoissonSampler(0, sample_rate=0.5, steps=1)
