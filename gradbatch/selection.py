"""Which parameters of a model per-sample gradients are taken of, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from gradbatch.capture.records import couples_samples
from gradbatch.capture.uses import Names, coupling_message
from gradbatch.errors import CoupledSamples, UsageError


@dataclass(frozen=True)
class Selection:
    """The wanted parameters of a model, with all their names.

    Args:
        names: how errors call them.
        aliases: all names of each parameter; a tied one has several, and its results are kept under the first.
    """

    names: Names
    aliases: Mapping[nn.Parameter, Sequence[str]]


def select(model: nn.Module, patterns: str | Iterable[str] | None, coupled: bool = False) -> Selection:
    """The trainable parameters whose names match, after refusing a model that couples its samples.

    Args:
        model: the model.
        patterns: name pattern or patterns; ``None``: all.
        coupled: whether samples may depend on each other.

    Raises:
        CoupledSamples: a layer normalises over the batch, whether or not it has parameters of its own.
        UsageError: nothing is trainable, a pattern matches nothing, a parameter is lazy, sharded, complex or no leaf.
    """
    modules = {module: path for path, module in model.named_modules()}
    for module, path in modules.items():
        if couples_samples(module) and not coupled:
            raise CoupledSamples(coupling_message(path, type(module)))
    aliases: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                aliases.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
                owners.setdefault(parameter, module)
    aliases = matching(model, aliases, patterns)
    for parameter, names in aliases.items():
        if is_lazy(parameter):
            raise UsageError(f"{names[0]} has no shape yet: run one forward of the lazy layer, or freeze it")
        if not parameter.is_leaf:
            raise UsageError(
                f"{names[0]} is not a leaf of the autograd graph (it was computed from something); assign a "
                "torch.nn.Parameter, or freeze it"
            )
        if hasattr(parameter, "device_mesh"):
            raise UsageError(
                f"{names[0]} is sharded over processes (a DTensor), and samples' gradients are taken of whole "
                "parameters; after the forward of a model in fully_shard, call gradbatch.backward inside of "
                "gradbatch.privacy.distributed.whole_parameters(model)"
            )
        if parameter.is_complex():
            raise UsageError(
                f"{names[0]} is complex ({parameter.dtype}), which no layer rule is written for; freeze it, store real "
                "and imaginary parts, or leave it out with parameters="
            )
    return Selection(Names({p: names[0] for p, names in aliases.items()}, modules, owners, coupled), aliases)


def matching(
    model: nn.Module, names: Mapping[nn.Parameter, list[str]], patterns: str | Iterable[str] | None
) -> dict[nn.Parameter, list[str]]:
    """Those trainable parameters of a model of which a name matches a pattern.

    Args:
        model: the model.
        names: of its trainable parameters.
        patterns: as for :func:`select`.

    Raises:
        UsageError: nothing is trainable, there is no pattern, or one that matches nothing.
    """
    if not names:
        raise UsageError(_nothing_trainable(model))
    if patterns is None:
        return dict(names)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    if not wanted:
        raise UsageError("parameters: no pattern given; None stands for all parameters")
    by_name = {name: p for p, own in names.items() for name in own}
    # Whole names are looked up: many of them, each matched with each parameter, would take long.
    found = {
        pattern: [by_name[pattern]]
        if pattern in by_name
        else [p for name, p in by_name.items() if fnmatchcase(name, pattern)]
        for pattern in wanted
    }
    for pattern, parameters in found.items():
        if not parameters:
            every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            frozen = any(fnmatchcase(name, pattern) for name in every)
            words = "frozen parameters (requires_grad=False), but none of" if frozen else "none of"
            raise UsageError(
                f"parameters: {pattern!r} matches {words} {', '.join(own[0] for own in names.values())}"
            )
    matched = {p for parameters in found.values() for p in parameters}
    return {p: own for p, own in names.items() if p in matched}


def _nothing_trainable(model: nn.Module) -> str:
    count = len(list(model.parameters()))
    if not count:
        return f"this {type(model).__name__} has no parameters, so there are no gradients to take"
    return (
        f"this {type(model).__name__} has no trainable parameters, all {count} are frozen (requires_grad=False). "
        "Unfreeze those whose gradients you want before the forward, with requires_grad_(True)"
    )
