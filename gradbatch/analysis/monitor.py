"""Measures gradients now and then while a model is trained."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

from torch import Tensor, nn

from gradbatch.analysis.cadence import Cadence, cadences, comes_to
from gradbatch.analysis.log import Record, Run, Writer
from gradbatch.analysis.measured import PRESETS, quantities, record_of
from gradbatch.analysis.noise import NoiseScale
from gradbatch.analysis.parts import named_groups, numbers, partition
from gradbatch.analysis.writers import writers_of
from gradbatch.api import backward, compute, extend
from gradbatch.capture.hooks import recorder_of
from gradbatch.errors import CoupledSamples, GradBatchError, UsageError
from gradbatch.quantities import BatchL2Grad
from gradbatch.requests import allows_coupling, check_losses
from gradbatch.results import Results
from gradbatch.selection import select

USUAL = 20


@dataclass
class MonitoredStep:
    """What a monitor makes of a step.

    Attributes:
        step: its number.
        measured: whether the cadence has come to it.
        loss: set it to the batch's mean loss to have it in the log.
        loss_scale, ids: as given to :meth:`GradientMonitor.step`; set them where they are known in the block only.
        averaged: set it where a sum over samples, of all micro-batches, was divided by how many there are of them; with
            ``loss_reduction="sum"``.
        record: what was measured, behind the ``with`` block; ``None`` where nothing was.
    """

    step: int
    measured: bool
    loss: float | Tensor | None = None
    loss_scale: float = 1.0
    ids: Tensor | Sequence[int] | None = None
    averaged: bool = False
    record: Record | None = None


class GradientMonitor:
    """Measures the gradients of every so many steps of training, and logs what it measured.

    A step that is not measured costs nothing. The model is extended if it is not yet.

    Args:
        model: to be trained.
        log: path of a :class:`~gradbatch.analysis.JsonLines` file, another writer, or several of either; ``None``: no
            log.
        every: measure steps whose number is a multiple of it, or for which a function such as :func:`logarithmic`
            says so. A mapping has a cadence for some statistics by name (``{"norms": 10, "gram": 500}``); the others
            come every 20. A step that any of them comes to is measured, and has the norms.
        preset: which statistics. ``"economy"``: ``"norms"``, with both parts of the noise scale, of every parameter.
            ``"standard"``: also ``"tests"``, how the gradients agree with the batch's sum, for the inner product and
            orthogonality tests. ``"full"``: also ``"evidence"``, whether what is left of the gradient is noise, and
            ``"gram"``, the angles between the batch's first 32 gradients. Evidence takes the second moment of each
            element of the parameters, and so several times as long as norms; give it a cadence of its own.
        groups: name pattern or patterns of the parameters in each of some groups, by the group's name; they may
            overlap, and leave parameters out.
        decay: of the running :attr:`noise`, see :class:`~gradbatch.analysis.NoiseScale`.
        parameters: name pattern or patterns of the parameters to measure.
        samples_coupled: as for :func:`gradbatch.compute`.

    Attributes:
        noise: running noise scale of all parameters together.
        layers: running noise scales of the layers, ``[layers]``, in the order of :attr:`layer_names`.
        layer_names: paths of the modules that the parameters are in; ``""`` is the model itself.
        groups: running noise scales of the named groups, ``[groups]``, in the order in which they were given.
        group_names: their names.

    Raises:
        UsageError: a cadence below 1 or of what the preset does not measure, an unknown preset, a pattern without a
            match, a frozen model.

    Edge cases: batches may differ in size, and several micro-batches in one step are one batch. An empty batch leaves
    a record without numbers. In data-parallel training, extend and monitor the module inside the wrapper, with a log
    for each rank; :func:`~gradbatch.analysis.read_log` takes all of them.

    Example:
        >>> import torch
        >>> from gradbatch.analysis import GradientMonitor
        >>> model = torch.nn.Linear(3, 1)
        >>> monitor = GradientMonitor(model, every=5)
        >>> for k in range(20):
        ...     x = torch.randn(8, 3)
        ...     with monitor.step(k) as step:
        ...         loss = model(x).square().mean()
        ...         loss.backward()
        ...         step.loss = loss
        >>> int(monitor.noise.batches())
        4
    """

    def __init__(
        self,
        model: nn.Module,
        log: str | os.PathLike[str] | Writer | Sequence[str | os.PathLike[str] | Writer] | None = None,
        *,
        every: Cadence | Mapping[str, Cadence] = USUAL,
        preset: Literal["economy", "standard", "full"] = "standard",
        groups: Mapping[str, str | Iterable[str]] | None = None,
        decay: float = 1.0,
        parameters: str | Iterable[str] | None = None,
        samples_coupled: Literal["refuse", "allow"] = "refuse",
    ) -> None:
        if preset not in PRESETS:
            raise UsageError(f"preset is {preset!r}; there are {', '.join(map(repr, PRESETS))}")
        self._cadences = cadences(every, PRESETS[preset], USUAL)
        self._model = model
        self._options: dict[str, Any] = {
            "parameters": parameters
            if parameters is None or isinstance(parameters, str)
            else list(parameters),
            "samples_coupled": samples_coupled,
        }
        with _explained():
            if not isinstance(model, nn.Module) or all(recorder_of(m) is None for m in model.modules()):
                extend(model)
            selection = select(model, self._options["parameters"], allows_coupling(samples_coupled))
        self._run = Run(
            {name: parameter.numel() for parameter, name in selection.names.parameters.items()},
            preset,
            named_groups(groups or {}, selection.aliases.values()),
        )
        self._layers, self._groups = partition(self._run, "layer"), partition(self._run, "group")
        self.layer_names, self.group_names = self._layers.names, self._groups.names
        self.noise = NoiseScale((), decay)
        self.layers = NoiseScale((len(self.layer_names),), decay)
        self.groups = NoiseScale((len(self.group_names),), decay)
        self._last: int | None = None
        self._writers = [] if log is None else writers_of(log)
        try:
            for writer in self._writers:
                writer.start(self._run)
        except Exception:
            self.close()
            raise

    def measures(self, step: int) -> bool:
        """Whether a cadence comes to a step."""
        return bool(self._due(step))

    @contextmanager
    def step(
        self,
        step: int,
        *,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_scale: float = 1.0,
        ids: Tensor | Sequence[int] | None = None,
    ) -> Iterator[MonitoredStep]:
        """Measure the user's own forward and backward passes in the ``with`` block, if it is time.

        Args:
            step: its number, counted from 0.
            loss_reduction: how the loss is made of the samples' losses, see :func:`gradbatch.compute`.
            loss_scale: what the loss was multiplied with before the backward pass: ``scaler.get_scale()``, or
                ``1 / micro_batches`` where each micro-batch's loss is divided.
            ids: of the samples in the data set, ``[N]``, to log which have the largest gradients; of several
                micro-batches one after another.

        Yields: a :class:`MonitoredStep`.

        Raises:
            GradBatchError: as :func:`gradbatch.compute`; the ids are not ``[N]``, the scale is not positive, the step
                was measured just before, a parameter was frozen or unfrozen since the monitor was made.
        """
        due, monitored = self._begun(step, loss_scale, ids)
        if not due:
            yield monitored
            return
        options = {"loss_reduction": loss_reduction, **self._options}
        with _explained(), compute(self._model, *quantities(due), **options) as results:
            yield monitored
        self._take(monitored, due, results)

    def backward(
        self,
        losses: Tensor,
        step: int,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        loss_scale: float = 1.0,
        ids: Tensor | Sequence[int] | None = None,
    ) -> MonitoredStep:
        """Run the backward pass of a vector of losses, and measure on the way if it is time.

        Args:
            losses: ``[N]``, one loss a sample.
            step, loss_scale, ids: as for :meth:`step`.
            reduction: whether ``p.grad`` is that of the losses' mean or sum.

        Returns: what was measured.

        Raises:
            GradBatchError: as :func:`gradbatch.backward`, and as :meth:`step`.
        """
        due, monitored = self._begun(step, loss_scale, ids)
        # Also of steps that are not measured: a mistake shows in the first one, and not after so many.
        with _explained():
            check_losses(losses)
        if reduction not in ("mean", "sum"):
            raise UsageError(f'reduction is {reduction!r}; it is "mean" or "sum"')
        if not due:
            (losses.sum() if reduction == "sum" else losses.sum() / max(len(losses), 1)).backward()
            return monitored
        with _explained():
            results = backward(self._model, losses, *quantities(due), reduction=reduction, **self._options)
        monitored.loss = losses.detach().double().mean() / loss_scale
        self._take(monitored, due, results)
        return monitored

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` goes on from: the running noise scales."""
        return {
            "noise": self.noise.state_dict(),
            "layers": self.layers.state_dict(),
            "groups": self.groups.state_dict(),
            "names": self.layer_names,
            "group_names": self.group_names,
            "parameters": dict(self._run.parameters),
            "members": dict(self._run.groups),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            UsageError: it is of other layers, parameters or groups.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"the state is {state!r}; expected what state_dict() returns")
        if missing := self.state_dict().keys() - state.keys():
            raise UsageError(f"this is no state of a monitor: {', '.join(sorted(missing))} is not in it")
        if state["names"] != self.layer_names:
            raise UsageError(f"the state is of layers {state['names']}; this monitor has {self.layer_names}")
        if state["group_names"] != self.group_names:
            raise UsageError(
                f"the state is of groups {state['group_names']}; this monitor has {self.group_names}"
            )
        for what, own in (("parameters", self._run.parameters), ("members", self._run.groups)):
            if state[what] != own:
                raise UsageError(f"the state is of other {what}: {state[what]}; this monitor has {own}")
        self._last = None  # a run may go back to a step
        self.noise.load_state_dict(state["noise"])
        self.groups.load_state_dict(state["groups"])
        self.layers.load_state_dict(state["layers"])

    def close(self) -> None:
        """Close the logs."""
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)

    def __enter__(self) -> GradientMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _due(self, step: int) -> list[str]:
        number = _whole(step)
        return [name for name, cadence in self._cadences.items() if comes_to(cadence, number)]

    def _begun(
        self, step: int, loss_scale: float, ids: Tensor | Sequence[int] | None
    ) -> tuple[list[str], MonitoredStep]:
        due, number = self._due(step), _whole(step)
        if due and number == self._last:
            raise UsageError(
                f"step {number} was measured just now, and of two records of a step one counts: put all micro-batches "
                "of a step into one with block, and count steps through the whole run"
            )
        return due, MonitoredStep(number, bool(due), loss_scale=loss_scale, ids=ids)

    def _take(self, step: MonitoredStep, due: Sequence[str], results: Results) -> None:
        scale = _number(step.loss_scale, "loss_scale", "what the loss was multiplied with")
        if not 0 < scale < math.inf:
            raise UsageError(
                f"loss_scale is {scale!r}; it is what the loss was multiplied with, finite and above 0"
            )
        # In order: what is added up and logged has no names.
        found, made = list(results[BatchL2Grad]), list(self._run.parameters)
        if found != made:
            changed = min(set(found) ^ set(made), default=None)
            what = (
                f"{changed} was frozen or unfrozen" if changed else "the order of the parameters was changed"
            )
            raise UsageError(f"{what} after the monitor was made: make a new one, with its own log")
        loss = None if step.loss is None else _number(step.loss, "loss", "the batch's mean loss")
        if step.averaged:
            scale /= max(1, len(results[BatchL2Grad][found[0]]))
        record = step.record = record_of(results, due, step.step, loss, scale, step.ids)
        self._last = step.step
        squares, squares_of_sum = numbers(record.sum_of_squares), numbers(record.square_of_sum)
        self.noise.update(record.samples, squares.sum(), squares_of_sum.sum())
        for noise, parts in ((self.layers, self._layers), (self.groups, self._groups)):
            if not parts.names:
                continue
            noise.update(record.samples, parts.sums(squares), parts.sums(squares_of_sum))
        # All of them, whichever fails: a full disk is no reason to keep a record from the others.
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.write, record)


@contextmanager
def _explained() -> Iterator[None]:
    """Say whose errors they are: the user called neither of the functions that they speak of."""
    try:
        yield
    except GradBatchError as error:
        allow = (
            '. Or make the monitor with samples_coupled="allow"' if isinstance(error, CoupledSamples) else ""
        )
        raise type(error)(
            f"GradientMonitor (step measures with gradbatch.compute, backward with gradbatch.backward): {error}{allow}"
        ) from error


def _number(value: object, name: str, what: str) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        given = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise UsageError(f"{name} is {given}; it is {what}, one number") from error


def _whole(step: int) -> int:
    try:
        number = int(index(step))
    except TypeError as error:
        raise UsageError(f"step is {step!r}; it is a whole number") from error
    if number < 0:
        raise UsageError(f"step is {number}; steps are counted from 0")
    return number
