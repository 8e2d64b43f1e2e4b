"""A monitor in the training loops of other libraries: transformers' Trainer and Lightning's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal

from torch import Tensor

from gradbatch.analysis.ids import ids_of
from gradbatch.analysis.monitor import GradientMonitor, MonitoredStep
from gradbatch.errors import UsageError

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def transformers_callback(
    monitor: GradientMonitor, *, micro_batches: Literal["averaged", "summed"] | None = None
) -> Any:
    """A callback for transformers' ``Trainer`` that measures its steps.

    The Trainer needs ``compute_loss_func=`` (or label smoothing), so that the loss is computed from the model's outputs
    and not by the model itself, where nobody can tell the samples apart.

    Args:
        monitor: of the model that is trained; its ``every`` counts optimizer steps.
        micro_batches: needed with gradient accumulation: ``"averaged"``, where the loss is the sum over samples divided
            by ``num_items_in_batch``, or ``"summed"``, where it is the mean over each micro-batch, which the Trainer
            then adds up.

    Returns: a ``transformers.TrainerCallback``.

    Raises:
        GradBatchError: transformers is not installed; at the start of training, gradients are accumulated and
            ``micro_batches`` does not say how; in the first step, what :meth:`GradientMonitor.step` raises.

    Edge cases: where the loss is a mean over a varying number of tokens, a sample's gradient is that of its own share
    of this mean, times the number of samples. The Trainer does not hand over the loss: records have none. In
    mixed precision, gradients are those without the scaler's factor.

    Example:
        ``Trainer(model, args, train_dataset=data, callbacks=[transformers_callback(monitor)])``
    """
    try:
        base = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise UsageError("transformers_callback needs transformers: pip install transformers") from error
    if micro_batches not in ("averaged", "summed", None):
        raise UsageError(f"micro_batches is {micro_batches!r}; it is 'averaged' or 'summed'")
    kind = type("TransformersMonitor", (_TransformersHooks, base), {})
    return kind(_Open(monitor), micro_batches)


def lightning_callback(
    monitor: GradientMonitor, *, ids: Callable[[Any], Tensor | Sequence[int]] | None = None
) -> Any:
    """A callback for Lightning's ``Trainer`` that measures its steps.

    Args:
        monitor: of the module that ``training_step`` calls: the ``LightningModule`` itself where that is
            ``self(x)``, or ``lit.network`` where it is ``self.network(x)``. Its ``every`` counts optimizer steps.
        ids: gives the samples' ids for a batch of the loader.

    Returns: a callback, whose state (the running noise scales) goes into checkpoints.

    Raises:
        UsageError: neither ``lightning`` nor ``pytorch_lightning`` is installed, or, at the start of training, the
            optimization is manual or there are several optimizers.

    Edge cases: ``training_step`` returns the mean over samples, or ``None`` for batches that are left out. Accumulated
    batches are one, whose loss is the mean of theirs; in mixed precision, gradients are those without the scaler's
    factor.

    Example:
        ``Trainer(callbacks=[lightning_callback(monitor)])``
    """
    # Of both packages, that which the program uses already: callbacks of the one are none to the other.
    for name in sorted(LIGHTNING, key=lambda name: name not in sys.modules):
        try:
            base = importlib.import_module(name).Callback
        except ImportError:
            continue
        return type("LightningMonitor", (_LightningHooks, base), {})(_Open(monitor), ids)
    raise UsageError("lightning_callback needs Lightning: pip install lightning")


class _Open:
    """A ``with`` block around a step that is entered in one hook and left in another."""

    def __init__(self, monitor: GradientMonitor) -> None:
        self.monitor = monitor
        self.step = MonitoredStep(0, False)
        self._block: AbstractContextManager[MonitoredStep] | None = None

    def enter(self, number: int, reduction: Literal["mean", "sum"] = "mean") -> None:
        self.abandon()
        self._block = self.monitor.step(number, loss_reduction=reduction)
        self.step = self._block.__enter__()

    def leave(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    def abandon(self) -> None:
        """Let go of a step that an error has ended."""
        block, self._block = self._block, None
        if block is not None:
            with suppress(_Abandoned):
                block.__exit__(_Abandoned, _Abandoned(), None)

    @property
    def is_open(self) -> bool:
        return self._block is not None


class _Abandoned(Exception):
    """A step that came to no end."""


class _TransformersHooks:
    def __init__(self, open_: _Open, micro_batches: str | None) -> None:
        self._open, self._micro_batches = open_, micro_batches

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.gradient_accumulation_steps > 1 and self._micro_batches is None:
            raise UsageError(
                f"the Trainer accumulates {args.gradient_accumulation_steps} micro-batches a step; say "
                "transformers_callback(monitor, micro_batches='averaged') where the loss is divided by "
                "num_items_in_batch, or 'summed' where it is a mean over each micro-batch"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        averaged = self._micro_batches == "averaged"
        self._open.enter(state.global_step, "sum" if averaged else "mean")
        # Divided by the samples of all micro-batches, of which the last may be smaller.
        self._open.step.averaged = averaged

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        self._open.step.loss_scale = _factor(getattr(optimizer, "scaler", None))
        self._open.leave()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._open.abandon()


class _LightningHooks:
    def __init__(self, open_: _Open, ids: Callable[[Any], Tensor | Sequence[int]] | None) -> None:
        self._open, self._ids_of = open_, ids
        self._ids: list[int] = []
        self._of_batch: list[int] = []
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise UsageError(
                "lightning_callback is for automatic optimization with one optimizer; use GradientMonitor.step in "
                "training_step, around manual_backward"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._open.is_open:
            self._open.enter(trainer.global_step)
            self._ids, self._losses = [], []
        if self._ids_of is not None and self._open.step.measured:
            self._of_batch = ids_of(self._ids_of(batch)).tolist()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._open.step.measured:
            self._losses.append(loss.detach())
            self._ids += self._of_batch

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = self._open.step
        if step.measured and not self._losses:
            self._open.abandon()  # training_step returned None, to leave the batch out
        elif step.measured:
            factor = _factor(getattr(trainer.precision_plugin, "scaler", None))
            step.loss_scale = factor / trainer.accumulate_grad_batches
            step.ids = self._ids if self._ids_of is not None else None
            step.loss = sum(float(loss) for loss in self._losses) / len(self._losses) / step.loss_scale
        self._open.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._open.abandon()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._open.abandon()

    def state_dict(self) -> dict[str, Any]:
        return self._open.monitor.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._open.monitor.load_state_dict(state_dict)


def _factor(scaler: Any) -> float:
    return 1.0 if scaler is None else float(scaler.get_scale())
