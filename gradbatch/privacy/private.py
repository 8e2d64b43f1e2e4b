"""The object that stands between a model's losses and a plain optimizer: clips, adds noise, keeps account."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradbatch.errors import UsageError
from gradbatch.plans.contractions import Planner
from gradbatch.privacy.accounting import Accountant
from gradbatch.privacy.accumulation import Accumulation, names_of
from gradbatch.privacy.adaptive import ClippingBounds
from gradbatch.privacy.batches import BatchAtHand, Batches, batch_parts, empty_part
from gradbatch.privacy.clipping import Clipped, clipped_sums
from gradbatch.privacy.distributed import noise_of_rank, noised_sums, whole_parameters
from gradbatch.privacy.model_check import StateWatch
from gradbatch.privacy.noise import GaussianNoise
from gradbatch.privacy.ranks import Ranks
from gradbatch.privacy.sampling import PoissonLoader

# What is summed and noised together with gradients: how many samples were within their bounds.
_COUNTS = "counts"
# An optimizer takes the noise of one Private at a time.
_taken: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@dataclass(frozen=True)
class Schedule:
    """How batches are drawn, and how many.

    Args:
        expected_batch_size: ``B``, what sums are divided by.
        sample_rate: the chance of each record to be in a batch; ``None``: batches are not drawn by Poisson sampling.
        steps_at_most: how many steps the noise was chosen for; ``None``: any number.
    """

    expected_batch_size: float
    sample_rate: float | None
    steps_at_most: int | None = None


class Private:
    r"""Training whose every step is private; made by :func:`make_private`, which has an example.

    Each ``optimizer.step()`` takes the gradient

    .. math:: \frac1B \Bigl(\sum_n \min\bigl(1, \tfrac{C}{\lVert g_n \rVert}\bigr)\, g_n
        + \mathcal N(0, z^2 C^2 I)\Bigr)

    with the expected batch size ``B``, the bound ``C`` and the noise multiplier ``z``. Between two steps one batch of
    :attr:`loader` goes through :meth:`backward`, whole or in :meth:`parts`; whatever else is in ``p.grad`` then, or is
    missing, makes ``optimizer.step()`` raise :class:`UsageError` before anything is changed.

    The norm goes over the parameters that a step releases: those of the optimizer that are trainable. Trainable
    parameters of the model that the optimizer does not have get no gradient.

    Attributes:
        loader: batches to train on; each is a step, also an empty one.
        noise_multiplier: ``z``, of a step as a whole.
        accountant: of the steps taken.
        steps: how many were taken.
        non_finite: how many samples were left out so far because their gradient was not finite; a private number.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any,
        bounds: ClippingBounds,
        schedule: Schedule,
        *,
        noise_multiplier: float,
        noise: GaussianNoise,
        accountant: Accountant,
        delta: float | None,
        watch: StateWatch,
        planner: Planner | None,
        ranks: Ranks,
    ) -> None:
        if optimizer in _taken:
            raise UsageError("this optimizer is already private; close() the Private that it has first")
        self.loader = Batches(loader, self._opened, self._drawn)
        self.noise_multiplier, self.accountant = noise_multiplier, accountant
        self.steps = self.non_finite = 0
        self._model, self._optimizer, self._source = model, optimizer, loader
        self._bounds, self._schedule, self._noise = bounds, schedule, noise_of_rank(ranks, noise)
        self._delta, self._watch, self._planner = delta, watch, planner
        self._gradient, self._ranks = Accumulation(), ranks
        self._known = names_of(model, optimizer)
        self._batch = BatchAtHand()
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        _taken.add(optimizer)

    @property
    def max_norm(self) -> float | Mapping[str, float]:
        """The clipping bound, or bounds, at present."""
        return self._bounds.quantity.max_norm

    @property
    def expected_batch_size(self) -> float:
        """What the sum of a batch is divided by."""
        return self._schedule.expected_batch_size

    def backward(
        self, losses: Tensor, *, sample_ids: Tensor | None = None, loss_scale: float | None = None
    ) -> Clipped:
        """Clip the gradients of a batch, or of a part of one, and add their sum to ``p.grad``.

        Args:
            losses: ``[N]``, one a sample, not scaled and not averaged; an empty tensor needs no graph.
            sample_ids: the sample of each loss, where records have several, or users several records (see
                :func:`gradbatch.backward`). A user must not be spread over parts.
            loss_scale: as for :func:`clipped_gradients`.

        Returns:
            Norms and factors. They are private: do not publish them, nor decide by them, without noise.

        Raises:
            UsageError: no batch of :attr:`loader` is at hand, it went through ``backward`` already, ``p.grad`` has
                something in it, or the forward changed a buffer or parameter.
            GradBatchError: as :func:`gradbatch.backward`. After an error everything is as it was.
        """
        with self._ranks.together("private.backward"):
            names = self._check_backward()
        # Two blocks: whole_parameters waits for all ranks.
        with whole_parameters(self._model), self._ranks.together("private.backward"):
            trainable = {name for name, p in self._model.named_parameters() if p.requires_grad}
            released = {parameter: name for parameter, name in names.items() if name in trainable}
            clipped, sums = clipped_sums(
                self._model,
                losses,
                self._bounds.quantity,
                None if len(released) == len(trainable) else list(released.values()),
                sample_ids,
                loss_scale,
                planner=self._planner,
            )
            self._batch.count(len(clipped.norms))
            self._gradient.check_same(released)
        self._gradient.add({parameter: sums[name] for parameter, name in released.items()})
        self._bounds.observe(clipped)
        self._batch.add(len(clipped.norms))
        self.non_finite += clipped.non_finite
        return clipped

    def parts(self, batch: Any, size: int) -> Iterator[Any]:
        """Split a batch that is too large for one forward; the step is that of the whole batch.

        Args:
            batch: of :attr:`loader`; tensors ``[N, ...]`` in tuples, lists and mappings.
            size: samples in a part.

        Yields:
            Parts of the same structure; one, for an empty batch. Each goes through :meth:`backward` once. Of several
            processes, all get as many, the last ones empty on some.

        Raises:
            UsageError: as the batch cannot be split.
        """
        with self._ranks.together("private.parts"):
            parts = list(batch_parts(batch, size))
        parts += [empty_part(batch)] * (self._ranks.largest(len(parts)) - len(parts))
        yield from parts

    def discard(self) -> None:
        """Drop the batch at hand, and what it left in ``p.grad``: after an error, or a loop left in its middle.

        It is not accounted for, since nothing of it is released. Whether to do so must not depend on the data.
        """
        self._gradient.discard()
        self._bounds.discard()
        self._batch.end()

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent by the steps taken so far, of neighbours that differ by adding or removing one record.

        Where ``sample_ids`` are users and :attr:`loader` draws users, a record is a user with all of theirs.

        Args:
            delta: between 0 and 1, well below one over the number of records; by default that of ``make_private``.

        Raises:
            UsageError: no ``delta``; or batches that are not drawn by Poisson sampling.
        """
        if self._schedule.sample_rate is None:
            raise UsageError(
                'with sampling="shuffle-unaccounted" no epsilon can be given: the batches are not drawn at random and '
                "independently; use privacy.poisson_loader"
            )
        delta = self._delta if delta is None else delta
        if delta is None:
            raise UsageError("epsilon needs a delta: pass it here or to make_private")
        return self.accountant.epsilon(delta)

    def close(self) -> None:
        """Let go of the optimizer, which then takes gradients as it finds them: not private any more."""
        self.discard()
        self._hook.remove()
        _taken.discard(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on exactly as if it had never stopped, but for model, optimizer and scheduler.

        Raises:
            UsageError: between drawing a batch and its step: the loader has handed it out already.
        """
        if self._batch.records is not None:
            raise UsageError(
                "the state is that between two steps: after optimizer.step() and before the next batch is drawn, or "
                "after private.discard(), with which the batch at hand is lost"
            )
        return {
            "accountant": self.accountant.state_dict(),
            "bounds": self._bounds.state_dict(),
            "loader": self._source.state_dict() if isinstance(self._source, PoissonLoader) else None,
            "noise": self._noise.state_dict(),
            "noise_multiplier": self.noise_multiplier,
            "non_finite": self.non_finite,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, with the same arguments of ``make_private``.

        Raises:
            UsageError: a batch was drawn and not stepped on; or bounds, noise or loader are other than those saved.
                Nothing is changed then.
        """
        before = self.state_dict()
        if state.keys() != before.keys():
            raise UsageError(f"no state of a Private: it has {sorted(state)}, expected are {sorted(before)}")
        try:
            self._load(state)
        except BaseException:
            self._load(before)
            raise

    # ------------------------------------------------------------------ what happens when

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["noise_multiplier"] != self.noise_multiplier:
            raise UsageError(
                f"the saved run has noise multiplier {state['noise_multiplier']}, this one {self.noise_multiplier}: "
                "make_private got other arguments"
            )
        self._bounds.load_state_dict(state["bounds"])
        self.accountant.load_state_dict(state["accountant"])
        self._noise.load_state_dict(state["noise"])
        if isinstance(self._source, PoissonLoader):
            self._source.load_state_dict(state["loader"])
        self.steps, self.non_finite = state["steps"], state["non_finite"]

    def _opened(self) -> None:
        if self._gradient:
            raise UsageError(
                "a batch is under way: call optimizer.step(), or private.discard() to drop it, before private.loader "
                "starts anew"
            )
        self._batch.end()

    def _drawn(self, records: int) -> None:
        self._batch.draw(records)
        self._watch.reset()

    def _check_backward(self) -> dict[nn.Parameter, str]:
        self._batch.count(0)
        names = names_of(self._model, self._optimizer, self._known)
        self._gradient.check_untouched(names)
        if not self._gradient:
            self._gradient.check_free(names)
        if changed := self._watch.changed():
            raise UsageError(
                f"{', '.join(changed)}: changed since the batch was drawn, so that the samples may be in it without "
                "noise. Put the module that does it in eval mode, replace it, or name it in public_state of "
                "make_private if the data are not in it"
            )
        return names

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._ranks.together("optimizer.step()", steps=self.steps, max_norm=self.max_norm):
            self._check_step(args, kwargs)
        std = self._bounds.noise_multiplier * self._bounds.quantity.sensitivity
        sums: dict[Any, Tensor] = {**self._gradient.sums}
        stds, counts = [std] * len(sums), self._bounds.counts()
        try:
            for counted, std_of_count in counts:
                sums[_COUNTS] = counted
                stds.append(std_of_count)
            totals = noised_sums(self._ranks, sums, self._noise, stds)
            self._gradient.release(totals, self._schedule.expected_batch_size)
            if counts:
                self._bounds.update(totals[_COUNTS])
            if self._schedule.sample_rate is not None:
                self.accountant.step(
                    noise_multiplier=self.noise_multiplier, sample_rate=self._schedule.sample_rate
                )
        except BaseException:
            # Sums with noise in part of them are neither private nor of use.
            self.discard()
            raise
        self._gradient.hand_over()
        self._batch.end()
        self.steps += 1

    def _check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(arg is not None for arg in (*args[1:], *kwargs.values())):
            raise UsageError(
                "optimizer.step(closure) computes gradients by itself; call private.backward, then optimizer.step()"
            )
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "a GradScaler would divide the private gradient by its scale: call optimizer.step() without it, and "
                "pass loss_scale to private.backward"
            )
        if self._batch.records is None:
            raise UsageError(
                "optimizer.step() without a batch: take one from private.loader, call private.backward on its losses"
            )
        if not self._gradient:
            raise UsageError(
                "optimizer.step() before private.backward: whatever is in p.grad is not clipped, as a plain "
                "loss.backward() leaves it. Call private.backward on the losses of the batch, one a record"
            )
        self._batch.check_complete()
        most = self._schedule.steps_at_most
        if most is not None and self.steps >= most:
            raise UsageError(
                f"the noise was chosen for {most} steps, and they are taken: one more would exceed target_epsilon. Ask "
                "make_private for more epochs, or pass noise_multiplier for a run without an end"
            )
        names = names_of(self._model, self._optimizer, self._known)
        self._gradient.check_untouched(names)
        self._gradient.check_covers(names)
