"""What a step adds to the memory in use, at its peak: gradients, activations and whatever it keeps.

On CPU each contestant is measured in a process of its own, forked from one that has imported everything and computed
nothing: memory that an earlier contestant gave back to the allocator, but not to the system, would hide what the next
one takes. The model and its batch are there before; what a contestant keeps from step to step counts.
"""

import ctypes
import multiprocessing
import resource
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from benchmarks.cases import CASES
from benchmarks.contestants import OURS, PEERS, PLAIN
from benchmarks.contestants.base import Contestant

PRELOADED = ["benchmarks.memory", "benchmarks.preloaded"]


def contestant_named(name: str) -> Contestant:
    return {PLAIN.name: PLAIN, OURS.name: OURS, **PEERS}[name]


@cache
def plain_bytes(case: str, device: torch.device, samples: int) -> int:
    """What a plain step adds; the same for every quantity."""
    return peak_bytes(case, "BatchGrad", PLAIN.name, device, samples)


def peak_bytes(case: str, quantity: str, contestant: str, device: torch.device, samples: int | None) -> int:
    """Bytes that a steady step adds at its peak.

    Args:
        case: key in ``CASES``.
        quantity: what is computed.
        contestant: by name.
        device: on CUDA, by its allocator's own count; on CPU, pages of the process.
        samples: instead of the case's own number.

    Raises:
        RuntimeError: the process died or took longer than ten minutes.
    """
    if device.type == "cuda":
        return _on_cuda(case, quantity, contestant, device, samples)
    # Forked from a server: this process has run kernels, and their threads do not survive a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_report, args=(sender, case, quantity, contestant, samples, torch.get_num_threads())
    )
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(600) else None
    except EOFError:
        found = None
    if found is None:
        process.kill()
    process.join()
    if found is None:
        raise RuntimeError(f"memory of {contestant} on {case}: the process ended with {process.exitcode}")
    return int(found)


def _report(sender, case: str, quantity: str, contestant: str, samples: int | None, threads: int) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # as in the process that asks
    try:
        sender.send(_on_cpu(case, quantity, contestant, samples))
    finally:
        sender.close()


def _prepared(
    case: str, quantity: str, contestant: str, device: torch.device, samples: int | None
) -> Callable[[], object]:
    model, batch = CASES[case].build(device, samples)
    return contestant_named(contestant).prepare(model, batch, quantity)


def _on_cpu(case: str, quantity: str, contestant: str, samples: int | None) -> int:
    # Code of kernels comes into memory when it first runs; that is no step's either.
    PLAIN.prepare(*CASES[case].build(torch.device("cpu"), 2), quantity)()
    step = _prepared(case, quantity, contestant, torch.device("cpu"), samples)
    _give_back()
    before = _resident()
    # Where the samples lie is found out in the first steps, at a cost that a training run does not see again.
    for _ in range(contestant_named(contestant).warm_up):
        step()
    _give_back()
    _forget_peak()
    step()
    return max(_peak() - before, 1)


def _on_cuda(case: str, quantity: str, contestant: str, device: torch.device, samples: int | None) -> int:
    step = _prepared(case, quantity, contestant, device, samples)
    before = torch.cuda.memory_allocated(device)
    for _ in range(contestant_named(contestant).warm_up):
        step()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return max(torch.cuda.max_memory_allocated(device) - before, 1)


def _give_back() -> None:
    """Hand free memory of the allocator back to the system, where glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def _resident() -> int:
    """Bytes of the process that are in memory; its peak so far where the system does not say."""
    return _status("VmRSS:") if Path("/proc/self/status").exists() else _peak()


def _forget_peak() -> None:
    """Let the peak start anew, where Linux can; elsewhere that of the first steps counts too."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def _peak() -> int:
    if Path("/proc/self/status").exists():
        return _status("VmHWM:")
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
