"""Processes that form a group of torch.distributed on this machine, and run functions of a module on all ranks."""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Torch 2.6, whose streams of the CPU lack what its fully_shard asks of them.
WITHOUT_STREAMS = "'Stream' object has no attribute 'record_event'"
PATIENCE = 120  # seconds until a function that does not return has failed; none takes more than a few


class Processes:
    """``size`` processes that wait for work, ranks of one group. Each function gets its rank first."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._processes, self._pipes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (there, rank, size, str(Path(self._folder.name) / "store"))
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    @property
    def size(self) -> int:
        return len(self._processes)

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """The results of all ranks; an exception on one of them fails the test."""
        answers = self._ask(function, arguments)
        assert None not in answers, f"{function.__name__}: rank {answers.index(None)} has died"
        return [answer for answer in answers if answer is not None]

    def run_survivors(self, function: Any, *arguments: Any) -> list[Any]:
        """The results of those ranks that live to tell."""
        return [answer for answer in self._ask(function, arguments) if answer is not None]

    def _ask(self, function: Any, arguments: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        answers: list[Any] = []
        cannot_shard = False
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE), f"{function.__name__} hangs on rank {rank}"
            try:
                failure, answer = pipe.recv()
            except EOFError:
                failure, answer = None, None
            cannot_shard |= WITHOUT_STREAMS in (failure or "")
            assert cannot_shard or failure is None, f"rank {rank}:\n{failure}"
            answers.append(answer)
        if cannot_shard:
            pytest.skip("fully_shard of this version of torch does not run on the CPU")
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(pipe: Connection, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    while True:
        module, name, arguments = pipe.recv()
        torch.manual_seed(rank)
        try:
            answer = None, getattr(importlib.import_module(module), name)(rank, *arguments)
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send(answer)
