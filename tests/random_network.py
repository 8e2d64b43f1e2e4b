"""Networks drawn at random, made to confuse whoever guesses from shapes which axis runs over the samples.

Sizes collide (positions, channels and samples are often equal), axes are permuted, rows flattened in either order,
layers shared, results changed in place, samples dead, silent or loud. A drawn network is a function of its seed and
its sizes alone, so that it can be run again on other inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

REGULAR = """linear linear linear linear_over_positions convolution grouped norm activation in_place residual
    residual_in_place swap rows columns slice_assign embedding siamese pool constants tied detached checkpointed unused
    dropout prelu bilinear bag nested_views two_outputs kill""".split()  # noqa: SIM905
IRREGULAR = """centre roll split_samples position_table raw_scale functional_head shuffle batch_statistic
    accumulate""".split()  # noqa: SIM905


class RandomNetwork(nn.Module):
    """A network whose steps are drawn while it runs for the first time, and repeated after that.

    Args:
        seed: of the steps and the weights.
        samples: ``N``.
        positions: ``T``.
        channels: of the input ``[N, T, channels]``.
        steps: what to draw from.
        dtype: of the layers.
    """

    def __init__(
        self, seed: int, samples: int, positions: int, channels: int, steps: list[str], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.seed, self.samples, self.positions, self.channels = seed, samples, positions, channels
        self.steps = steps
        self.layers = nn.ModuleDict()
        self.drawn: list[str] = []

    def forward(self, input: Tensor) -> Tensor:
        """From ``[N, T, C]`` to ``[N, features]``."""
        self.draw, self.drawn, self.made = random.Random(self.seed), [], []
        hidden, self.saved = input, []
        for _ in range(self.draw.randint(2, 7)):
            name = self.draw.choice(self.steps)
            self.drawn.append(name)
            self.saved.append(hidden)
            hidden = getattr(self, f"_{name}")(hidden)
            assert hidden.shape[:2] == (self.samples, self.positions), name
        hidden = self._linear(hidden)
        return hidden.flatten(1)

    # ---- layers, made when first needed

    def layer(self, key: str, make: Callable[[], nn.Module]) -> nn.Module:
        """A layer of its own for each call, or one that an earlier call made from the same key."""
        shared = [name for name in self.made if name.split("__")[0] == key]
        if shared and self.draw.random() < 0.4:
            return self.layers[self.draw.choice(shared)]
        name = f"{key}__{len(self.made)}"
        self.made.append(name)
        if name not in self.layers:
            with torch.random.fork_rng():
                torch.manual_seed(1000 * self.seed + len(self.made))
                layer = make()
                for parameter in layer.parameters():
                    if parameter.dim() == 1:
                        nn.init.normal_(parameter, 0.5)
                # Batch norm is only independent of the other samples in eval mode.
                self.layers[name] = layer.to(self.dtype).eval()
        return self.layers[name]

    def size(self) -> int:
        """A number of channels that likely collides with another size."""
        return self.draw.choice([self.samples, self.positions, self.channels, 2, 4, 6])

    def make_linear(self, inputs: int, outputs: int | None = None) -> nn.Module:
        """A linear layer."""
        outputs = self.size() if outputs is None else outputs
        bias = self.draw.random() < 0.7
        return self.layer(f"linear_{inputs}_{outputs}_{bias}", lambda: nn.Linear(inputs, outputs, bias=bias))

    # ---- steps, each from [N, T, C] to [N, T, C']

    def _linear(self, hidden: Tensor) -> Tensor:
        layer = self.make_linear(hidden.shape[-1])
        return layer(input=hidden) if self.draw.random() < 0.2 else layer(hidden)

    def _linear_over_positions(self, hidden: Tensor) -> Tensor:
        return self.make_linear(self.positions, self.positions)(hidden.mT).mT

    def _convolution(self, hidden: Tensor) -> Tensor:
        channels, out = hidden.shape[-1], self.size()
        layer = self.layer(f"conv_{channels}_{out}", lambda: nn.Conv1d(channels, out, 3, padding=1))
        return layer(hidden.transpose(1, 2)).transpose(1, 2)

    def _grouped(self, hidden: Tensor) -> Tensor:
        channels = hidden.shape[-1]
        layer = self.layer(
            f"depthwise_{channels}", lambda: nn.Conv2d(channels, 2 * channels, (1, 2), groups=channels)
        )
        images = hidden.movedim(-1, 1).unsqueeze(2)
        return layer(F.pad(images, (0, 1))).squeeze(2).movedim(1, -1)

    def _norm(self, hidden: Tensor) -> Tensor:
        channels = hidden.shape[-1]
        kind = self.draw.choice(["layer", "rms", "group", "instance", "batch"])
        if kind == "layer":
            return self.layer(f"layernorm_{channels}", lambda: nn.LayerNorm(channels))(hidden)
        if kind == "rms":
            return self.layer(f"rmsnorm_{channels}", lambda: nn.RMSNorm(channels))(hidden)
        if kind == "group":
            layer = self.layer(f"groupnorm_{channels}", lambda: nn.GroupNorm(1, channels))
        elif kind == "instance" and self.positions > 1:
            layer = self.layer(f"instance_{channels}", lambda: nn.InstanceNorm1d(channels, affine=True))
        else:
            layer = self.layer(f"batch_{channels}", lambda: nn.BatchNorm1d(channels))
        return layer(hidden.mT).mT

    def _prelu(self, hidden: Tensor) -> Tensor:
        return self.layer("prelu", nn.PReLU)(hidden)

    def _bilinear(self, hidden: Tensor) -> Tensor:
        channels, out = hidden.shape[-1], self.size()
        layer = self.layer(f"bilinear_{channels}_{out}", lambda: nn.Bilinear(channels, channels, out))
        return layer(hidden, hidden.tanh())

    def _embedding(self, hidden: Tensor) -> Tensor:
        channels = hidden.shape[-1]
        layer = self.layer(f"embedding_{channels}", lambda: nn.Embedding(5, channels, padding_idx=1))
        ids = torch.arange(self.samples * self.positions).view(self.samples, self.positions) * 7 % 5
        if self.draw.random() < 0.5:
            return hidden + layer(ids.T).transpose(0, 1)
        return hidden + layer(ids)

    def _bag(self, hidden: Tensor) -> Tensor:
        channels, mode = hidden.shape[-1], self.draw.choice(["sum", "mean", "max"])
        layer = self.layer(f"bag_{channels}_{mode}", lambda: nn.EmbeddingBag(5, channels, mode=mode))
        ids = torch.arange(self.samples * self.positions * 3).view(-1, 3) * 3 % 5
        return hidden + layer(ids).view(self.samples, self.positions, channels)

    def _activation(self, hidden: Tensor) -> Tensor:
        return self.draw.choice([torch.tanh, torch.relu, F.gelu, torch.sigmoid, torch.square])(hidden)

    def _in_place(self, hidden: Tensor) -> Tensor:
        hidden = self._linear(hidden)
        return self.draw.choice([torch.relu_, torch.tanh_, lambda h: h.mul_(2.0), lambda h: h.add_(1.0)])(
            hidden
        )

    def _nested_views(self, hidden: Tensor) -> Tensor:
        hidden = self._linear(hidden)
        view = hidden.transpose(0, 1)
        view.mul_(2.0)
        view[0] += 1.0
        return hidden

    def _slice_assign(self, hidden: Tensor) -> Tensor:
        hidden = self._linear(hidden)
        where = self.draw.choice([(slice(None), 0), (..., 0), (slice(None), slice(None, 1), slice(None, 1))])
        hidden[where] = 0.5
        return hidden

    def _kill(self, hidden: Tensor) -> Tensor:
        hidden = self._linear(hidden)
        hidden[self.draw.randrange(self.samples)] = 0.25
        return hidden

    def _residual(self, hidden: Tensor) -> Tensor:
        for earlier in reversed(self.saved[:-1]):
            if earlier.shape == hidden.shape:
                return hidden + earlier
        return hidden + self.make_linear(hidden.shape[-1], hidden.shape[-1])(hidden)

    def _residual_in_place(self, hidden: Tensor) -> Tensor:
        result = self.make_linear(hidden.shape[-1], hidden.shape[-1])(hidden)
        result += hidden
        return result

    def _swap(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden.transpose(0, 1)).transpose(0, 1)

    def _rows(self, hidden: Tensor) -> Tensor:
        rows = self._linear(hidden.reshape(self.samples * self.positions, -1))
        return rows.view(self.samples, self.positions, -1)

    def _columns(self, hidden: Tensor) -> Tensor:
        rows = self._linear(hidden.transpose(0, 1).reshape(self.samples * self.positions, -1))
        return rows.view(self.positions, self.samples, -1).transpose(0, 1)

    def _siamese(self, hidden: Tensor) -> Tensor:
        both = self._linear(torch.cat([hidden, hidden.flip(1)]))
        one, other = both.chunk(2)
        return one * other.tanh()

    def _pool(self, hidden: Tensor) -> Tensor:
        pooled = self._linear(hidden.mean(1))
        return pooled.unsqueeze(1).expand(-1, self.positions, -1)

    def _constants(self, hidden: Tensor) -> Tensor:
        return hidden * torch.linspace(0.5, 1.5, self.positions, dtype=hidden.dtype).view(-1, 1)

    def _tied(self, hidden: Tensor) -> Tensor:
        channels = hidden.shape[-1]

        def pair() -> nn.Module:
            first, second = nn.Linear(channels, channels), nn.Linear(channels, channels)
            second.weight = first.weight
            return nn.Sequential(first, nn.Tanh(), second)

        return self.layer(f"tied_{channels}", pair)(hidden)

    def _detached(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden) * hidden.detach().mean(-1, keepdim=True)

    def _checkpointed(self, hidden: Tensor) -> Tensor:
        layer = self.make_linear(hidden.shape[-1])
        return checkpoint(lambda h: torch.tanh(layer(h)), hidden, use_reentrant=False)

    def _unused(self, hidden: Tensor) -> Tensor:
        self._linear(hidden)
        return hidden

    def _two_outputs(self, hidden: Tensor) -> Tensor:
        parts = self.make_linear(hidden.shape[-1], 4)(hidden).chunk(2, -1)
        return parts[self.draw.randrange(2)].exp().clamp(max=2.0)

    def _dropout(self, hidden: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return F.dropout(hidden, 0.3)

    # ---- steps that may be refused

    def _centre(self, hidden: Tensor) -> Tensor:
        hidden = self._linear(hidden)
        # Half of it: what is exactly zero but for rounding has gradients of rounding errors.
        return hidden - 0.5 * hidden.mean(self.draw.choice([0, 1]), keepdim=True)

    def _batch_statistic(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden) * self._linear(hidden.mean(0)).mean()

    def _roll(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden.roll(1, 0)).roll(self.draw.choice([0, -1]), 0)

    def _shuffle(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))
        return self._linear(rows[order])[order.argsort()].view(*hidden.shape[:2], -1)

    def _split_samples(self, hidden: Tensor) -> Tensor:
        layer = self.make_linear(hidden.shape[-1])
        return torch.cat([layer(part) for part in hidden.split(1)])

    def _position_table(self, hidden: Tensor) -> Tensor:
        channels = hidden.shape[-1]
        layer = self.layer(f"positions_{channels}", lambda: nn.Embedding(self.positions, channels))
        ids = torch.arange(self.positions)
        return hidden + layer(ids if self.draw.random() < 0.5 else ids.unsqueeze(0))

    def _raw_scale(self, hidden: Tensor) -> Tensor:
        layer = self.make_linear(hidden.shape[-1], hidden.shape[-1])
        return layer(hidden) * layer.weight.diagonal()

    def _functional_head(self, hidden: Tensor) -> Tensor:
        layer = self.make_linear(hidden.shape[-1], hidden.shape[-1])
        return F.linear(torch.tanh(layer(hidden)), layer.weight)

    def _accumulate(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden.cumsum(self.draw.choice([0, 1])))
