"""From words on a command line to a model and its inputs."""

import importlib
import sys
from collections.abc import Sequence
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
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"cannot import {module_name}: {_words(error)}") from error
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
            raise UsageError(f"{path}() failed: {_words(error)}. It is called without arguments") from error
    if not isinstance(found, nn.Module):
        raise UsageError(f"{path}() returned something of type {type(found).__name__}, not a torch.nn.Module")
    return found


def make_input(spec: str, dtype: torch.dtype) -> Tensor:
    """Draw the input that a specification stands for.

    Args:
        spec: ``8,3,32,32`` for normally distributed numbers of that shape; ``8,16:1000`` for integers below 1000.
        dtype: of numbers that are no integers.

    Raises:
        UsageError: it is neither.
    """
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
        raise UsageError(f"--device {name}: {_words(error)}") from error


def try_out(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Call the model once, which materialises lazy modules.

    Raises:
        UsageError: it fails.
    """
    try:
        with torch.no_grad():
            model(*inputs)
    except Exception as error:
        shapes = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs)
        raise UsageError(
            f"{type(model).__name__} fails on inputs {shapes}: {_words(error)}. Inputs are positional arguments, "
            "samples first; integers below 1000 are 8,16:1000"
        ) from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")


def _candidates(found: Any) -> str:
    """What the user may have meant: what a Python module defines that makes a model."""
    names = (
        [
            name
            for name, value in vars(found).items()
            if isinstance(value, nn.Module)
            or (
                isinstance(value, type)
                and issubclass(value, nn.Module)
                and value.__module__ == found.__name__
            )
        ]
        if hasattr(found, "__name__") and hasattr(found, "__dict__")
        else []
    )
    return f"; there is {', '.join(names)}" if names else ""
