"""Run gradbatch on an entry, and say what came out."""

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

import gradbatch
from tests import oracle
from tests.zoo.entry import Call, Entry, own_losses

# Where a model computes part of its forward in float32, whatever its parameters are, float64 is not to be had.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
SUM_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
# Units of rounding of the largest gradient of the model that any gradient may be off by. The bias of attention's keys
# has a gradient of zero, which is computed as rounding errors of no particular value.
ROUNDING = 64


@dataclass(frozen=True)
class Outcome:
    """What came out for one entry.

    Args:
        entry: the entry.
        kind: ``"right"``, ``"refused"``, ``"wrong"`` or ``"skipped"``.
        why: the error of a refusal or a wrong entry, the reason for leaving one out.
        precision: ``float64``, or ``float32`` where the model itself computes in it.
        parameters: how many parameters have gradients.
        without_gradient: how many others no loss depends on.
        seconds: for building, the reference, and gradbatch; each with its forward.
    """

    entry: Entry
    kind: str
    why: str = ""
    precision: torch.dtype = torch.float64
    parameters: int = 0
    without_gradient: int = 0
    seconds: tuple[float, ...] = ()


def outcome(entry: Entry) -> Outcome:
    """Build the entry's model, take the reference from it as it came, and compare what gradbatch finds."""
    times = [time.perf_counter()]
    with as_its_library_expects():
        torch.manual_seed(0)
        try:
            model, call = entry.build()
            times.append(time.perf_counter())
            losses = losses_of(call)
            expected = oracle.one_hot_of(losses, oracle.trainable(model))
            _assert_worth_comparing(expected)
        except Exception as error:
            return Outcome(entry, "skipped", f"cannot run here: {described(error)}")
    precision = coarsest_precision(losses)
    del losses  # with the graph of the reference
    times.append(time.perf_counter())
    kind, why = _verdict(model, call, expected, precision)
    times.append(time.perf_counter())
    silent = sum(not bool(gradient.any()) for gradient in expected.values())
    seconds = tuple(after - before for before, after in pairwise(times))
    return Outcome(entry, kind, why, precision, len(expected) - silent, silent, seconds)


def losses_of(call: Call) -> Tensor:
    """The same projection of the same outputs every time."""
    torch.manual_seed(1)
    return own_losses(call())


def _assert_worth_comparing(expected: Mapping[str, Tensor]) -> None:
    if not all(bool(gradient.isfinite().all()) for gradient in expected.values()):
        raise ValueError("gradients that are not finite")
    if 2 * sum(bool(gradient.any()) for gradient in expected.values()) < len(expected):
        raise ValueError("most gradients are zero")


def _verdict(
    model: nn.Module, call: Call, expected: Mapping[str, Tensor], precision: torch.dtype
) -> tuple[str, str]:
    try:
        extended = gradbatch.extend(model)
        with as_its_library_expects():
            losses = losses_of(call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gradbatch.SlowPathWarning)  # right is what is asked here
            found = gradbatch.per_sample_grads(extended, losses)
            bound = float(_norms(expected).median())
            clipped = gradbatch.backward(extended, losses, gradbatch.ClippedSum(bound), retain_graph=False)
    except gradbatch.GradBatchError as error:
        return "refused", described(error)
    except Exception as error:
        return "wrong", described(error)
    if missing := expected.keys() - found.keys():
        return "wrong", f"no gradients of {min(missing)}"
    name, error = max(_errors(found, expected, precision), key=lambda of: of[1])
    if error > TOLERANCE[precision]:
        return "wrong", f"error {error:.3g} in {name}"
    error = _error_of_sum(clipped[gradbatch.ClippedSum], expected, bound)
    return (
        ("right", "")
        if error <= SUM_TOLERANCE[precision]
        else ("wrong", f"error {error:.3g} in the clipped sum")
    )


def _norms(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten(1).double() for gradient in gradients.values()], 1).norm(dim=1)


def _error_of_sum(found: Mapping[str, Tensor], gradients: Mapping[str, Tensor], bound: float) -> float:
    """Of all parameters together: what is to hold is the norm of the sum."""
    factors = (bound / _norms(gradients)).clamp(max=1)
    right = {name: torch.einsum("n,n...->...", factors, grad.double()) for name, grad in gradients.items()}
    difference = sum(float((found[name].double() - right[name]).square().sum()) for name in right)
    return (difference / sum(float(total.square().sum()) for total in right.values())) ** 0.5


def _errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], precision: torch.dtype
) -> Iterator[tuple[str, float]]:
    """Of each parameter, the largest relative error of a sample, beyond the rounding of the largest gradients."""
    largest = max(float(gradient.abs().amax()) for gradient in expected.values() if gradient.numel())
    rounding = ROUNDING * torch.finfo(precision).eps * largest
    for name, right in expected.items():
        if found[name].shape != right.shape:
            yield name, float("inf")
            continue
        difference = (found[name].double() - right.double()).abs()
        beyond = torch.where(difference <= rounding, torch.zeros_like(difference), difference)
        yield name, oracle.relative_error(right.double() + beyond, right, per_sample=True)


def coarsest_precision(losses: Tensor) -> torch.dtype:
    """float32 if anything on the way from the parameters to the losses is coarser than float64."""
    waiting, seen = [losses.grad_fn], {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if any(meta.dtype != torch.float64 for meta in node._input_metadata):
            return torch.float32
        waiting.extend(following for following, _ in node.next_functions)
    return torch.float64


@contextmanager
def as_its_library_expects() -> Iterator[None]:
    """Numbers in float64 where a model does not say, and no warnings of the library's own."""
    dtype, disabled = torch.get_default_dtype(), logging.root.manager.disable
    torch.set_default_dtype(torch.double)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        torch.set_default_dtype(dtype)


def described(error: Exception) -> str:
    """Type and first sentence of an error, on one line."""
    first = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {first}"
