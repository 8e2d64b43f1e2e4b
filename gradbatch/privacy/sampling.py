"""Poisson sampling: every record joins every batch with the same probability, independently of all else.

This is what the accountants count on (amplification by subsampling). Batches differ in size, and some are empty. An
empty batch is a step like any other: noise is added and accounted for. Shuffling is no substitute: an epsilon computed
for Poisson sampling does not hold for batches cut from a permutation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from gradbatch.errors import UsageError
from gradbatch.privacy.empty_batches import CollateEmpty
from gradbatch.privacy.randomness import system_generator, system_uniform
from gradbatch.privacy.ranks import common_generator, initialised


class PoissonSampler(Sampler[list[int]]):
    """A batch sampler: lists of indices, each index in each list with probability ``sample_rate``.

    Args:
        n: number of records, 1 or more.
        sample_rate: probability with which a record joins a batch; above 0, at most 1.
        steps: number of batches, 0 or more.
        generator: where the numbers come from. ``None``: a generator seeded by the operating system. That nobody knows
            who is in a batch is what the accountants count on, so a seed that others know voids epsilon.
        secure: draw from the operating system's CSPRNG instead.
        rank, world_size: yield only every ``world_size``-th record of those drawn, from record ``rank`` on. All ranks
            draw for all records and keep their own share, so that the joint batch is a Poisson sample whether their
            generators agree or not. The rate is that of the joint batch.

    Raises:
        UsageError: an argument out of its range, or both a generator and ``secure``.

    Edge cases: an empty draw is an empty list. ``torch.utils.data.default_collate`` fails on it;
    :func:`poisson_loader` does not.

    Example:
        >>> import torch
        >>> from gradbatch import privacy
        >>> generator = torch.Generator().manual_seed(0)
        >>> sampler = privacy.PoissonSampler(10, sample_rate=0.2, steps=4, generator=generator)
        >>> list(sampler)
        [[6], [1], [2], [2, 3]]
    """

    def __init__(
        self,
        n: int,
        *,
        sample_rate: float,
        steps: int,
        generator: torch.Generator | None = None,
        secure: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not (isinstance(n, int) and n > 0):
            raise UsageError(f"n is {n!r}; it is the number of records, 1 or more")
        if not (isinstance(steps, int) and steps >= 0):
            raise UsageError(f"steps is {steps!r}; it is the number of batches, 0 or more")
        if not 0 <= rank < world_size:
            raise UsageError(
                f"rank is {rank!r} of {world_size!r}; it is a whole number from 0 to world_size - 1"
            )
        if generator is not None and secure:
            raise UsageError("give either a generator or secure=True, which draws from the operating system")
        self.n, self.sample_rate, self.steps = n, _checked_rate(sample_rate), steps
        self.generator = generator or (None if secure else system_generator())
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield self.draw()

    def draw(self) -> list[int]:
        """One batch: indices in rising order."""
        if self.generator is None:
            uniform = system_uniform(self.n)
        else:
            # In float64: the 24 bits of float32 would be a coarse grid for small rates.
            device = self.generator.device
            uniform = torch.rand(self.n, generator=self.generator, dtype=torch.float64, device=device)
        drawn = (uniform < self.sample_rate).nonzero().squeeze(1)
        indices: list[int] = drawn[drawn % self.world_size == self.rank].tolist()
        return indices


class PoissonLoader(DataLoader[Any]):
    """The loader that :func:`poisson_loader` makes: a pass over it yields ``steps`` batches, the next draws anew.

    Attributes:
        sample_rate: probability with which a record joins a batch.
        steps: number of batches in a pass.
        expected_batch_size: expected number of records in a batch, over all ranks: what a sum of gradients is divided
            by. It is a constant. The number that was drawn depends on who is in the data, and is not to be used.
        drawn: number of records in the batch that was handed out last, of this rank: a private number.
    """

    drawn: int

    def __init__(self, dataset: Dataset[Any], draws: _Draws, options: Mapping[str, Any]) -> None:
        self._draws = draws
        self.sample_rate, self.steps = draws.sample_rate, draws.steps
        self.expected_batch_size = draws.n * draws.sample_rate
        super().__init__(dataset, batch_sampler=draws, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        this_pass = self._draws.begin()
        for batch in super().__iter__():
            self.drawn = self._draws.seen_by(this_pass)
            yield batch
        self._draws.end()

    def state_dict(self) -> dict[str, Any]:
        """How many batches of this pass the consumer has taken, and the generator's state after the last of them.

        Batches that workers have fetched ahead do not count: they are drawn again, the same.
        """
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the consumer of another loader was: the next pass yields what was left, the same batches.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            UsageError: a loader of other size, rate, number of steps or kind of generator; nothing is changed.

        Edge cases: with ``secure=True`` as many batches as were left, drawn anew: no state exists to repeat them from.
            What else is random (augmentation in the data set, in workers) is not restored.
        """
        self._draws.load_state_dict(state)


class _Draws(PoissonSampler):
    """A sampler that knows how far the consumer is, while workers have it draw ahead."""

    _consumed, _resumed = 0, False
    _pass: object = None

    def __init__(self, n: int, **options: Any) -> None:
        super().__init__(n, **options)
        # The size of each batch drawn and not consumed, with the generator's state after it; and the state after the
        # last one that was consumed.
        self._ahead: deque[tuple[int, Tensor | None]] = deque()
        self._reached: Tensor | None = None

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self._consumed, self.steps):
            indices = self.draw()
            self._ahead.append((len(indices), self._generator_state()))
            yield indices

    def begin(self) -> object:
        """Start a pass, or the rest of one after a state was loaded."""
        self._go_back()
        self._consumed, self._resumed = (self._consumed if self._resumed else 0), False
        self._reached, self._pass = self._generator_state(), object()
        return self._pass

    def seen_by(self, this_pass: object) -> int:
        """Count a batch as consumed, and say how many records it has."""
        if this_pass is not self._pass:
            raise UsageError(
                "another pass over this loader has begun, or a state was loaded, and this one cannot go on: both would "
                "draw from one generator. Make a loader for each"
            )
        size, self._reached = self._ahead.popleft()
        self._consumed += 1
        return size

    def end(self) -> None:
        """The pass is over: the next begins at its first batch."""
        self._consumed = 0

    def state_dict(self) -> dict[str, Any]:
        reached = self._reached if self._ahead else self._generator_state()
        return {**self._identity(), "consumed": self._consumed, "generator": reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, own in self._identity().items():
            if state[name] != own:
                raise UsageError(f"this state is of a loader whose {name} is {state[name]}, here it is {own}")
        self._ahead.clear()
        self._consumed, self._resumed, self._pass = state["consumed"], True, None
        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def _identity(self) -> dict[str, Any]:
        names = ("n", "sample_rate", "steps", "world_size")
        return {**{name: getattr(self, name) for name in names}, "secure": self.generator is None}

    def _go_back(self) -> None:
        if self._ahead and self.generator is not None and self._reached is not None:
            self.generator.set_state(self._reached)
        self._ahead.clear()

    def _generator_state(self) -> Tensor | None:
        return None if self.generator is None else self.generator.get_state()


def poisson_loader(
    dataset: Dataset[Any],
    *,
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    generator: torch.Generator | None = None,
    secure: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    collates_empty: bool = False,
    **options: Any,
) -> PoissonLoader:
    """A ``DataLoader`` whose batches are Poisson samples of a map-style data set.

    Args:
        dataset: has a length, and a sample at each index from 0. For user-level privacy, a sample is all that one user
            contributed.
        sample_rate: probability with which a sample joins a batch; or say ``expected_batch_size``.
        expected_batch_size: expected number of samples in a batch, over all ranks.
        steps: number of batches in a pass over the loader; or say ``epochs``.
        epochs: the same in units of ``1 / sample_rate`` batches; 1 if neither is said.
        generator, secure: as for :class:`PoissonSampler`.
        rank, world_size: as for :class:`PoissonSampler`. By default those of the process where ``torch.distributed`` is
            initialised; all ranks then make their loader at the same time.
        collates_empty: your ``collate_fn`` takes an empty list. Otherwise an empty batch is made like a batch of the
            first sample, with a size of 0 where samples are counted; for that, the first sample is loaded here.
        options: those of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``, ….

    Returns:
        The loader. It has a ``state_dict`` and can be resumed in the middle of a pass, with workers.

    Raises:
        UsageError: an argument out of its range or said twice, a data set without a length, an option that decides what
            a batch is (``batch_size``, ``shuffle``, …), or a ``collate_fn`` whose empty batch cannot be told.

    Example:
        >>> import torch
        >>> from gradbatch import privacy
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.zeros(100, dtype=torch.int64))
        >>> loader = privacy.poisson_loader(data, expected_batch_size=0.5, steps=50)
        >>> smallest = min((x for x, y in loader), key=len)
        >>> smallest.shape, smallest.dtype
        (torch.Size([0, 3]), torch.float32)
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise UsageError(
            f"Poisson sampling needs to reach any sample by its index; {type(dataset).__name__} is no map-style data "
            "set with a length"
        )
    taken = sorted(set(options) & {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})
    if taken:
        raise UsageError(
            f"{', '.join(taken)}: which samples make a batch is decided by Poisson sampling alone"
        )
    if not options.get("in_order", True):
        raise UsageError("in_order=False: batches out of order could not be resumed")
    rate = _rate(len(dataset), sample_rate, expected_batch_size)
    if steps is not None and epochs is not None:
        raise UsageError("give either steps or epochs")
    if epochs is not None and not 0 <= epochs < math.inf:
        raise UsageError(f"epochs is {epochs!r}; it is a finite number of 0 or more")
    if rank is None and world_size is None and initialised():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # One generator for all, so that the state of any rank resumes each of them.
        generator = generator or (None if secure else common_generator())
    draws = _Draws(
        len(dataset),
        sample_rate=rate,
        steps=round((1 if epochs is None else epochs) / rate) if steps is None else steps,
        generator=generator,
        secure=secure,
        rank=rank or 0,
        world_size=1 if world_size is None else world_size,
    )
    if not collates_empty:
        collate = options.get("collate_fn") or default_collate
        options["collate_fn"] = CollateEmpty(collate, cast(Any, dataset)[0])
    return PoissonLoader(dataset, draws, options)


def _rate(n: int, sample_rate: float | None, expected_batch_size: float | None) -> float:
    if n == 0:
        raise UsageError("the data set is empty")
    if (sample_rate is None) == (expected_batch_size is None):
        raise UsageError("give either sample_rate or expected_batch_size")
    if expected_batch_size is None:
        return _checked_rate(cast(float, sample_rate))
    if not 0 < expected_batch_size <= n:
        raise UsageError(
            f"expected_batch_size is {expected_batch_size!r}; it is above 0 and at most the {n} samples"
        )
    return expected_batch_size / n


def _checked_rate(rate: float) -> float:
    if not (isinstance(rate, float | int) and 0 < rate <= 1):
        raise UsageError(
            f"sample_rate is {rate!r}; it is the probability with which a record joins a batch, above 0 and at most 1"
        )
    return float(rate)
