"""Steps whose weights are computed: from other parameters, by a parametrisation, or by the network itself."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.random_steps.registry import step

if TYPE_CHECKING:
    from tests.random_network import RandomNetwork


class Scale(torch.autograd.Function):
    """A product with a vector, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(input, scale)
        return input * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        input, scale = ctx.saved_tensors
        return gradient * scale, (gradient * input).sum((0, 1))


class ScaledLinear(nn.Linear):
    """A layer whose class is not the one its rule is for."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * F.linear(input, self.weight / (1 + self.weight.norm()), self.bias)


class LowRank(nn.Module):
    """A frozen layer with a trainable update of rank 2, merged into its weight or beside it."""

    def __init__(self, channels: int, out: int, merged: bool) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(channels, out).requires_grad_(False), merged
        self.down, self.up = nn.Parameter(torch.randn(2, channels)), nn.Parameter(torch.randn(out, 2))

    def forward(self, input: Tensor) -> Tensor:
        if self.merged:
            return F.linear(input, self.base.weight + self.up @ self.down, self.base.bias)
        return self.base(input) + input @ self.down.T @ self.up.T


@step
def parametrised(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    kind = network.draw.choice(["weight_norm", "spectral_norm", "orthogonal"])
    key = f"{kind}_{channels}_{out}"
    return network.layer(key, lambda: getattr(parametrizations, kind)(nn.Linear(channels, out)))(hidden)


@step
def normed_convolution(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    kind = network.draw.choice(["weight_norm", "spectral_norm"])

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return getattr(nn.utils, kind)(nn.Conv1d(channels, out, 3, padding=1))

    return network.layer(f"old_{kind}_{channels}_{out}", make)(hidden.mT).mT


@step
def low_rank(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out, merged = hidden.shape[-1], network.size(), network.draw.random() < 0.5
    return network.layer(f"low_{channels}_{out}_{merged}", lambda: LowRank(channels, out, merged))(hidden)


@step
def standardised_convolution(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    weight, gain = network.parameter(out, channels, 3), network.parameter(out, 1, 1)
    if network.draw.random() < 0.5:
        variance, mean = torch.var_mean(weight, (1, 2), keepdim=True)
        weight = (weight - mean) * (variance + 0.1).rsqrt() * gain
    else:
        flat = F.batch_norm(weight.view(1, out, -1), None, None, gain.view(-1), training=True, eps=0.1)
        weight = flat.view_as(weight)
    return F.conv1d(hidden.mT, weight, padding=1).mT


@step
def generated_weight(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """Computed from a learned code by another layer, for all samples."""
    channels, out = hidden.shape[-1], network.size()
    code = network.parameter(*network.draw.choice([(3,), (1, 3)]))
    weight = torch.tanh(network.linear(code, channels * out)).view(out, channels)
    return F.linear(hidden, weight)


@step
def weight_of_the_data(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """A weight for each sample, computed from its own data."""
    samples, _, channels = hidden.shape
    weight = network.linear(hidden.mean(1), 2 * channels).tanh().view(samples, channels, 2)
    return hidden @ weight if network.draw.random() < 0.5 else torch.einsum("ntc,ncd->ntd", hidden, weight)


@step
def transformed_weight(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    weight, gain = network.parameter(channels, channels), network.parameter(channels)
    ways = [
        lambda: weight + weight.mT,
        lambda: weight * gain,
        lambda: weight * gain.unsqueeze(1).exp(),
        lambda: weight.softmax(-1),
        lambda: weight.tril(),
        lambda: weight * torch.ones_like(weight).tril(),
        lambda: weight + (weight.round() - weight).detach(),
        lambda: torch.matrix_exp(weight - weight.mT),
        lambda: weight / weight.norm(dim=1, keepdim=True),
        lambda: weight.cumsum(0),
        lambda: weight.diagonal().diag_embed(),
        lambda: torch.stack([gain.roll(i) for i in range(channels)]),
        lambda: gain[(torch.arange(channels).unsqueeze(1) - torch.arange(channels)) % channels],
        lambda: torch.block_diag(gain[:1].unsqueeze(0), weight[1:, 1:]),
        lambda: torch.cat([weight[:1], 2 * weight[1:]]),
        lambda: torch.outer(gain, gain),
        lambda: weight.to(torch.float64).to(weight.dtype),
        lambda: weight.detach() * gain,
        lambda: weight.flip(0).contiguous().view(channels, channels),
        lambda: torch.where(weight > 0, weight, 0.1 * weight),
        lambda: weight @ weight,
        lambda: weight.sort(0).values,
        lambda: torch.kron(gain.unsqueeze(0), weight[:, :1]),
        lambda: weight.clamp(-0.3, 0.3),
        lambda: weight.gather(0, torch.arange(channels).flip(0).unsqueeze(1).expand(-1, channels)),
        lambda: torch.linalg.inv(weight.tanh() + 3 * torch.eye(channels).to(weight)),
        lambda: weight.index_copy(0, torch.tensor([0]), gain.unsqueeze(0)),
        lambda: weight.masked_fill(weight.detach() > 0.5, 0.0),
    ]
    return hidden @ network.draw.choice(ways)()


@step
def tied_with_an_embedding(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    layer = network.layer(f"words_{channels}", lambda: nn.Embedding(6, channels))
    ways = [
        lambda h: F.linear(h, layer.weight),
        lambda h: h @ layer.weight.T,
        lambda h: F.linear(h, layer.weight * 0.5),
    ]
    return network.draw.choice(ways)(hidden + layer(network.ids(6)))


@step
def subclass(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels, out = hidden.shape[-1], network.size()
    return network.layer(f"scaled_{channels}_{out}", lambda: ScaledLinear(channels, out))(hidden)


@step
def own_function(network: RandomNetwork, hidden: Tensor) -> Tensor:
    scale = network.parameter(hidden.shape[-1])
    return Scale.apply(hidden, scale if network.draw.random() < 0.5 else scale.tanh())


@step
def functional_call(network: RandomNetwork, hidden: Tensor) -> Tensor:
    channels = hidden.shape[-1]
    layer = network.make_linear(channels, channels)
    weights = {name: value * 2 for name, value in layer.named_parameters()}
    return torch.func.functional_call(layer, weights, hidden)


@step
def mapped(network: RandomNetwork, hidden: Tensor) -> Tensor:
    """By ``torch.vmap``, over samples or over a stack of weights."""
    weight = network.parameter(3, hidden.shape[-1], 2)
    if network.draw.random() < 0.5:
        return torch.vmap(lambda sample: torch.tanh(sample @ weight[0]))(hidden)
    return torch.vmap(lambda single: torch.tanh(hidden @ single))(weight).sum(0)
