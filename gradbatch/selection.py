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
        UsageError: nothing is trainable, a pattern matches nothing, a parameter is lazy, complex or no leaf.
    """
    modules = {module: path for path, module in model.named_modules()}
    for module, path in modules.items():
        if couples_samples(module) and not coupled:
            raise CoupledSamples(coupling_message(path, type(module)))
    wanted = None if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)
    aliases: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                aliases.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
                owners.setdefault(parameter, module)
    if not aliases:
        raise UsageError(f"this {type(model).__name__} has no trainable parameters")
    if wanted is not None:
        for pattern in wanted:
            if not any(fnmatchcase(name, pattern) for names in aliases.values() for name in names):
                first = [names[0] for names in aliases.values()]
                raise UsageError(f"parameters: {pattern!r} matches none of {', '.join(first)}")
        aliases = {
            parameter: names
            for parameter, names in aliases.items()
            if any(fnmatchcase(name, pattern) for name in names for pattern in wanted)
        }
    for parameter, names in aliases.items():
        if is_lazy(parameter):
            raise UsageError(f"{names[0]} has no shape yet: run one forward of the lazy layer, or freeze it")
        if not parameter.is_leaf:
            raise UsageError(
                f"{names[0]} is not a leaf of the autograd graph (it was computed from something); assign a "
                "torch.nn.Parameter, or freeze it"
            )
        if parameter.is_complex():
            raise UsageError(
                f"{names[0]} is complex ({parameter.dtype}), which no layer rule is written for; freeze it, store real "
                "and imaginary parts, or leave it out with parameters="
            )
    return Selection(Names({p: names[0] for p, names in aliases.items()}, modules, owners, coupled), aliases)
