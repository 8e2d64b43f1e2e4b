"""Models of transformers from small configurations: https://huggingface.co/docs/transformers."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import SAMPLES
from tests.zoo.torchvision_shim import make_torchvision_importable

VOCABULARY = 50
# Names for one thing differ between configurations, which take the names that they do not know without complaint.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "initializer_range": 0.2,
}


def padding_mask(length: int = 7) -> Tensor:
    """The last sample is shorter by two tokens."""
    mask = torch.ones(SAMPLES, length, dtype=torch.long)
    mask[-1, -2:] = 0
    return mask


def from_config(task: str, name: str, sizes: dict[str, Any]) -> nn.Module:
    """A model with random weights, of an auto class of transformers, or of a class of its own.

    Args:
        task: name of the class.
        name: name of the architecture.
        sizes: what its configuration takes; None leaves out what :data:`SMALL` would give.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read on import; nothing here looks for weights
    make_torchvision_importable()
    import transformers

    given = {size: value for size, value in sizes.items() if value is not None}
    config = transformers.AutoConfig.for_model(name, **given)
    kind = getattr(transformers, task)
    if not task.startswith("Auto"):
        return kind(config)
    # The grouped kernel for experts does not take float64.
    return kind.from_config(config, experts_implementation="eager")
