"""Opacus on gradbatch's gradients: its engine, optimizers, loaders and accountants, with any model and no wrapper.

Opacus adds the noise, samples and accounts. It is handed per-sample gradients (:func:`grad_samples`, :func:`backward`)
and clips them; or, where the optimizer is one for ghost clipping, their clipped sum (:func:`make_private`,
:func:`backward`), which is faster and makes nothing of size ``samples × parameters``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradbatch.api import Reduction, compute, extend, per_sample_grads
from gradbatch.errors import UsageError
from gradbatch.privacy.accumulation import Accumulation, names_of
from gradbatch.privacy.clipping import clipped_gradients
from gradbatch.privacy.model_check import refuse_findings
from gradbatch.quantities import BatchGrad

if TYPE_CHECKING:
    from opacus import PrivacyEngine
    from opacus.optimizers import DPOptimizer


def make_private(
    engine: PrivacyEngine,
    model: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    *,
    noise_multiplier: float,
    max_grad_norm: float,
    noise_generator: torch.Generator | None = None,
) -> tuple[DPOptimizer, DataLoader[Any]]:
    """Prepare a model, an optimizer and a loader for Opacus, as its engine does with ``grad_sample_mode="ghost"``.

    .. code-block:: python

        engine = opacus.PrivacyEngine()
        optimizer, loader = make_private(engine, model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)
        for x, y in loader:
            backward(optimizer, model, F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        engine.get_epsilon(delta=1e-5)

    The model stays what it is, extended. Models that Opacus' validator refuses (attention, LSTMs) are taken; those that
    :func:`gradbatch.privacy.check_model` finds at fault are not.

    Args:
        engine: accounts for the steps; secure mode is its own.
        model: any module.
        optimizer: over parameters of the model.
        data_loader: each record of its dataset will be in a batch with probability one over its number of batches.
        noise_multiplier, max_grad_norm, noise_generator: as for the engine.

    Returns:
        An optimizer of Opacus' that adds noise to clipped sums and divides by the expected batch size, for
        :func:`backward`; and a loader that draws by Poisson sampling.

    Raises:
        UsageError: the model cannot be trained privately.
    """
    from opacus.data_loader import DPDataLoader
    from opacus.optimizers import DPOptimizerFastGradientClipping

    refuse_findings(model, optimizer)
    extend(model)
    loader = DPDataLoader.from_data_loader(data_loader, generator=engine.secure_rng)
    private = DPOptimizerFastGradientClipping(
        optimizer=optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=int(len(loader.dataset) * loader.sample_rate),
        generator=engine.secure_rng if engine.secure_mode else noise_generator,
        secure_mode=engine.secure_mode,
    )
    private.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=loader.sample_rate))
    return private, loader


def backward(
    optimizer: DPOptimizer, model: nn.Module, losses: Tensor, *, sample_ids: Tensor | None = None
) -> None:
    """Leave what an optimizer of Opacus needs of a batch: ``p.grad_sample``, or the clipped sum in ``p.grad``.

    Args:
        optimizer: from :func:`make_private`, or from ``engine.make_private(..., grad_sample_mode="no_op",
            wrap_model=False)``, whatever its way of clipping. Its class decides: one for ghost clipping gets the sum.
        model: an extended model.
        losses: ``[N]``, one a sample; not averaged. An empty tensor needs no graph.
        sample_ids: as for :func:`gradbatch.backward`.

    Raises:
        UsageError: gradients of an earlier batch are still there (``optimizer.zero_grad()`` belongs after each step).
        GradBatchError: as :func:`gradbatch.backward`.

    Edge cases: Opacus clips NaN to NaN; in a clipped sum, a sample that is not finite adds nothing.
    """
    from opacus.optimizers import DPOptimizerFastGradientClipping

    names = names_of(model, optimizer)
    released = {parameter: name for parameter, name in names.items() if parameter.requires_grad}
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        Accumulation().check_free(released)
        bound = optimizer.max_grad_norm
        clipped_gradients(model, losses, bound, parameters=released.values(), sample_ids=sample_ids)
        return
    if len(losses):
        grads = per_sample_grads(model, losses, parameters=released.values(), sample_ids=sample_ids)
    else:
        grads = {name: parameter.new_zeros(0, *parameter.shape) for parameter, name in released.items()}
    _hand_over({parameter: grads[name] for parameter, name in released.items()})


@contextmanager
def grad_samples(
    model: nn.Module, *, loss_reduction: Reduction | None = None, sample_ids: Tensor | None = None
) -> Iterator[None]:
    """Let your own ``loss.backward()`` leave ``p.grad_sample`` for an optimizer of Opacus.

    .. code-block:: python

        gradbatch.extend(model)
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode="no_op", wrap_model=False,
        )
        for x, y in loader:
            with grad_samples(model, loss_reduction="mean"):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: an extended model.
        loss_reduction, sample_ids: as for :func:`gradbatch.compute`.

    Raises:
        UsageError: gradients of an earlier batch are still there (``optimizer.zero_grad()`` belongs after each step).
        GradBatchError: as :func:`gradbatch.compute`.
    """
    with compute(model, BatchGrad(), loss_reduction=loss_reduction, sample_ids=sample_ids) as results:
        yield
    grads = results[BatchGrad]
    _hand_over({parameter: grads[parameter] for parameter in model.parameters() if parameter in grads})


def _hand_over(grads: dict[nn.Parameter, Tensor]) -> None:
    for parameter in grads:
        if getattr(parameter, "grad_sample", None) is not None:
            raise UsageError(
                "there are per-sample gradients of an earlier batch: call optimizer.zero_grad() after each step. One "
                "step for several batches of Poisson sampling is not what is accounted for"
            )
    for parameter, grad in grads.items():
        parameter.grad_sample = grad  # type: ignore[attr-defined]
