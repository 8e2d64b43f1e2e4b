"""Models of other libraries, built with random weights: transformers, timm and torchvision. Nothing is downloaded."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradbatch.cli.loading import make_inputs, words
from gradbatch.errors import UsageError

SAMPLES, TOKENS, LEAST_IMAGE = 3, 7, 32
PERTURBATION = 0.01

# Of a configuration of transformers, where it has these fields. Models of different families call them differently.
SMALL: Mapping[str, int] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 16,
    "use_cache": False,
}
# Tried in this order, the samples first: small images, larger ones, and videos.
IMAGES = (64, 96, 128, 224)
VIDEOS = ("3,8,64,64", "3,16,224,224")


@dataclass(frozen=True)
class Built:
    """A model that somebody else wrote.

    Args:
        model: with random weights, in eval mode.
        origin: what it was built from, in words.
        inputs: specifications of inputs that it takes, for :func:`~gradbatch.cli.loading.make_inputs`.
    """

    model: nn.Module
    origin: str
    inputs: Sequence[str]


def settings_of(pairs: Iterable[str]) -> dict[str, Any]:
    """Read ``KEY=VALUE`` pairs; the values are Python literals, or words without quotes.

    Raises:
        UsageError: a pair is something else.
    """
    settings = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
        if not key.isidentifier() or (settings[key] is value and not re.fullmatch(r"[\w.-]+", value)):
            raise UsageError(
                f"--config {pair}: give KEY=VALUE with a Python literal, such as hidden_size=64 or depths=[1,1]"
            )
    return settings


def perturb(model: nn.Module) -> None:
    """Add small random numbers to all parameters: behind a parameter that is zero, every gradient is zero and right."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=PERTURBATION)


def from_transformers(name: str, settings: Mapping[str, Any], inputs: Sequence[str]) -> Built:
    """``AutoModel.from_config`` of a configuration class, at small sizes.

    Args:
        name: of the class, such as ``BertConfig``.
        settings: fields of the configuration; those in :data:`SMALL` have small defaults.
        inputs: specifications; if there are none, they follow from the configuration.

    Raises:
        UsageError: transformers is not installed, has no such class, or cannot build it; no inputs are known.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read on import; nothing here looks for weights
    transformers = _imported("transformers", "--hf")
    with _saying(f"--hf {name}"):  # imported only now
        kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig)):
        configs = [other for other in dir(transformers) if other.endswith("Config")]
        raise UsageError(f"--hf {name}: transformers has no such configuration class{_close(name, configs)}")
    with _saying(f"--hf {name}"):
        default = kind()
        for key in settings:
            if not hasattr(default, key):
                raise UsageError(f"--config {key}: {name} has no such field{_close(key, vars(default))}")
        # Configurations give fields other names: of two for one field, the library would take either.
        own = getattr(kind, "attribute_map", {})
        chosen = {
            own.get(key, key): value for each in (_small(default), settings) for key, value in each.items()
        }
        config = kind(**chosen)
        # The grouped kernel for experts does not take float64.
        eager = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
        model = transformers.AutoModel.from_config(config, **eager)
    fields = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
    return Built(model.eval(), f"{name}({fields})", inputs or _inputs_of(model, config))


def from_timm(name: str, settings: Mapping[str, Any], inputs: Sequence[str]) -> Built:
    """``timm.create_model(name, pretrained=False)``.

    Args:
        name: of the model, such as ``resnet18``.
        settings: further arguments of ``create_model``.
        inputs: specifications; if there are none, images as small as the model takes.

    Raises:
        UsageError: timm is not installed, has no such model, or cannot build it; no inputs are known.
    """
    timm = _imported("timm", "--timm")
    if not timm.is_model(name):
        raise UsageError(f"--timm {name}: timm has no such model{_close(name, timm.list_models())}")
    with _saying(f"--timm {name}"):
        model = timm.create_model(name, pretrained=False, **settings).eval()
    channels, *own = model.default_cfg["input_size"]
    given = settings.get("img_size", ())
    sizes = [given if isinstance(given, int) else given[0]] if given else []
    tried = [f"{channels},{size},{size}" for size in (*sizes, *IMAGES)] + [_joined((channels, *own))]
    return Built(model, f"timm's {name}", inputs or first_working(model, f"--timm {name}", tried))


def from_torchvision(name: str, settings: Mapping[str, Any], inputs: Sequence[str]) -> Built:
    """``torchvision.models.get_model(name, weights=None)``.

    Args:
        name: of the model, such as ``resnet18``.
        settings: further arguments of ``get_model``.
        inputs: specifications; if there are none, images or videos as small as the model takes.

    Raises:
        UsageError: torchvision is not installed, has no such model, or cannot build it; no inputs are known.
    """
    _imported("torchvision", "--torchvision")
    models = importlib.import_module("torchvision.models")
    if name not in models.list_models():
        known = _close(name, models.list_models())
        raise UsageError(f"--torchvision {name}: torchvision has no such model{known}")
    with _saying(f"--torchvision {name}"):
        takes = inspect.signature(models.get_model_builder(name)).parameters
        none = {key: None for key in ("weights", "weights_backbone") if key in takes}
        model = models.get_model(name, **{**none, **settings}).eval()
    tried = [f"3,{size},{size}" for size in IMAGES] + [*VIDEOS]
    return Built(
        model, f"torchvision's {name}", inputs or first_working(model, f"--torchvision {name}", tried)
    )


def first_working(model: nn.Module, option: str, shapes: Iterable[str]) -> list[str]:
    """The first input that a model takes, as a specification with :data:`SAMPLES` samples.

    Args:
        model: in eval mode.
        option: what it was asked for by, for the message.
        shapes: of one sample.

    Raises:
        UsageError: it takes none of them.
    """
    tried = []
    for shape in shapes:
        tried.append(f"{SAMPLES},{shape}")
        try:
            with torch.no_grad():
                model(*make_inputs(tried[-1:], torch.get_default_dtype()).args)
        except Exception as error:
            # Assertions, shapes that do not fit: whatever it does not like, the next may do.
            reason = words(error)
        else:
            return tried[-1:]
    raise UsageError(
        f"{option} takes none of {', '.join(tried)} (the last: {reason}): say what it takes with --input"
    )


BUILDERS: Mapping[str, Callable[[str, Mapping[str, Any], Sequence[str]], Built]] = {
    "--hf": from_transformers,
    "--timm": from_timm,
    "--torchvision": from_torchvision,
}
"""By the option that asks for them."""


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Turn what a library raises into a :class:`UsageError`; its warnings are not about the model's gradients."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {words(error)}{_mismatch(error)}") from error


def _mismatch(error: BaseException) -> str:
    """What to do where torchvision, which the others import, was built for another torch."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if not any("torchvision::" in str(cause) for cause in causes):
        return ""
    return ". The installed torchvision was built for another torch: install both anew, from one source"


def _imported(package: str, option: str) -> Any:
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{option} needs {package}: pip install {package}")
    with _saying(f"{option} needs {package}, which cannot be imported"):
        return importlib.import_module(package)


def _close(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*known], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _small(default: Any) -> dict[str, Any]:
    """Small values for the usual fields that a configuration has."""
    small: dict[str, Any] = {
        key: value for key, value in SMALL.items() if isinstance(getattr(default, key, None), int)
    }
    for key, value in vars(default).items():
        # Beyond the small vocabulary, the row of the padding would be one that the embedding lacks.
        if (
            key.endswith("_token_id")
            and isinstance(value, int)
            and value >= small.get("vocab_size", value + 1)
        ):
            small[key] = {"pad_token_id": 0, "eos_token_id": 2}.get(key, 1)
    depths = getattr(default, "depths", None)
    if isinstance(depths, Sequence):
        small["depths"] = [1] * len(depths)  # stages, whose windows and strides go with the image size
    elif isinstance(getattr(default, "image_size", None), int):
        patch = getattr(default, "patch_size", 1)
        small["image_size"] = -(-LEAST_IMAGE // patch) * patch if isinstance(patch, int) else LEAST_IMAGE
    return small


def _inputs_of(model: Any, config: Any) -> list[str]:
    """Inputs that follow from a configuration of transformers."""
    ids = f"{SAMPLES},{TOKENS}:{getattr(config, 'vocab_size', None) or SMALL['vocab_size']}"
    frames = [size] if isinstance(size := getattr(config, "num_frames", None), int) else []
    size = getattr(config, "image_size", None) or LEAST_IMAGE
    image = [size, size] if isinstance(size, int) else [*size]
    mel, positions = getattr(config, "num_mel_bins", 1), getattr(config, "max_source_positions", 1)
    known = {
        "input_ids": ids,
        "pixel_values": _joined([SAMPLES, *frames, getattr(config, "num_channels", None) or 3, *image]),
        "input_values": f"{SAMPLES},2000",
        "input_features": f"{SAMPLES},{mel},{2 * positions}",
    }
    main = getattr(model, "main_input_name", "")
    if main not in known:
        raise UsageError(
            f"no inputs of {type(model).__name__} are known: name them with --input NAME=SHAPE[:BOUND]"
        )
    decoder = [f"decoder_input_ids={ids}"] if getattr(config, "is_encoder_decoder", False) else []
    return [f"{main}={known[main]}", *decoder]


def _joined(sizes: Iterable[int]) -> str:
    return ",".join(map(str, sizes))
