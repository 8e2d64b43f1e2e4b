"""Times and agreement: contestants in a new order each round, each round compared with the plain step in it."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.contestants.base import Contestant, Step, disagreement
from benchmarks.quantities import Answer

# Relative to the norm of a parameter's result, in float32. Rounding alone is 1e-6, but a ReLU whose input two kernels
# round to different sides of zero moves the gradients below it: ResNet-18 differs by 1e-3, by 1e-6 without ReLU.
TOLERANCE = 1e-2
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant, and times of the plain step, by round.

    Args:
        seconds: of each round it ran in.
        ratios: to the plain step of the same round.
    """

    seconds: tuple[float, ...]
    ratios: tuple[float, ...]


def describe(values: tuple[float, ...]) -> tuple[float, float, float]:
    """Median, and the quartiles around it."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return middle, low, high


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of one step; on CUDA by events, from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def time_steps(
    steps: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    budget: float,
    baseline: str = "plain",
) -> dict[str, Timing]:
    """Time all steps, round by round.

    Args:
        steps: by contestant; they are warm.
        device: what they run on.
        repeats: rounds at most.
        budget: seconds. Once three rounds are over, a contestant that has used up its equal share of it drops out, so
            that a slow one does not cost the others their rounds; the baseline stays until the others have left.
        baseline: what the ratios are to.
    """
    seconds: dict[str, dict[int, float]] = {name: {} for name in steps}
    running = set(steps)
    for number in range(repeats):
        for name in random.sample(sorted(running), len(running)):
            seconds[name][number] = seconds_of(steps[name], device)
        if number + 1 >= LEAST_ROUNDS:
            running = {name for name in running if sum(seconds[name].values()) < budget / len(steps)}
            if not running - {baseline}:
                break
            running.add(baseline)
    base = seconds[baseline]
    return {
        name: Timing(tuple(of.values()), tuple(t / base[number] for number, t in of.items()))
        for name, of in seconds.items()
    }


def start(
    contestant: Contestant, prepare: Callable[[Contestant], Step], reference: Answer | None
) -> tuple[Step | None, Answer | None, str, float | None]:
    """Warm a contestant up and hear its answer.

    Args:
        contestant: which.
        prepare: hands it its own copy of the model and the batch.
        reference: what its answer has to be, if known.

    Returns:
        Its step (``None`` if it cannot run), its answer, what is to be said of it (nothing, that it refused and why, or
        that it is wrong and by how much), and its relative error, if there was something to compare.
    """
    try:
        step = prepare(contestant)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            answer = step()
        for _ in range(contestant.warm_up - 1):
            step()
    except ImportError as error:
        return None, None, f"not installed ({error.name})" if error.name else f"refused: {error}", None
    except Exception as error:  # whatever a package raises on a model that it does not take
        return None, None, f"refused: {first_line(error)}", None
    if reference is None or not answer:
        return step, answer, "", None
    found = disagreement(answer, reference)
    return step, answer, "" if found <= TOLERANCE else f"wrong by {found:.1e}", found


def first_line(error: Exception) -> str:
    """What an exception says, cut to a line of a table's notes."""
    kind = "" if type(error).__name__ == "Refused" else f"{type(error).__name__}: "
    text = " ".join(str(error).split())
    return kind + (text if len(text) <= 150 else text[:147] + "...")
