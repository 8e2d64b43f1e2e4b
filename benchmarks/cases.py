"""The cases: a model, a batch for it, and one loss a sample."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.images import (
    VisionTransformer,
    mlp,
    mobilenet,
    resnet18,
    small_cnn,
    thin_cnn,
    thin_mlp,
)
from benchmarks.models.sequences import EmbeddingClassifier, LSTMClassifier
from benchmarks.models.transformers import GPT


@dataclass(frozen=True)
class Batch:
    """Inputs ``[N, …]``, and labels ``[N]`` or, for every position, ``[N, T]``."""

    inputs: Tensor
    labels: Tensor

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """One loss a sample, ``[N]``; the mean over its positions where each has a label."""
        if labels.dim() == 1:
            return F.cross_entropy(outputs, labels, reduction="none")
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        return each.unflatten(0, labels.shape).mean(1)

    def losses(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """The losses of the batch under a model, ``[N]``."""
        return self.loss(model(self.inputs), self.labels)

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Case:
    """A model and the shape of its batch.

    Args:
        title: for tables.
        model: from the length ``T`` to a fresh model; images ignore it.
        shape: of one sample's input.
        samples: ``N``.
        vocabulary: inputs are ids below this; 0: they are real numbers.
        every_position: a label for every position of the input, not for the sample.
    """

    title: str
    model: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    samples: int
    vocabulary: int = 0
    every_position: bool = False

    def build(
        self, device: torch.device, samples: int | None = None, length: int | None = None
    ) -> tuple[nn.Module, Batch]:
        """The model and a batch, always the same ones.

        Args:
            device: where both are.
            samples: instead of the case's own number.
            length: instead of the first axis of the case's own inputs.
        """
        torch.manual_seed(0)
        shape = self.shape if length is None else (length, *self.shape[1:])
        size = (self.samples if samples is None else samples, *shape)
        model = self.model(shape[0]).to(device)
        inputs = torch.randint(self.vocabulary, size) if self.vocabulary else torch.randn(size)
        labels = torch.randint(self.vocabulary, size) if self.every_position else torch.randint(10, size[:1])
        return model, Batch(inputs.to(device), labels.to(device))

    def __str__(self) -> str:
        return f"{self.title}, N={self.samples}"


CASES = {
    "cnn": Case("small CNN, 1x28x28", lambda _: small_cnn(), (1, 28, 28), 256),
    "mlp": Case("MLP 784-1024-1024-10", lambda _: mlp(), (784,), 128),
    "resnet": Case("ResNet-18 GroupNorm, 3x32x32", lambda _: resnet18(), (3, 32, 32), 16),
    "resnext": Case("ResNet-18 with 32 groups, 3x32x32", lambda _: resnet18(groups=32), (3, 32, 32), 16),
    "mobilenet": Case("MobileNetV2 GroupNorm, 3x32x32", lambda _: mobilenet(), (3, 32, 32), 32),
    "vit": Case("ViT-tiny, 3x32x32", lambda _: VisionTransformer(), (3, 32, 32), 32),
    "gpt": Case("GPT 4x256, T=128, vocabulary 5,000", GPT, (128,), 8, vocabulary=5000, every_position=True),
    "lstm": Case("LSTM 64-128, T=64", lambda _: LSTMClassifier(), (64, 64), 32),
    "embedding": Case(
        "embedding classifier, T=64, vocabulary 50,000",
        lambda _: EmbeddingClassifier(),
        (64,),
        32,
        vocabulary=50_000,
    ),
    "thin_mlp": Case("thin MLP, 31 layers of 16", lambda _: thin_mlp(), (16,), 8),
    "thin_cnn": Case("thin CNN, 32 layers of 8 channels", lambda _: thin_cnn(), (3, 4, 4), 4),
}
