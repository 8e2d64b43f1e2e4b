"""Image classifiers with GroupNorm, ten classes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.transformers import Block


def small_cnn() -> nn.Sequential:
    """For 1x28x28 images: two convolutions and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mlp() -> nn.Sequential:
    """784-1024-1024-10."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def thin_mlp() -> nn.Sequential:
    """Thirty layers of 16: next to no arithmetic, so that calls are what takes time, as on a fast device."""
    layers = [layer for _ in range(30) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 10))


def thin_cnn() -> nn.Sequential:
    """The same of sixteen convolutions, of 8 channels each, with GroupNorm; for 3x4x4 images."""
    layers = [layer for _ in range(15) for layer in (nn.Conv2d(8, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), *layers, nn.Flatten(), nn.Linear(128, 10))


class ResidualBlock(nn.Module):
    """Two convolutions with GroupNorm, as in ResNet-18; as in ResNeXt if they are grouped."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, groups=groups, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.skip(x))


def resnet18(groups: int = 1) -> nn.Sequential:
    """For 3x32x32 images."""
    stages = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    stages += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    blocks = [ResidualBlock(*stage, groups) for stage in stages]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by itself, narrow by 1x1."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int) -> None:
        super().__init__()
        inner = inputs * widening
        widen = [nn.Conv2d(inputs, inner, 1, bias=False), nn.GroupNorm(8, inner), nn.ReLU6()]
        self.layers = nn.Sequential(
            *(widen if widening > 1 else []),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.GroupNorm(8, inner),
            nn.ReLU6(),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenet() -> nn.Sequential:
    """MobileNetV2 for 3x32x32 images: fewer strides than the one for large images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU6()]
    inputs = 32
    for widening, outputs, repeats, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for first in (True, *(False,) * (repeats - 1)):
            layers.append(InvertedResidual(inputs, outputs, stride if first else 1, widening))
            inputs = outputs
    head = [nn.Conv2d(320, 1280, 1, bias=False), nn.GroupNorm(8, 1280), nn.ReLU6()]
    return nn.Sequential(*layers, *head, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 10))


class VisionTransformer(nn.Module):
    """ViT-tiny for 3x32x32 images in patches of 4x4, their mean classified."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3, patches: int = 64) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Embedding(patches, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        places = torch.arange(tokens.shape[1], device=x.device).repeat(len(tokens), 1)
        return self.head(self.norm(self.blocks(tokens + self.positions(places))).mean(1))
