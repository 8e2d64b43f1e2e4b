"""All entries of the zoo, by library."""

from collections.abc import Callable, Iterator

from tests.zoo import (
    lora_models,
    timm_models,
    torchvision_models,
    transformers_text,
    transformers_vision_audio,
)
from tests.zoo.entry import Entry

SOURCES: dict[str, tuple[Callable[[], Iterator[Entry]], ...]] = {
    "torchvision": (torchvision_models.entries,),
    "timm": (timm_models.entries,),
    "transformers": (transformers_text.entries, transformers_vision_audio.entries),
    "peft": (lora_models.entries,),
}
# What a source imports, itself included.
PACKAGES = {
    "torchvision": ("torchvision",),
    "timm": ("timm", "torchvision"),
    "transformers": ("transformers",),
    "peft": ("peft", "transformers"),
}


def entries(source: str) -> list[Entry]:
    """Entries of one library, in the order of its tables."""
    return [entry for part in SOURCES[source] for entry in part()]


def third(source: str) -> list[Entry]:
    """Every third entry: some of each kind, since the tables are ordered by kind and then by name."""
    return entries(source)[::3]
