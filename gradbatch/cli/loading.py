"""From words on a command line to a model and its inputs."""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradbatch.errors import UsageError


def load_model(target: str) -> nn.Module:
    """Import and build the model that ``package.module:factory`` names; the current directory is importable.

    Args:
        target: behind the colon the name of a module, or of a class or function that makes one without arguments; a
            dotted name is looked up attribute by attribute.

    Raises:
        UsageError: there is no such thing, it cannot be imported or called, or it makes something else.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"{target!r} is no package.module:factory, such as my_package.models:make_net")
    if module_name.endswith(".py"):
        written = ".".join(Path(module_name).with_suffix("").parts).strip("./")
        raise UsageError(f"{module_name} is a file; name the module as an import would: {written}:{path}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"cannot import {module_name}: {words(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"{getattr(found, '__name__', found)} has no {name!r}{_candidates(found)}")
        found = getattr(found, name)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise UsageError(
                f"{target} is of type {type(found).__name__}; name a torch.nn.Module or what makes one"
            )
        try:
            found = found()
        except Exception as error:
            raise UsageError(f"{path}() failed: {words(error)}. It is called without arguments") from error
    if not isinstance(found, nn.Module):
        raise UsageError(f"{path}() returned something of type {type(found).__name__}, not a torch.nn.Module")
    return found


@dataclass(frozen=True)
class Inputs:
    """What a model is called with: positional arguments, and others by name."""

    args: Sequence[Tensor] = ()
    kwargs: Mapping[str, Tensor] = field(default_factory=dict)

    def named(self, model: nn.Module) -> Sequence[Tensor] | Mapping[str, Tensor]:
        """All by position if none has a name, else all by name."""
        if not self.kwargs:
            return self.args
        try:
            bound = inspect.signature(model.forward).bind_partial(*self.args).arguments
        except TypeError as error:
            raise UsageError(f"--input: {words(error)}") from error
        if (
            any(not isinstance(value, Tensor) for value in bound.values())
            or bound.keys() & self.kwargs.keys()
        ):
            raise UsageError("--input: give a name to all inputs, each another one: NAME=SHAPE[:BOUND]")
        return {**bound, **self.kwargs}


def make_inputs(specs: Sequence[str], dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """Draw the inputs that specifications stand for.

    Args:
        specs: ``8,3,32,32`` for normally distributed numbers of that shape; ``8,16:1000`` for integers below 1000;
            ``name=8,16:1000`` for an argument that is passed by name.
        dtype: of numbers that are no integers.
        device: where they are called for; they are drawn on the CPU, the same on every device.

    Raises:
        UsageError: one is something else.
    """
    named = [re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(.*)", spec, re.DOTALL) for spec in specs]
    drawn = [(match[1], _drawn(match[2], dtype).to(device)) for match in named if match is not None]
    return Inputs([t for name, t in drawn if not name], {name: t for name, t in drawn if name})


def _drawn(spec: str, dtype: torch.dtype) -> Tensor:
    shape, colon, high = spec.partition(":")
    try:
        sizes = [int(size) for size in shape.split(",")]
        bound = int(high) if colon else 1
    except ValueError:
        sizes, bound = [-1], 1
    if min(sizes) < 0 or bound < 1:
        raise UsageError(
            f"{spec!r} is no input: give sizes, samples first, such as 8,3,32,32, and for integers the bound that they "
            "are below, such as 8,16:1000"
        )
    return torch.randint(bound, sizes) if colon else torch.randn(sizes, dtype=dtype)


def usable_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        UsageError: there is none on this machine.
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {name}: {words(error)}") from error


def try_out(model: nn.Module, inputs: Inputs) -> None:
    """Call the model once, which materialises lazy modules.

    Raises:
        UsageError: it fails.
    """
    try:
        with torch.no_grad():
            model(*inputs.args, **inputs.kwargs)
    except Exception as error:
        named = [("", t) for t in inputs.args] + [(f"{name}=", t) for name, t in inputs.kwargs.items()]
        shapes = ", ".join(f"{n}{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in named)
        raise UsageError(
            f"{type(model).__name__} fails on inputs {shapes}: {words(error)}. Inputs are positional arguments, "
            "samples first; integers below 1000 are 8,16:1000; an argument by name is NAME=8,16"
        ) from error


def words(error: BaseException) -> str:
    """Kind and first line of an error and of what caused it in the first place, without what ends a sentence."""
    said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return said if cause is error else f"{said} (because of {words(cause)})"


def _candidates(found: Any) -> str:
    """What the user may have meant: functions and classes that a module defines, and models that it holds."""
    if not inspect.ismodule(found):
        return ""
    names = [
        name
        for name, value in vars(found).items()
        if isinstance(value, nn.Module)
        or ((inspect.isfunction(value) or isinstance(value, type)) and value.__module__ == found.__name__)
    ]
    return f"; there is {', '.join(names)}" if names else ""
