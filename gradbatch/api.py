"""The user's way in: extend a model, and get quantities of per-sample gradients from one backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from gradbatch.capture.direct import capture_losses
from gradbatch.capture.hooks import ForwardRecorder, install, needs_recorder, recorder_of, remove
from gradbatch.capture.live import LiveCapture
from gradbatch.capture.memory import Memory, forget, memory_of
from gradbatch.errors import UsageError
from gradbatch.factors import PerSampleGrad
from gradbatch.plans.contractions import Planner
from gradbatch.quantities import BatchGrad, Quantity
from gradbatch.reduction import Reducer
from gradbatch.requests import allows_coupling, check_losses, check_out, check_request
from gradbatch.results import QuantityResult, Results
from gradbatch.selection import Selection, select

Model = TypeVar("Model", bound=nn.Module)
Reduction = Literal["mean", "sum"]

# Attributes set by attach=True, to be cleared on the next entry; and models inside a compute context.
_attached: weakref.WeakKeyDictionary[nn.Module, list[tuple[weakref.ref[nn.Parameter], str]]]
_attached = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def extend(model: Model, batch_dim: int = 0, remember: bool = True) -> Model:
    """Prepare a model, in place, for per-sample gradients.

    Puts a forward hook on every layer with parameters. Class, parameters, ``state_dict`` and numerics stay as they
    are, and nothing is kept on the model. Call it again after adding layers; calling it twice is harmless.

    Args:
        model: any module.
        batch_dim: axis of the model's inputs and outputs that runs over samples. Used by :func:`compute` alone;
            :func:`backward` finds the samples by the losses.
        remember: rely on where the samples lay in earlier steps with the same operations, once two steps agree and
            where the operations alone imply it for the shapes at hand, and measure again every 64 steps. ``False``:
            measure in every step.

    Returns:
        The same model.

    Raises:
        UsageError: not a module, a compiled ``ScriptModule``, or a negative ``batch_dim``.

    Example:
        >>> import torch, gradbatch
        >>> model = gradbatch.extend(torch.nn.Linear(3, 2))
        >>> losses = model(torch.randn(4, 3)).square().sum(1)
        >>> gradbatch.per_sample_grads(model, losses)["weight"].shape
        torch.Size([4, 2, 3])
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"extend takes a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(batch_dim, int) or batch_dim < 0:
        raise UsageError(f"batch_dim is {batch_dim!r}; it is an axis counted from the front, 0 or more")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UsageError(
            "a torch.jit.ScriptModule takes no Python hooks; extend the model before scripting it"
        )
    for module in model.modules():
        if module is model or needs_recorder(module):
            install(module, batch_dim, remember)
    forget(model)
    return model


def retract(model: Model) -> Model:
    """Undo :func:`extend`: take the hooks off every layer of the model.

    Args:
        model: an extended model, or any other.

    Returns:
        The same model.
    """
    for module in model.modules():
        remove(module)
    forget(model)
    _clear_attached(model)
    return model


def backward(
    model: nn.Module,
    losses: Tensor,
    *quantities: Quantity,
    reduction: Reduction | None = None,
    parameters: str | Iterable[str] | None = None,
    attach: bool = False,
    retain_graph: bool | None = None,
    sample_ids: Tensor | None = None,
    samples_coupled: Literal["refuse", "allow"] = "refuse",
    planner: Planner | None = None,
    out: Results | None = None,
) -> Results:
    """Compute quantities of the per-sample gradients of a vector of losses.

    Args:
        model: an extended model.
        losses: ``[N]``, one loss a sample (``reduction="none"``, summed over a sample's own positions).
        quantities: what to compute, e.g. ``BatchGrad()``.
        reduction: ``"mean"`` or ``"sum"``: also leave in ``p.grad`` what ``losses.mean().backward()`` or
            ``losses.sum().backward()`` would. ``None``: leave ``p.grad`` and the graph as they are.
        parameters: name pattern or patterns (``"head.*"``) of the parameters to compute quantities of.
        attach: also set each result as an attribute of its parameter, under the quantity's name.
        retain_graph: ``True``: keep the graph for a further backward pass. ``False``: it is freed, as by any backward;
            without ``reduction`` on the way, which saves memory. ``None``: it is freed by the pass that ``reduction``
            asks for, and kept without.
        sample_ids: where a sample has several losses (packed sequences, nodes of graphs, records of a user), the sample
            of each, ``[len(losses)]``, whole numbers from 0. The gradient of a sample is the sum over its losses.
        samples_coupled: what to do where a sample's loss depends on others (statistics over the batch), or might.
            ``"allow"``: take the gradient of each loss as it stands, which is no gradient of one sample alone.
        planner: budget and forced plans of the evaluation.
        out: results of an earlier step that are needed no more: ``BatchGrad`` writes to their memory where shapes,
            dtypes and devices fit. On a CPU that is several times faster than fresh memory.

    Returns:
        Results by quantity and parameter name. Gradients are those of each sample's own loss, never scaled by 1/N.

    Raises:
        UsageError: the model is not extended or all frozen, the losses are not ``[N]`` with a graph, an unknown
            reduction, no quantity, a pattern without a match.
        UnsupportedLayer: a part of the model hides how parameters are used.
        CoupledSamples: a sample's gradient depends on other samples.
        StaleCapture: a tensor was changed between forward and backward.
        RuleError, QuantityError: a layer rule or a quantity failed, or returned something else than it should.

    Edge cases: an empty batch gives empty results; a parameter that no loss depends on has zero gradients; frozen
    parameters have no results. If an error is raised, ``p.grad`` is as it was.

    Example:
        >>> import torch, gradbatch
        >>> model = gradbatch.extend(torch.nn.Linear(2, 1, bias=False))
        >>> losses = model(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).squeeze(1)
        >>> gradbatch.backward(model, losses, gradbatch.BatchL2Grad())[gradbatch.BatchL2Grad].total()
        tensor([25.,  1.])
    """
    check_request(model, quantities, attach)
    if reduction not in (None, "mean", "sum"):
        raise UsageError(f'reduction is {reduction!r}; it is "mean", "sum", or None to leave p.grad alone')
    check_out(out)
    selection = select(model, parameters, allows_coupling(samples_coupled))
    check_losses(losses)
    _clear_attached(model)
    planner, results = planner or Planner(), Results()
    reducer = _Reducer(quantities, selection, planner, out)
    keep_graph = reduction is not None or retain_graph is not False
    memory = _memory(model)
    capture_losses(losses, selection.names, planner, memory, sample_ids, reducer.take, keep_graph)
    results.fill(reducer.finish())
    if reduction is not None:
        weights = torch.ones_like(losses)
        torch.autograd.backward(
            losses,
            weights / max(len(losses), 1) if reduction == "mean" else weights,
            retain_graph=bool(retain_graph),
        )
    if attach:
        _attach(model, results, selection)
    return results


def per_sample_grads(
    model: nn.Module,
    losses: Tensor,
    *,
    parameters: str | Iterable[str] | None = None,
    sample_ids: Tensor | None = None,
    samples_coupled: Literal["refuse", "allow"] = "refuse",
) -> dict[str, Tensor]:
    """The gradient of each sample's loss with respect to each parameter.

    Args:
        model: an extended model.
        losses: ``[N]``, one loss a sample.
        parameters, sample_ids, samples_coupled: as for :func:`backward`.

    Returns:
        ``[N, *shape]`` by parameter name, in at least float32. ``p.grad`` stays as it is.

    Raises:
        GradBatchError: as :func:`backward`.
    """
    options = {"parameters": parameters, "sample_ids": sample_ids, "samples_coupled": samples_coupled}
    return dict(backward(model, losses, BatchGrad(), **options)[BatchGrad])  # type: ignore[arg-type]


@contextmanager
def compute(
    model: nn.Module,
    *quantities: Quantity,
    loss_reduction: Reduction | None = None,
    parameters: str | Iterable[str] | None = None,
    attach: bool = False,
    sample_ids: Tensor | None = None,
    samples_coupled: Literal["refuse", "allow"] = "refuse",
    planner: Planner | None = None,
    out: Results | None = None,
) -> Iterator[Results]:
    """Compute quantities from the user's own ``loss.backward()``.

    Inside the context, call the model and run the backward pass of a scalar loss; when it is left, the results are
    there, and ``p.grad`` is as always. Several backward passes over one forward add up, as they do in ``p.grad``; a
    backward over a new forward is a further micro-batch, whose samples come after the earlier ones; several forwards
    joined by one loss share their samples.

    Args:
        model: an extended model; its outputs have the samples on ``batch_dim`` (see :func:`extend`).
        quantities: what to compute, e.g. ``BatchGrad()``.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss is made of the samples' own losses. gradbatch cannot see
            that; with another normalisation (the mean over a varying number of tokens) use :func:`backward`.
            ``losses.backward(weights)`` of a vector is a ``"sum"``, of losses that are multiplied with the weights.
        parameters: name pattern or patterns of the parameters to compute quantities of.
        attach: also set each result as an attribute of its parameter, under the quantity's name.
        sample_ids: where a sample has several rows of the outputs, the sample of each row, whole numbers from 0;
            the same for every forward in the context. ``"mean"`` is then the mean over rows.
        samples_coupled: as for :func:`backward`.
        planner, out: as for :func:`backward`.

    Yields:
        Results, to be read once the context is left.

    Raises:
        GradBatchError: as :func:`backward`; also where no forward or no backward pass happened in the context, where
            something outside of the model's forward contributes to a gradient, where a mean was promised and the pass
            started from a vector, and inside another context of the same model. Then there are no results, but
            ``p.grad`` is what the user's backward made it.

    Edge cases: a pass that reaches no parameter (``torch.autograd.grad(loss, input)``) does not count.

    Example:
        >>> import torch, gradbatch
        >>> model = gradbatch.extend(torch.nn.Linear(3, 2))
        >>> with gradbatch.compute(model, gradbatch.BatchGrad(), loss_reduction="mean") as results:
        ...     model(torch.randn(4, 3)).square().sum(1).mean().backward()
        >>> torch.allclose(results[gradbatch.BatchGrad]["weight"].mean(0), model.weight.grad)
        True
    """
    check_request(model, quantities, attach)
    check_out(out)
    if loss_reduction not in ("mean", "sum"):
        raise UsageError(
            f'loss_reduction is {loss_reduction!r}; say "mean" or "sum": how your scalar loss is made of the samples\' '
            "losses (gradbatch cannot see it). With a vector of losses, use gradbatch.backward instead"
        )
    if parameters is not None and not isinstance(parameters, str):
        parameters = list(parameters)  # read at each forward, so no generator
    if model in _watched:
        raise UsageError(
            "compute: already inside a compute context of this model; ask for all quantities at once"
        )
    coupled = allows_coupling(samples_coupled)
    select(model, parameters, coupled)
    _clear_attached(model)
    planner = planner or Planner()
    live = LiveCapture(
        model,
        lambda: select(model, parameters, coupled).names,
        _recorder(model).batch_dim,
        planner,
        mean=loss_reduction == "mean",
        memory=_memory(model),
        sample_ids=sample_ids,
    )
    results = Results()
    _watched.add(model)
    try:
        live.open()
        yield results
        selection = select(model, parameters, coupled)
        reducer = _Reducer(quantities, selection, planner, out)
        for parameter, grad in live.results().items():
            reducer.take(parameter, grad)
        results.fill(reducer.finish())
    finally:
        _watched.discard(model)
        live.close()
    if attach:
        _attach(model, results, selection)


class _Reducer:
    """Reduces the gradients of parameters as they come, to results under the parameters' names."""

    def __init__(
        self, quantities: Sequence[Quantity], selection: Selection, planner: Planner, out: Results | None
    ) -> None:
        earlier = [out[quantity] if out is not None and quantity in out else {} for quantity in quantities]
        self._selection, self._names = selection, selection.names.parameters
        self._reducer = Reducer(quantities, planner.budget, earlier)

    def take(self, parameter: nn.Parameter, grad: PerSampleGrad) -> None:
        self._reducer.take(self._names[parameter], grad)

    def finish(self) -> list[QuantityResult]:
        reduced = self._reducer.finish(list(self._names.values()))
        return [QuantityResult(quantity, tensors, self._selection.aliases) for quantity, tensors in reduced]


def _recorder(model: nn.Module) -> ForwardRecorder:
    return next(recorder for recorder in map(recorder_of, model.modules()) if recorder is not None)


def _memory(model: nn.Module) -> Memory | None:
    return memory_of(model) if _recorder(model).remember else None


def _attach(model: nn.Module, results: Results, selection: Selection) -> None:
    attached = _attached.setdefault(model, [])
    for quantity, result in results.items():
        for parameter, names in selection.aliases.items():
            setattr(parameter, quantity.name, result[names[0]])
            attached.append((weakref.ref(parameter), quantity.name))


def _clear_attached(model: nn.Module) -> None:
    for reference, name in _attached.pop(model, []):
        parameter = reference()
        if parameter is not None and hasattr(parameter, name):
            delattr(parameter, name)
