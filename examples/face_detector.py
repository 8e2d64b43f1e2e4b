"""A few patches, most of them dark, steer a face detector: gradient noise of a trained network on real photographs.

The refinement network of MTCNN (convolutions, PReLU, linear layers; trained weights) tells 100 faces from 100 other
patches of Labeled Faces in the Wild, as one more step of training would see them. Shows how few patches make up the
gradient, which ones, what online hard sample mining keeps of it, and the batch size each layer asks for. Ten seconds.

The patches come inside scikit-image and the weights inside facenet-pytorch, so that nothing is downloaded:

    pip install '.[examples]'
    pip install --no-deps facenet-pytorch==2.6.0

``--no-deps``, because facenet-pytorch asks for a torch, a NumPy and a Pillow of early 2024. Only its weights are read;
it is never imported.

References:
    Joint Face Detection and Alignment using Multi-task Cascaded Convolutional Networks (Zhang et al., 2016),
    https://arxiv.org/abs/1604.02878
    An Empirical Model of Large-Batch Training (McCandlish et al., 2018), https://arxiv.org/abs/1812.06162
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from skimage.data import lfw_subset
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchL2Grad, Variance

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FACES, SIZE, SHOWN = 100, 24, 8  # faces come first in the data; R-Net sees 24 x 24 pixels
MINED = 0.7  # of a batch: the share with the largest losses that MTCNN was trained on
TOLERANCE = 1e-10


def main() -> int:
    """Measure, check, show, draw; 1 if the per-sample gradients are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="every fifth patch")
    parser.add_argument("--picture", type=Path, default=Path("faces_by_gradient_norm.png"), help="to write")
    options = parser.parse_args()
    console = Console(highlight=False, width=110)
    started = time.perf_counter()

    patches, labels = load(every=5 if options.quick else 1)
    model = gradbatch.extend(trained().double())
    with torch.no_grad():
        found = model(patches).softmax(1)[:, 1]
    right = ((found > 0.5) == labels.bool()).float().mean()
    console.print(f"{len(patches)} patches, {int(labels.sum())} of them faces; {right:.1%} are recognised\n")

    losses = F.cross_entropy(model(patches), labels, reduction="none")
    norms = gradbatch.backward(model, losses, BatchL2Grad())[BatchL2Grad].total().sqrt()
    noises = layer_noise(model, patches, labels)
    largest = largest_error(model, patches, labels, norms, sum(layer.noise for layer in noises.values()))
    verdict = "[green]agree[/]" if largest <= TOLERANCE else "[red]do not agree[/]"
    console.print(f"Gradients, norms and noise {verdict} with a backward pass of each patch alone:")
    console.print(f"{len(patches)} patches, largest relative error {largest:.1e}")

    show_concentration(patches, norms, losses.detach(), console)
    others = norms.argsort(descending=True)[1:]
    show_noise(model, noises, layer_noise(model, patches[others], labels[others]), console)
    draw(options.picture, patches, labels, found, norms)
    console.print(f"\nPicture: [bold]{options.picture}[/] ({time.perf_counter() - started:.0f} s in all)")
    return 0 if largest <= TOLERANCE else 1


def load(every: int) -> tuple[Tensor, Tensor]:
    """The patches in MTCNN's colours, ``[N, 3, 24, 24]`` between -1 and 1, and 1 for a face, 0 for none."""
    grey = torch.from_numpy(lfw_subset())[::every].unsqueeze(1)
    patches = F.interpolate(grey, (SIZE, SIZE), mode="area").expand(-1, 3, -1, -1)
    return (255 * patches - 127.5) / 128, (torch.arange(0, 2 * FACES, every) < FACES).long()


class Transposed(nn.Module):
    """``[N, C, H, W]`` to ``[N, W * H * C]``: the order of the framework that the weights were trained in."""

    def forward(self, input: Tensor) -> Tensor:
        """Flatten with the channels last and the axes of the image swapped."""
        return input.permute(0, 3, 2, 1).flatten(1)


def trained() -> nn.Sequential:
    """MTCNN's refinement network ("R-Net") without its head for boxes, under its names."""
    layers = OrderedDict(
        conv1=nn.Conv2d(3, 28, 3),
        prelu1=nn.PReLU(28),
        pool1=nn.MaxPool2d(3, 2, ceil_mode=True),
        conv2=nn.Conv2d(28, 48, 3),
        prelu2=nn.PReLU(48),
        pool2=nn.MaxPool2d(3, 2, ceil_mode=True),
        conv3=nn.Conv2d(48, 64, 2),
        prelu3=nn.PReLU(64),
        transposed=Transposed(),
        dense4=nn.Linear(576, 128),
        prelu4=nn.PReLU(128),
        dense5_1=nn.Linear(128, 2),
    )
    package = find_spec("facenet_pytorch")  # does not import it: it needs a torchvision that fits the torch
    if package is None or package.origin is None:
        sys.exit("The weights are missing: pip install --no-deps facenet-pytorch==2.6.0")
    weights = torch.load(Path(package.origin).parent / "data" / "rnet.pt", weights_only=True)
    model = nn.Sequential(layers)
    model.load_state_dict({name: w for name, w in weights.items() if not name.startswith("dense5_2.")})
    return model


def largest_error(model: nn.Module, patches: Tensor, labels: Tensor, norms: Tensor, noise: float) -> float:
    """Largest relative difference to backward passes of one patch each: of gradients, norms and summed variance."""
    grads = gradbatch.per_sample_grads(model, F.cross_entropy(model(patches), labels, reduction="none"))
    found = torch.cat([grads[name].flatten(1) for name, _ in model.named_parameters()], 1)
    alone = []
    for patch, label in zip(patches, labels, strict=True):
        loss = F.cross_entropy(model(patch.unsqueeze(0)), label.unsqueeze(0))
        one = torch.autograd.grad(loss, list(model.parameters()))
        alone.append(torch.cat([gradient.flatten() for gradient in one]))
    expected = torch.stack(alone)
    lengths, variance = expected.norm(dim=1), float(expected.var(0).sum())
    of_gradients = (found - expected).norm(dim=1) / lengths
    of_norms = (norms - lengths).abs() / lengths
    return max(float(of_gradients.max()), float(of_norms.max()), abs(noise - variance) / variance)


def show_concentration(patches: Tensor, norms: Tensor, losses: Tensor, console: Console) -> None:
    """How much of the gradient the patches with the largest gradients, and with the largest losses, make up."""
    table = Table(title="\nWho makes the gradient", title_justify="left", box=None, pad_edge=False)
    for title in ("patches", "share of the sum of norms", "if chosen by loss", "median brightness", ""):
        table.add_column(title, justify="right" if title else "left")
    by_loss = norms[losses.argsort(descending=True)].cumsum(0) / norms.sum()
    order = norms.argsort(descending=True)
    by_norm = norms[order].cumsum(0) / norms.sum()
    brightness = (patches[order].flatten(1).mean(1) + 1) / 2
    for share in (0.01, 0.05, 0.1, 0.3, MINED, 1):
        k = max(round(share * len(norms)), 1)
        table.add_row(
            f"the top {k}",
            f"{by_norm[k - 1]:.1%}",
            f"{by_loss[k - 1]:.1%}",
            f"{brightness[:k].median():.0%}",
            f"[cyan]{'█' * round(25 * float(by_norm[k - 1]))}[/]",
        )
    console.print(table)
    console.print(f"MTCNN was trained on the {MINED:.0%} with the largest losses (online hard sample mining)")


@dataclass(frozen=True)
class Noise:
    """One layer's gradient and its noise.

    Args:
        signal: squared norm of the expected gradient, an unbiased estimate; it can come out negative.
        noise: summed variance of the per-sample gradients, unbiased.
        top: share of the five largest gradients in the sum of squared norms.
    """

    signal: float
    noise: float
    top: float

    @property
    def scale(self) -> str:
        """Batch size at which the noise of the mean gradient is as large as the gradient."""
        return f"{self.noise / self.signal:,.0f}" if self.signal > 0 else "not resolved"


def layer_noise(model: nn.Module, patches: Tensor, labels: Tensor) -> dict[str, Noise]:
    """Gradient noise by layer; one backward pass, and no per-sample gradient is kept."""
    losses = F.cross_entropy(model(patches), labels, reduction="none")
    model.zero_grad()
    results = gradbatch.backward(model, losses, Variance(unbiased=True), BatchL2Grad(), reduction="mean")
    noises = {}
    for layer, module in model.named_children():
        names = [f"{layer}.{name}" for name, _ in module.named_parameters()]
        if names:
            noise = sum(float(results[Variance][name].sum()) for name in names)
            mean = sum(float(p.grad.square().sum()) for p in module.parameters())
            squared = torch.stack([results[BatchL2Grad][name] for name in names]).sum(0)
            # The mean over N samples has a share 1/N of their variance in its own squared norm.
            noises[layer] = Noise(
                mean - noise / len(losses), noise, float(squared.topk(5).values.sum() / squared.sum())
            )
    return noises


def show_noise(
    model: nn.Module, noises: dict[str, Noise], without: dict[str, Noise], console: Console
) -> None:
    """A row for each layer: gradient, noise, and what a single patch does to them."""
    table = Table(title="\nGradient noise by layer", title_justify="left", box=None, pad_edge=False)
    titles = ("|gradient|²", "noise", "top 5 patches", "noise scale", "without the hardest patch")
    for title in ("layer", "parameters", *titles):
        table.add_column(title, justify="left" if title == "layer" else "right")
    for layer, noise in noises.items():
        size = sum(parameter.numel() for parameter in model.get_submodule(layer).parameters())
        table.add_row(
            layer,
            f"{size:,}",
            f"{noise.signal:.1e}",
            f"{noise.noise:.1e}",
            f"{noise.top:.0%}",
            noise.scale,
            without[layer].scale,
        )
    console.print(table)
    console.print("Noise scale: the batch size at which the noise of the mean gradient equals the gradient")


def draw(path: Path, patches: Tensor, labels: Tensor, found: Tensor, norms: Tensor) -> None:
    """The hardest patches that are no faces, the hardest faces, the easiest of both."""
    order = norms.argsort(descending=True)
    is_face = labels[order].bool()
    rows = (
        ("hardest non-faces", order[~is_face]),
        ("hardest faces", order[is_face]),
        ("easiest", order.flip(0)),
    )
    figure, axes = plt.subplots(3, SHOWN, figsize=(1.5 * SHOWN, 6), layout="constrained")
    for row, (title, chosen) in zip(axes, rows, strict=True):
        row[0].set_ylabel(title, fontsize=11, labelpad=8)
        for axis, n in zip(row, chosen[:SHOWN].tolist(), strict=True):
            axis.imshow(patches[n, 0].numpy(), cmap="gray", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            size = f"{norms[n]:{'.2f' if norms[n] > 0.01 else '.0e'}}"
            axis.set_title(f"P(face) {found[n]:.4f}\nnorm {size}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
