"""What in a model or an optimizer breaks privacy, or the guarantee's assumptions, before the first step is made."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from gradbatch.capture.records import couples_samples
from gradbatch.errors import UsageError
from gradbatch.privacy.distributed import is_sharded


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a model, where, and how to mend it.

    Args:
        where: path of the module, or name of the parameter or buffer.
        problem: what it does.
        fix: what to do.
        breaks: whether no guarantee can be given with it, so that :func:`make_private` refuses.
    """

    where: str
    problem: str
    fix: str
    breaks: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}. {self.fix}"


def check_model(
    model: nn.Module,
    *inputs: Any,
    optimizer: Optimizer | None = None,
    public_state: Iterable[str] = (),
) -> list[Finding]:
    """Name what breaks privacy in a model, and how to mend it.

    What is found by looking: layers that normalise over the batch; statistics of the data that a model keeps in buffers
    (they are saved with it, without noise); embeddings that renormalise the rows that a batch looks up; parameters of
    the optimizer that no clipping would cover. With ``inputs``, a copy of the model is also run once, and what
    that changes in it is named. What a module keeps elsewhere than in parameters and buffers is not seen.

    Args:
        model: any module, in the mode in which it will be trained.
        inputs: arguments of one forward.
        optimizer: of the model.
        public_state: name patterns of buffers and parameters that a forward may change because the data are not in what
            they become (a step counter). Those of spectral normalisation are known to be such.

    Returns:
        What was found, what breaks privacy first; empty if there is nothing.

    Example:
        >>> import torch
        >>> from gradbatch import privacy
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> for finding in privacy.check_model(model):
        ...     print(finding)
        1 (BatchNorm1d): normalises over the batch, so that samples cannot be clipped one by one, and keeps running
        statistics of them without noise. Use GroupNorm or LayerNorm instead, or put it in eval mode for good
    """
    public = [*public_state, *data_independent_state(model)]
    by_path = {path: list(_of_module(path, module)) for path, module in model.named_modules()}
    found = [finding for findings in by_path.values() for finding in findings]
    if optimizer is not None:
        found += _of_optimizer(model, optimizer)
    if inputs:
        found += [f for f in _of_forward(model, inputs, public) if not by_path[f.where.rpartition(".")[0]]]
    return sorted(found, key=lambda finding: not finding.breaks)


def refuse_findings(model: nn.Module, optimizer: Optimizer, public_state: Iterable[str] = ()) -> None:
    """Raise :class:`UsageError` for what :func:`check_model` finds to break privacy."""
    findings = check_model(model, optimizer=optimizer, public_state=public_state)
    if broken := [str(finding) for finding in findings if finding.breaks]:
        raise UsageError("this model cannot be trained privately as it stands:\n  " + "\n  ".join(broken))


class StateWatch:
    """Whether parameters or buffers of a model are changed between two moments.

    Args:
        model: the model.
        public: name patterns of those that may change.
    """

    def __init__(self, model: nn.Module, public: Iterable[str]) -> None:
        self._model, self._public = model, list(public)
        self.reset()

    def reset(self) -> None:
        """Take the present state for unchanged."""
        self._seen = dict(self._state())
        # While fully_shard has gathered them, other tensors stand for its parameters.
        self._sharded = {name for name, (tensor, _) in self._seen.items() if is_sharded(tensor)}

    def changed(self) -> list[str]:
        """Names of what was changed in place or replaced since."""
        changed = []
        for name, (tensor, version) in self._state():
            before = self._seen.get(name)
            same = before is not None and before[0] is tensor and before[1] == version
            allowed = name in self._sharded or any(fnmatchcase(name, pattern) for pattern in self._public)
            if not same and not allowed:
                changed.append(name)
        return changed

    def _state(self) -> Iterator[tuple[str, tuple[Tensor, int]]]:
        for tensors in (self._model.named_buffers(), self._model.named_parameters()):
            for name, tensor in tensors:
                yield name, (tensor, 0 if tensor.is_inference() else tensor._version)


def data_independent_state(model: nn.Module) -> list[str]:
    """Names of buffers that a forward in training mode computes from parameters alone."""
    names = []
    for path, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()
        own = ["_u", "_v"] if isinstance(module, _SpectralNorm) else []
        own += [
            f"{hook.name}{end}" for hook in hooks if isinstance(hook, SpectralNorm) for end in ("_u", "_v")
        ]
        names += [f"{path}.{name}" if path else name for name in own]
    return names


def _of_module(path: str, module: nn.Module) -> Iterator[Finding]:
    where = f"{path or 'the model itself'} ({type(module).__name__})"
    keeps = isinstance(module, _NormBase) and module.training and module.running_mean is not None
    if couples_samples(module):
        assert isinstance(module, _BatchNorm)
        yield Finding(
            where,
            "normalises over the batch, so that samples cannot be clipped one by one"
            + (", and keeps running statistics of them without noise" if keeps else ""),
            "Use GroupNorm or LayerNorm instead"
            + (", or put it in eval mode for good" if module.running_mean is not None else ""),
        )
    elif keeps:
        yield Finding(
            where,
            "keeps running statistics of the samples, which no noise covers",
            "Use track_running_stats=False, or put it in eval mode for good",
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            yield Finding(
                where,
                "renormalises in place the rows that a batch looks up (max_norm), which shows what was in it",
                "Use max_norm=None",
            )
        if module.sparse:
            yield Finding(
                where,
                "has sparse gradients, but noise is on every row, so private gradients are dense",
                "Use sparse=False and an optimizer for dense gradients",
                breaks=False,
            )


def _of_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    where = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        yield Finding(where, "computes gradients several times a step, by a closure", "Use another optimizer")
    if isinstance(optimizer, torch.optim.SparseAdam):
        yield Finding(
            where, "takes sparse gradients only, and private ones are dense", "Use torch.optim.Adam"
        )
    own = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in own and parameter.requires_grad:
                yield Finding(
                    f"{where}.param_groups[{number}]['params'][{place}], of shape {list(parameter.shape)}",
                    "is no parameter of the model, so its gradient would be neither clipped nor noised",
                    "Make it a parameter of the model, or give it an optimizer of its own and no private data",
                )


@torch.no_grad()
def _of_forward(model: nn.Module, inputs: tuple[Any, ...], public: Iterable[str]) -> Iterator[Finding]:
    twin = copy.deepcopy(model)
    watch = StateWatch(twin, public)
    with torch.random.fork_rng({p.device for p in model.parameters() if p.is_cuda}):
        twin(*inputs)
    for name in watch.changed():
        yield Finding(
            name,
            "is changed by the forward, so that it may hold something of the samples, without noise",
            "Put the module that does it in eval mode, or replace it, or name it in public_state if no data are in it",
        )
