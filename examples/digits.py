"""Which handwritten digits pull hardest on a network? Per-sample gradients on scikit-learn's digits, in half a minute.

Trains a small network of grouped and depthwise convolutions, takes the gradient of every digit's own loss, checks them
against ``torch.func.vmap``, and draws the digits with the largest and the smallest gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchL2Grad

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH, CHECKED, SHOWN = 64, 64, 8
TOLERANCE = 1e-10


def main() -> int:
    """Train, check, measure, draw; 1 if the per-sample gradients are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training digits (10)")
    parser.add_argument("--picture", type=Path, default=Path("digits_by_gradient_norm.png"), help="to write")
    options = parser.parse_args()
    console = Console(highlight=False)
    torch.manual_seed(0)
    started = time.perf_counter()

    images, labels = load()
    test = len(images) // 5
    console.print(
        f"{len(images)} digits, {len(images) - test} to train on; full, depthwise and grouped convolutions"
    )
    model = network()
    train(model, images[test:], labels[test:], options.epochs, console)
    with torch.no_grad():
        probabilities = model(images).softmax(1)
    right = probabilities.argmax(1) == labels
    console.print(f"{right[:test].float().mean():.1%} of the other {test} are recognised\n")

    gradbatch.extend(model.double())
    images = images.double()
    largest, worst = largest_error(model, images[:CHECKED], labels[:CHECKED])
    verdict = "[green]agree[/]" if largest <= TOLERANCE else "[red]do not agree[/]"
    console.print(f"Per-sample gradients {verdict} with torch.func.vmap:")
    console.print(f"{CHECKED} digits, largest relative error {largest:.1e} (in {worst})")

    norms = gradient_norms(model, images, labels)
    show_classes(labels, norms, right, console)
    hardest = norms.argsort(descending=True)
    show_hardest(hardest[:SHOWN], test, labels, norms, probabilities, console)
    draw(options.picture, images, labels, probabilities.argmax(1), norms)
    console.print(f"\nPicture: [bold]{options.picture}[/] ({time.perf_counter() - started:.0f} s in all)")
    return 0 if largest <= TOLERANCE else 1


def load() -> tuple[Tensor, Tensor]:
    """The digits in a random order: ``[1797, 1, 8, 8]`` between 0 and 1, and their classes."""
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    return images[order], torch.from_numpy(digits.target)[order].long()


def network() -> nn.Sequential:
    """No BatchNorm: it would mix the samples. Depthwise with a multiplier of 2, then grouped."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, groups=16),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=4),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, console: Console) -> None:
    """Plain training: nothing of gradbatch in it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=epochs, loss=float("nan"))
        for _ in range(epochs):
            total = 0.0
            for batch in torch.randperm(len(images)).split(BATCH):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                total += loss.item() * len(batch)
            progress.update(task, advance=1, loss=total / len(images))


def largest_error(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, str]:
    """Largest relative difference to ``torch.func.vmap`` in any parameter, and the parameter's name."""

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(model, parameters, (image.unsqueeze(0),))
        return F.cross_entropy(output, label.unsqueeze(0))

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)

    losses = F.cross_entropy(model(images), labels, reduction="none")
    grads = gradbatch.per_sample_grads(model, losses)
    return max(
        (float((grads[name] - expected[name]).abs().max() / expected[name].abs().max()), name)
        for name in expected
    )


def gradient_norms(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Norm of the gradient of each digit's own loss, ``[N]``, over all parameters."""
    norms = []
    for batch in torch.arange(len(images)).split(BATCH):
        losses = F.cross_entropy(model(images[batch]), labels[batch], reduction="none")
        results = gradbatch.backward(model, losses, BatchL2Grad())
        norms.append(results[BatchL2Grad].total().sqrt())
    return torch.cat(norms)


def show_classes(labels: Tensor, norms: Tensor, right: Tensor, console: Console) -> None:
    """A row for each of the ten digits."""
    table = Table(title="\nGradient norms by class", title_justify="left", box=None, pad_edge=False)
    for title in ("digit", "images", "recognised", "median", "largest", "mean"):
        table.add_column(title, justify="right")
    table.add_column()
    means = torch.stack([norms[labels == digit].mean() for digit in range(10)])
    for digit in range(10):
        own = labels == digit
        bar = "█" * round(20 * float(means[digit] / means.max()))
        table.add_row(
            str(digit),
            str(int(own.sum())),
            f"{right[own].float().mean():.1%}",
            f"{norms[own].median():.3f}",
            f"{norms[own].max():.1f}",
            f"{means[digit]:.2f}",
            f"[cyan]{bar}[/]",
        )
    console.print(table)


def show_hardest(
    hardest: Tensor, test: int, labels: Tensor, norms: Tensor, probabilities: Tensor, console: Console
) -> None:
    """A row for each digit with a large gradient; the first ``test`` digits were not trained on."""
    table = Table(title="\nThe hardest digits", title_justify="left", box=None, pad_edge=False)
    for title in ("label", "predicted", "with", "label has", "norm", "trained on"):
        table.add_column(title, justify="right")
    for i in hardest.tolist():
        label, predicted = int(labels[i]), int(probabilities[i].argmax())
        table.add_row(
            str(label),
            str(predicted),
            f"{probabilities[i, predicted]:.1%}",
            f"{probabilities[i, label]:.1%}",
            f"{norms[i]:.1f}",
            "yes" if i >= test else "no",
            style="red" if predicted != label else "",
        )
    console.print(table)


def draw(path: Path, images: Tensor, labels: Tensor, predicted: Tensor, norms: Tensor) -> None:
    """Two rows of digits: the largest gradients above the smallest."""
    order = norms.argsort(descending=True)
    rows = (("largest gradient norms", order[:SHOWN]), ("smallest gradient norms", order.flip(0)[:SHOWN]))
    figure, axes = plt.subplots(2, SHOWN, figsize=(1.5 * SHOWN, 4.3), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, hspace=0.06)
    for row, (title, chosen) in zip(axes, rows, strict=True):
        row[0].set_ylabel(title, fontsize=11, labelpad=8)
        for axis, i in zip(row, chosen.tolist(), strict=True):
            axis.imshow(images[i, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_color("lightgray")
            wrong = predicted[i] != labels[i]
            words = (
                f"{labels[i]}, predicted {predicted[i]}\nnorm {norms[i]:{'.1f' if norms[i] > 1 else '.1e'}}"
            )
            axis.set_title(words, fontsize=10, color="firebrick" if wrong else "black")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
