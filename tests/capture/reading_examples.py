"""For every line in the tables of the node reader, uses of parameters that make such a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from tests.capture.reference import draw


class Parameters(nn.Module):
    """A model made only of parameters."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(draw(*shape) if shape else draw(1).squeeze()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@dataclass(frozen=True)
class Example:
    """A use of parameters that one reading describes.

    Args:
        function: of the model and its input.
        sample: shape of one sample.
        shapes: of the parameters.
        reading: place of the reading in the table, among those of its type of node.
        samples: ``N``.
    """

    function: Callable[[Any, Tensor], Tensor]
    sample: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    reading: int = 0
    samples: int = 4

    def model(self) -> nn.Module:
        return gradbatch.extend(Parameters(self.function, self.shapes))

    def batch(self) -> Tensor:
        return draw(self.samples, *self.sample)


def elementwise(function: Callable[[Any, Tensor], Tensor], *shape: int) -> Example:
    return Example(function, (3,), {"w": shape or (3,)})


def ids_of(x: Tensor) -> Tensor:
    return (x * 10).long() % 5


EXAMPLES: dict[str, list[Example]] = {
    "MmBackward": [
        Example(lambda m, x: x @ m.w, (3,), {"w": (3, 2)}),
        Example(lambda m, x: (m.w @ x.mT).mT, (3,), {"w": (2, 3)}, reading=1),
    ],
    "AddmmBackward": [
        Example(lambda m, x: torch.addmm(m.b, x, m.w, alpha=0.5, beta=2), (3,), {"w": (3, 2), "b": (2,)}),
        Example(
            lambda m, x: torch.addmm(m.b, m.w, x.mT, alpha=3, beta=0.5).mT,
            (3,),
            {"w": (2, 3), "b": (2, 1)},
            reading=1,
        ),
    ],
    "BmmBackward": [
        Example(lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), (2, 3), {"w": (2, 3, 5)}),
        Example(
            lambda m, x: torch.bmm(m.w, x.permute(1, 2, 0)).permute(2, 0, 1), (2, 3), {"w": (2, 5, 3)}, 1
        ),
    ],
    "BaddbmmBackward": [
        Example(
            lambda m, x: torch.baddbmm(m.b, x.transpose(0, 1), m.w, alpha=0.5, beta=2).transpose(0, 1),
            (2, 3),
            {"w": (2, 3, 5), "b": (2, 1, 5)},
        ),
        Example(
            lambda m, x: torch.baddbmm(m.b, m.w, x.permute(1, 2, 0), alpha=2, beta=0.5).permute(2, 0, 1),
            (2, 3),
            {"w": (2, 5, 3), "b": (2, 5, 1)},
            reading=1,
        ),
    ],
    "MvBackward": [Example(lambda m, x: torch.mv(x, m.w), (3,), {"w": (3,)})],
    "ConvolutionBackward": [
        Example(
            lambda m, x: F.conv2d(x, m.w, m.b, stride=(2, 1), padding=(0, 1), dilation=(1, 2), groups=2),
            (4, 5, 6),
            {"w": (6, 2, 2, 2), "b": (6,)},
        ),
        Example(
            lambda m, x: F.conv_transpose1d(x, m.w, m.b, 3, 1, output_padding=2, groups=2, dilation=2),
            (4, 5),
            {"w": (4, 3, 2), "b": (6,)},
            reading=1,
        ),
    ],
    "EmbeddingBagBackward": [
        Example(
            lambda m, x: F.embedding_bag(ids_of(x), m.w, mode="sum", per_sample_weights=x),
            (6,),
            {"w": (5, 2)},
        )
    ],
    "EmbeddingBackward": [
        Example(lambda m, x: F.embedding(ids_of(x), m.w, padding_idx=1), (6,), {"w": (5, 2)})
    ],
    "IndexBackward": [
        Example(lambda m, x: m.w[ids_of(x) - 5], (6,), {"w": (5, 2)}),
    ],
    "IndexSelectBackward": [
        Example(lambda m, x: m.w.index_select(0, ids_of(x).flatten()).view(len(x), 6, 2), (6,), {"w": (5, 2)})
    ],
    "NativeLayerNormBackward": [
        Example(lambda m, x: F.layer_norm(x, (3, 4), m.w, m.b), (2, 3, 4), {"w": (3, 4), "b": (3, 4)})
    ],
    "NativeGroupNormBackward": [
        Example(lambda m, x: F.group_norm(x, 2, m.w, m.b), (4, 3), {"w": (4,), "b": (4,)})
    ],
    "NativeBatchNormBackward": [
        Example(
            lambda m, x: F.batch_norm(x, torch.ones(3).to(x), torch.full((3,), 2.0).to(x), m.w, m.b, eps=0.5),
            (3, 4),
            {"w": (3,), "b": (3,)},
        ),
        # In train mode only where each channel is one sample's.
        Example(
            lambda m, x: F.batch_norm(x, None, None, m.w, m.b, training=True),
            (3, 4),
            {"w": (3,), "b": (3,)},
            samples=1,
        ),
    ],
    "TrilinearBackward": [
        Example(lambda m, x: F.bilinear(x, x.sin(), m.w, m.b), (5, 3), {"w": (2, 3, 3), "b": (2,)})
    ],
}

ELEMENT_BY_ELEMENT: dict[str, list[Example]] = {
    "AddBackward": [
        elementwise(lambda m, x: torch.add(x, m.w, alpha=2)),
        elementwise(lambda m, x: m.w + x, 1),
    ],
    "SubBackward": [elementwise(lambda m, x: x - m.w), elementwise(lambda m, x: torch.sub(m.w, x, alpha=2))],
    "RsubBackward": [
        elementwise(lambda m, x: torch.rsub(x, m.w)),
        elementwise(lambda m, x: torch.rsub(m.w, x)),
    ],
    "MulBackward": [elementwise(lambda m, x: x * m.w), elementwise(lambda m, x: x.unsqueeze(2) * m.w, 3, 2)],
    "DivBackward": [elementwise(lambda m, x: x / m.w), elementwise(lambda m, x: m.w / x)],
    "PowBackward": [elementwise(lambda m, x: x.exp() ** m.w)],
    "WhereBackward": [elementwise(lambda m, x: torch.where(x > 0, x, m.w))],
    "LerpBackward": [
        elementwise(lambda m, x: torch.lerp(x, m.w, 0.3)),
        elementwise(lambda m, x: torch.lerp(x, x.sin(), m.w)),
    ],
    "AddcmulBackward": [
        elementwise(lambda m, x: torch.addcmul(m.w, x, x.sin())),
        elementwise(lambda m, x: torch.addcmul(x, x.sin(), m.w, value=3)),
    ],
    "AddcdivBackward": [elementwise(lambda m, x: torch.addcdiv(x, x.sin(), m.w))],
    "MaximumBackward": [elementwise(lambda m, x: torch.maximum(x, m.w))],
    "MinimumBackward": [elementwise(lambda m, x: torch.minimum(m.w, x))],
    "ClampBackward": [
        elementwise(lambda m, x: x.clamp(m.w, m.w + 0.5)),
        elementwise(lambda m, x: m.w.clamp(x, x + 0.5)),
    ],
    "ClampMinBackward": [
        elementwise(lambda m, x: x.clamp_min(m.w)),
        elementwise(lambda m, x: m.w.clamp_min(x)),
    ],
    "ClampMaxBackward": [
        elementwise(lambda m, x: x.clamp_max(m.w)),
        elementwise(lambda m, x: m.w.clamp_max(x)),
    ],
    "PreluKernelBackward": [elementwise(lambda m, x: F.prelu(x, m.w))],
    "MaskedFillBackward": [elementwise(lambda m, x: m.w.masked_fill(x > 0, 0.5) * x, 4, 3)],
    "Atan2Backward": [
        elementwise(lambda m, x: torch.atan2(x, m.w)),
        elementwise(lambda m, x: torch.atan2(m.w, x)),
    ],
    "HypotBackward": [elementwise(lambda m, x: torch.hypot(x, m.w))],
    "FmodBackward": [elementwise(lambda m, x: torch.fmod(m.w, x))],
    "RemainderBackward": [elementwise(lambda m, x: torch.remainder(m.w, x))],
    "XlogyBackward": [elementwise(lambda m, x: torch.xlogy(m.w, x.exp()))],
    "FmaxBackward": [elementwise(lambda m, x: torch.fmax(x, m.w))],
    "FminBackward": [elementwise(lambda m, x: torch.fmin(x, m.w))],
    "LogaddexpBackward": [elementwise(lambda m, x: torch.logaddexp(x, m.w))],
    "AddmvBackward": [elementwise(lambda m, x: torch.addmv(m.w, x, x.new_ones(3), beta=0.5), 1)],
}

EVERY_EXAMPLE = EXAMPLES | ELEMENT_BY_ELEMENT
