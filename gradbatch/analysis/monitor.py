"""Measures gradients now and then while a model is trained."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradbatch.analysis.log import JsonLines, Record, Run, Writer
from gradbatch.analysis.noise import NoiseScale
from gradbatch.analysis.norms import norm_quantiles
from gradbatch.analysis.quantities import BatchDotSum, SumL2Grad
from gradbatch.api import backward, compute, extend
from gradbatch.capture.hooks import recorder_of
from gradbatch.errors import UsageError
from gradbatch.quantities import BatchL2Grad, Quantity
from gradbatch.requests import allows_coupling
from gradbatch.results import Results
from gradbatch.selection import select

PRESETS: Mapping[str, tuple[Quantity, ...]] = {
    "economy": (BatchL2Grad(), SumL2Grad()),
    "standard": (BatchL2Grad(), BatchDotSum()),  # the dot products with the sum add up to its squared norm
}
HARDEST = 8


def logarithmic(per_decade: int = 20) -> Callable[[int], bool]:
    """A cadence that is dense at the start and sparse later.

    Args:
        per_decade: how many steps are measured between ``k`` and ``10 k``, where there are so many.

    Returns: whether a step is measured; what ``GradientMonitor(every=...)`` takes.

    Example:
        >>> from gradbatch.analysis import logarithmic
        >>> [step for step in range(200) if logarithmic(5)(step)]
        [0, 1, 2, 3, 4, 6, 10, 16, 25, 40, 63, 100, 158]
    """
    if per_decade < 1:
        raise UsageError(f"per_decade is {per_decade!r}; it is 1 or more")

    def measured(step: int) -> bool:
        if step < 1:
            return step == 0
        # The first mark that could be rounded to this step.
        mark = math.ceil(per_decade * math.log10(step - 0.5))
        return round(10 ** (mark / per_decade)) == step

    return measured


@dataclass
class MonitoredStep:
    """What a monitor makes of a step.

    Attributes:
        step: its number.
        measured: whether the cadence has come to it.
        loss: set it to the batch's mean loss to have it in the log.
        record: what was measured, behind the ``with`` block; ``None`` where nothing was.
    """

    step: int
    measured: bool
    loss: float | Tensor | None = None
    record: Record | None = None


class GradientMonitor:
    """Measures the gradients of every so many steps of training, and logs what it measured.

    A step that is not measured costs nothing. The model is extended if it is not yet.

    Args:
        model: to be trained.
        log: path of a :class:`~gradbatch.analysis.JsonLines` file, another writer, or several; ``None``: no log.
        every: measure steps whose number is a multiple of it, or for which a function such as :func:`logarithmic`
            says so.
        preset: ``"economy"``: norms, and both parts of the noise scale, of every parameter. ``"standard"``: also how
            the gradients agree with the batch's sum, for the inner product and orthogonality tests.
        decay: of the running :attr:`noise`, see :class:`~gradbatch.analysis.NoiseScale`.
        parameters: name pattern or patterns of the parameters to measure.
        samples_coupled: as for :func:`gradbatch.compute`.

    Attributes:
        noise: running noise scale of all parameters together.
        layers: running noise scales of the layers, ``[layers]``, in the order of :attr:`layer_names`.
        layer_names: paths of the modules that the parameters are in; ``""`` is the model itself.

    Raises:
        UsageError: a cadence below 1, an unknown preset, a pattern without a match, a frozen model.

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
        log: str | os.PathLike[str] | Writer | Sequence[Writer] | None = None,
        *,
        every: int | Callable[[int], bool] = 20,
        preset: Literal["economy", "standard"] = "standard",
        decay: float = 1.0,
        parameters: str | Iterable[str] | None = None,
        samples_coupled: Literal["refuse", "allow"] = "refuse",
    ) -> None:
        if preset not in PRESETS:
            raise UsageError(f"preset is {preset!r}; there are {', '.join(map(repr, PRESETS))}")
        if not callable(every) and (not isinstance(every, int) or every < 1):
            raise UsageError(
                f"every is {every!r}; it is a number of steps, 1 or more, or a function of the step"
            )
        if not isinstance(model, nn.Module) or all(recorder_of(module) is None for module in model.modules()):
            extend(model)
        self._model, self._every, self._quantities = model, every, PRESETS[preset]
        self._options: dict[str, Any] = {
            "parameters": parameters
            if parameters is None or isinstance(parameters, str)
            else list(parameters),
            "samples_coupled": samples_coupled,
        }
        names = select(model, self._options["parameters"], allows_coupling(samples_coupled)).names.parameters
        self._sizes = {name: parameter.numel() for parameter, name in names.items()}
        layers = [name.rpartition(".")[0] for name in self._sizes]
        self.layer_names = list(dict.fromkeys(layers))
        self._layer_of = torch.tensor([self.layer_names.index(layer) for layer in layers])
        self.noise = NoiseScale((), decay)
        self.layers = NoiseScale((len(self.layer_names),), decay)
        self._writers: list[Writer] = _writers(log)
        for writer in self._writers:
            writer.start(Run(dict(self._sizes), preset))

    def measures(self, step: int) -> bool:
        """Whether the cadence comes to a step."""
        return bool(self._every(step)) if callable(self._every) else step % self._every == 0

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
            GradBatchError: as :func:`gradbatch.compute`; the ids are not ``[N]``, the scale is not positive, a
                parameter was frozen or unfrozen since the monitor was made.
        """
        monitored = MonitoredStep(step, self.measures(step))
        if not monitored.measured:
            yield monitored
            return
        with compute(
            self._model, *self._quantities, loss_reduction=loss_reduction, **self._options
        ) as results:
            yield monitored
        self._take(monitored, results, loss_scale, ids)

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
        monitored = MonitoredStep(step, self.measures(step))
        if not monitored.measured:
            (losses.sum() if reduction == "sum" else losses.sum() / max(len(losses), 1)).backward()
            return monitored
        results = backward(self._model, losses, *self._quantities, reduction=reduction, **self._options)
        monitored.loss = losses.detach().double().mean() / loss_scale
        self._take(monitored, results, loss_scale, ids)
        return monitored

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` goes on from: the running noise scales."""
        return {
            "noise": self.noise.state_dict(),
            "layers": self.layers.state_dict(),
            "names": self.layer_names,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            UsageError: it is of other layers.
        """
        if state["names"] != self.layer_names:
            raise UsageError(f"the state is of layers {state['names']}; this monitor has {self.layer_names}")
        self.noise.load_state_dict(state["noise"])
        self.layers.load_state_dict(state["layers"])

    def close(self) -> None:
        """Close the logs."""
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> GradientMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(
        self, step: MonitoredStep, results: Results, scale: float, ids: Tensor | Sequence[int] | None
    ) -> None:
        if not scale > 0:
            raise UsageError(f"loss_scale is {scale!r}; it is what the loss was multiplied with, above 0")
        changed = set(results[BatchL2Grad]) ^ set(self._sizes)
        if changed:
            raise UsageError(
                f"{min(changed)} was frozen or unfrozen after the monitor was made: make a new one, with its own log"
            )
        squares = _stacked(results, BatchL2Grad()) / scale**2  # [P, N]
        norms, count, sums, dots = squares.sum(0).sqrt(), squares.shape[1], squares.sum(1), None
        if BatchDotSum() in self._quantities:
            products = _stacked(results, BatchDotSum()) / scale**2  # [P, N]
            squares_of_sum = products.sum(1).clamp_min(0)
            dots = float(products.sum(0).square().sum())
        else:
            squares_of_sum = _stacked(results, SumL2Grad()) / scale**2
        finite = norms[norms.isfinite()]
        step.record = Record(
            step=step.step,
            time=time.time(),
            samples=count,
            non_finite=count - len(finite),
            loss=step.loss.item() if isinstance(step.loss, Tensor) else step.loss,
            mean_norm=float(finite.mean()),
            quantiles=norm_quantiles(norms).tolist(),
            sum_of_squares=sums.tolist(),
            square_of_sum=squares_of_sum.tolist(),
            dot_squares=dots,
            hardest=None if ids is None else _hardest(norms, ids),
        )
        self.noise.update(count, sums.sum(), squares_of_sum.sum())
        self.layers.update(count, self._by_layer(sums), self._by_layer(squares_of_sum))
        for writer in self._writers:
            writer.write(step.record)

    def _by_layer(self, parts: Tensor) -> Tensor:
        return torch.zeros(len(self.layer_names), dtype=torch.double).index_add(0, self._layer_of, parts)


def _writers(log: str | os.PathLike[str] | Writer | Sequence[Writer] | None) -> list[Writer]:
    if log is None:
        return []
    if isinstance(log, (str, os.PathLike)):
        return [JsonLines(log)]
    return [log] if isinstance(log, Writer) else list(log)


def _stacked(results: Results, quantity: Quantity) -> Tensor:
    """The quantity of all parameters, ``[P, ...]``, in float64: one transfer to the CPU, and sums without rounding."""
    tensors = list(results[quantity].values())
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).cpu().double()


def _hardest(norms: Tensor, ids: Tensor | Sequence[int]) -> list[tuple[int, float | None]]:
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(numbers) != len(norms):
        raise UsageError(f"{len(numbers)} ids for {len(norms)} samples")
    # What is not finite is the hardest of all.
    order = norms.nan_to_num(nan=math.inf, posinf=math.inf).argsort(descending=True, stable=True)[:HARDEST]
    return [(int(numbers[i]), float(norms[i])) for i in order.tolist()]
