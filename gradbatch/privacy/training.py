"""Differentially private training in one call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradbatch.api import extend
from gradbatch.errors import UsageError
from gradbatch.plans.contractions import Planner
from gradbatch.privacy.accounting import Accountant, noise_multiplier as noise_multiplier_for
from gradbatch.privacy.accumulation import names_of
from gradbatch.privacy.adaptive import AdaptiveClipping, ClippingBounds
from gradbatch.privacy.distributed import fingerprint, whole_parameters
from gradbatch.privacy.model_check import StateWatch, data_independent_state, refuse_findings
from gradbatch.privacy.noise import GaussianNoise
from gradbatch.privacy.private import Private, Schedule
from gradbatch.privacy.ranks import Ranks
from gradbatch.privacy.sampling import PoissonLoader, PoissonSampler
from gradbatch.quantities import ClippedSum
from gradbatch.quantities.clipping import Style


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    *,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    delta: float | None = None,
    epochs: int = 1,
    max_norm: float | Mapping[str, float] = 1.0,
    per_layer: bool = False,
    style: Style = "hard",
    stability: float = 0.01,
    adaptive: AdaptiveClipping | None = None,
    noise: GaussianNoise | None = None,
    accountant: Literal["pld", "rdp"] = "pld",
    sampling: Literal["poisson", "shuffle-unaccounted"] = "poisson",
    public_state: Iterable[str] = (),
    planner: Planner | None = None,
) -> Private:
    """Make every step of a plain optimizer differentially private.

    Guarantees are those of neighbouring data sets that differ by adding or removing one record; where the records of
    ``loader`` are users (``sample_ids`` in :meth:`Private.backward`), by one user with all of theirs.

    Where ``torch.distributed`` is initialised, all its ranks train one model together and make the same calls: each has
    its share of every batch, and the noise is in the sum once. ``DistributedDataParallel`` is not needed, and harmless;
    ``fully_shard`` comes before the optimizer, as ever.

    Args:
        model: the model; it is extended.
        optimizer: any of torch's, over parameters of the model. It keeps working as ever, with schedulers and several
            groups; its ``step()`` adds the noise.
        loader: from :func:`poisson_loader`.
        noise_multiplier: standard deviation of the noise over the most that one record moves the sum of a batch. Give
            this or ``target_epsilon``. ``0``: clipping without privacy.
        target_epsilon: the epsilon to be spent, at ``delta``, by ``epochs`` passes; the noise is chosen for it, and
            more steps are refused.
        delta: of ``target_epsilon`` and :meth:`Private.epsilon`; well below one over the number of records.
        epochs: how many passes over ``loader`` the noise is chosen for.
        max_norm, per_layer, style, stability: how gradients are clipped; see :class:`~gradbatch.ClippedSum`.
        adaptive: let ``max_norm`` follow a quantile of the norms.
        noise: where the noise comes from; its own, not repeatable, by default.
        accountant: ``"pld"``, tight, or ``"rdp"``; see :class:`Accountant`.
        sampling: ``"shuffle-unaccounted"`` takes any ``DataLoader`` with a fixed batch size; then no epsilon is given.
        public_state: name patterns of buffers and parameters that the forward may change, because the data are not in
            what they become; see :func:`check_model`.
        planner: budget and plans of the evaluation.

    Returns:
        What draws the batches, takes the losses, and says what was spent.

    Raises:
        UsageError: arguments that contradict each other, a loader that cannot be accounted for, an optimizer that is
            private already, or a model that breaks privacy (see :func:`check_model`).
        DistributedError: another rank failed, is gone, or has other arguments or parameters.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> from gradbatch import privacy
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(0, 2, (100,)))
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> loader = privacy.poisson_loader(data, sample_rate=0.1, steps=5)
        >>> private = privacy.make_private(model, optimizer, loader, noise_multiplier=1.0, max_norm=0.5)
        >>> for x, y in private.loader:
        ...     norms = private.backward(F.cross_entropy(model(x), y, reduction="none")).norms
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> private.steps
        5

    References:
        Deep Learning with Differential Privacy (Abadi et al., 2016), https://arxiv.org/abs/1607.00133
    """
    with whole_parameters(model):
        pass  # after a forward, fully_shard may hold whole parameters in place of the optimizer's
    ranks = Ranks()
    with ranks.together("make_private"):
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"the optimizer is a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        schedule = _schedule(loader, sampling, epochs, target_epsilon is not None, ranks)
        _warn_of(delta, schedule)
        if noise_multiplier is None or target_epsilon is not None:
            noise_multiplier = _noise_for(schedule, noise_multiplier, target_epsilon, delta, accountant)
        if not 0 <= noise_multiplier < float("inf"):
            raise UsageError(f"noise_multiplier is {noise_multiplier}; it is a number, 0 or more")
        refuse_findings(model, optimizer, public_state := list(public_state))
        trainable = [name for p, name in names_of(model, optimizer).items() if p.requires_grad]
        if not trainable:
            raise UsageError("no parameter of the optimizer is trainable")
        quantity = ClippedSum(max_norm, per_layer, style, stability)
        quantity.grouped(trainable)
        private = Private(
            extend(model),
            optimizer,
            loader,
            ClippingBounds(quantity, trainable, adaptive, schedule.expected_batch_size, noise_multiplier),
            schedule,
            noise_multiplier=noise_multiplier,
            noise=noise or GaussianNoise(),
            accountant=Accountant(kind=accountant),
            delta=delta,
            watch=StateWatch(model, [*public_state, *data_independent_state(model)]),
            planner=planner,
            ranks=ranks,
        )
    try:
        facts = {"noise_multiplier": noise_multiplier, "max_norm": max_norm, "schedule": schedule}
        with ranks.together("make_private", **facts, parameters=fingerprint(model.parameters())):
            return private
    except BaseException:
        private.close()
        raise


def _warn_of(delta: float | None, schedule: Schedule) -> None:
    """Warn where a mechanism that publishes a record or two as they are would be private enough."""
    if delta is None or not schedule.sample_rate:
        return
    records = schedule.expected_batch_size / schedule.sample_rate
    if delta * records >= 1:
        warnings.warn(
            f"make_private: delta is {delta:g}, with {records:.0f} records. To publish one of them outright has a "
            f"delta of {1 / records:.2g}; take it well below that",
            stacklevel=4,
        )


def _schedule(loader: Any, sampling: str, epochs: int, is_planned: bool, ranks: Ranks) -> Schedule:
    """How batches are drawn, and for how many steps noise is chosen."""
    if sampling not in ("poisson", "shuffle-unaccounted"):
        raise UsageError(f'sampling is {sampling!r}; it is "poisson" or "shuffle-unaccounted"')
    if isinstance(loader, PoissonLoader):
        draws = loader.batch_sampler
        if isinstance(draws, PoissonSampler) and draws.world_size != ranks.size:
            raise UsageError(
                f"each batch of this loader is dealt out to {draws.world_size} ranks, but there are {ranks.size}; make "
                "it after torch.distributed is initialised, or say rank= and world_size="
            )
        most = epochs * len(loader) if is_planned else None
        return Schedule(loader.expected_batch_size, loader.sample_rate, most)
    if sampling == "poisson":
        raise UsageError(
            f"this {type(loader).__name__} does not draw its batches by Poisson sampling, which is what epsilon is "
            "computed for: use privacy.poisson_loader(dataset, expected_batch_size=…). To train without a guarantee, "
            'say sampling="shuffle-unaccounted"'
        )
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise UsageError('sampling="shuffle-unaccounted" takes a torch DataLoader with a batch_size')
    return Schedule(float(loader.batch_size * ranks.size), None)


def _noise_for(
    schedule: Schedule,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    delta: float | None,
    accountant: Literal["pld", "rdp"],
) -> float:
    if target_epsilon is None or noise_multiplier is not None:
        raise UsageError("give either noise_multiplier or target_epsilon (with delta and epochs)")
    if schedule.sample_rate is None or schedule.steps_at_most is None:
        raise UsageError('sampling="shuffle-unaccounted" has no epsilon to aim at; give noise_multiplier')
    if delta is None:
        raise UsageError("target_epsilon needs a delta, well below one over the number of records")
    return noise_multiplier_for(
        target_epsilon=target_epsilon,
        delta=delta,
        sample_rate=schedule.sample_rate,
        steps=schedule.steps_at_most,
        accountant=accountant,
    )
