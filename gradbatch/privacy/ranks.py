"""The processes of a distributed run, and how they make sure that they do the same.

A rank that raises an error and stops leaves the others waiting in their next collective operation, for minutes or for
good. So what can fail on one rank alone runs in :meth:`Ranks.together`: afterwards all know, and all raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradbatch.errors import DistributedError
from gradbatch.privacy.randomness import system_generator


def initialised() -> bool:
    """Whether this process is one of those that ``torch.distributed`` knows."""
    return dist.is_available() and dist.is_initialized()


def common_generator() -> torch.Generator:
    """A generator that the operating system has seeded, on rank 0 for all ranks of the default group."""
    seed = [system_generator().initial_seed()]
    dist.broadcast_object_list(seed, 0)
    return torch.Generator().manual_seed(seed[0])


class Ranks:
    """The processes that train a model together; this one alone where ``torch.distributed`` is not initialised.

    All ranks make it at the same time, and call its methods in the same order.

    Args:
        group: their process group; ``None``: the default one.
        timeout: how long to wait for a rank that does not arrive where the others are. One whose process has ended is
            noticed at once.

    Attributes:
        rank: of this process in the group.
        size: how many there are.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        self.group, self.rank, self.size = group, 0, 1
        self._talk: dist.ProcessGroup | None = None
        if initialised():
            self.group = group or dist.group.WORLD
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.size > 1:
            # What ranks tell each other goes through a group of its own and host memory, whatever is under way on the
            # other one.
            members = dist.get_process_group_ranks(self.group)
            self._talk = dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)

    @contextmanager
    def together(self, what: str, **facts: Any) -> Iterator[None]:
        """Run a block on all ranks; if it fails on one, an error is raised on all.

        Args:
            what: what is being done; the same on all ranks.
            facts: values that have to be the same on all ranks. They are pickled and compared by ``==``.

        Raises:
            DistributedError: the block failed on another rank, another rank does something else or has other facts, or
                is gone. Where the block itself fails, its own error is raised.
        """
        try:
            yield
        except Exception as error:
            with suppress(DistributedError):
                self._tell((what, facts, f"{type(error).__name__}: {error}"))
            raise
        told = self._tell((what, facts, None))
        for rank, (_, _, failure) in enumerate(told):
            if failure is not None:
                raise DistributedError(f"{what} failed on rank {rank}, so this one stops too: {failure}")
        for rank, (elsewhere, others, _) in enumerate(told):
            if elsewhere != told[0][0]:
                raise DistributedError(
                    f"rank {rank} is at {elsewhere} while rank 0 is at {told[0][0]}; all ranks have to make the same "
                    "calls"
                )
            _check_same(what, rank, told[0][1], others)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return max(map(int, self._tell(number)))

    def _tell(self, own: Any) -> list[Any]:
        """What each rank says."""
        if self._talk is None:
            return [own]
        told: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(told, own, group=self._talk)
        except RuntimeError as error:
            raise DistributedError(
                f"another rank is gone, or does not answer rank {self.rank}: {error}"
            ) from error
        return told


def _check_same(what: str, rank: int, first: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    for name in {**first, **others}:
        if first.get(name) != others.get(name):
            raise DistributedError(
                f"{what}: {name} is {others.get(name)!r} on rank {rank}, but {first.get(name)!r} on rank 0"
            )
