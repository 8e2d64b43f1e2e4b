"""Does the advice on the batch size hold? The noise scale against a sweep over batch sizes. In a minute.

Trains a small network on scikit-learn's digits to a given loss, for each of some batch sizes with each of some learning
rates, and counts the steps that the best learning rate takes. Small batches take many steps, large ones many samples;
the batch size between, at which both are twice their least, is the critical batch size. The noise scale, measured in
one run with a monitor, is to predict it.

References:
    An Empirical Model of Large-Batch Training (McCandlish et al., 2018), https://arxiv.org/abs/1812.06162
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradbatch.analysis import GradientMonitor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SIZES = (4, 8, 16, 32, 64, 128, 256)
RATES = tuple(0.1 * 2 ** (i / 2) for i in range(9))
TARGET, MOST, WATCHED = 0.3, 4000, 64  # mean loss, steps, batch size of the run with a monitor
FACTOR = 3.0  # as close as one number can be to what changes tenfold in the course of training


def main() -> int:
    """Sweep, measure, compare; 1 if the noise scale is no guide to the critical batch size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs for each batch size and rate (2)")
    parser.add_argument("--picture", type=Path, default=Path("batch_size.png"), help="to write")
    options = parser.parse_args()
    console, started = Console(highlight=False), time.perf_counter()
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target).long()

    found = {}
    for size in track(SIZES, "Training", console=console, disable=not console.is_terminal):
        steps = {rate: mean_steps(images, labels, size, rate, options.seeds) for rate in RATES}
        rate = min(steps, key=lambda rate: steps[rate])
        found[size] = rate, steps[rate]
    least, critical = fitted({size: steps for size, (_, steps) in found.items()})
    noise, low, high = measured(images, labels, found[WATCHED][0])
    show(found, least, critical, noise, console)
    console.print(f"\nCritical batch size by the sweep: {critical:.0f}")
    console.print(
        f"Noise scale by a monitor in one run with batches of {WATCHED}: {noise:.0f} "
        f"(95% interval {low:.0f} to {high:.0f})"
    )
    draw(options.picture, found, least, critical, noise)
    console.print(f"\nPicture: [bold]{options.picture}[/] ({time.perf_counter() - started:.0f} s in all)")
    return 0 if 1 / FACTOR <= noise / critical <= FACTOR else 1


def network(seed: int) -> nn.Sequential:
    """A layer of ReLUs."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def steps_to_target(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    size: int,
    rate: float,
    monitor: GradientMonitor | None = None,
) -> float:
    """Steps of plain stochastic gradient descent until the mean loss over all digits is at the target."""
    parameters = list(model.parameters())
    for k in range(MOST):
        # Looked at ever less often: within a twentieth.
        if k % max(1, k // 20) == 0:
            with torch.no_grad():
                loss = float(F.cross_entropy(model(images), labels))
            if not loss < 10:
                return math.inf
            if loss < TARGET:
                return k
        batch = torch.randint(len(images), (size,))
        losses = F.cross_entropy(model(images[batch]), labels[batch], reduction="none")
        if monitor is None:
            grads = torch.autograd.grad(losses.mean(), parameters)
        else:
            model.zero_grad()
            monitor.backward(losses, k)
            grads = [parameter.grad for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, grads, alpha=-rate)
    return math.inf


def mean_steps(images: Tensor, labels: Tensor, size: int, rate: float, seeds: int) -> float:
    """Over seeds; infinite if one run does not get there."""
    total = 0.0
    for seed in range(seeds):
        total += steps_to_target(network(seed), images, labels, size, rate)
        if math.isinf(total):
            break
    return total / seeds


def fitted(steps: dict[int, float]) -> tuple[float, float]:
    """Least number of steps, and critical batch size: of ``steps = least (1 + critical / size)``, in logarithms."""
    candidates = [2 ** (i / 8) for i in range(8, 97)]

    def misfit(critical: float) -> tuple[float, float]:
        logs = torch.tensor([math.log(s) - math.log1p(critical / size) for size, s in steps.items()])
        return float(logs.var()), math.exp(float(logs.mean()))

    critical = min(candidates, key=lambda candidate: misfit(candidate)[0])
    return misfit(critical)[1], critical


def measured(images: Tensor, labels: Tensor, rate: float) -> tuple[float, float, float]:
    """Noise scale in one run to the target, with its 95% interval."""
    model = network(0)
    monitor = GradientMonitor(model, every=1, preset="economy")
    steps_to_target(model, images, labels, WATCHED, rate, monitor)
    low, high = monitor.noise.interval()
    return float(monitor.noise.value()), float(low), float(high)


def show(
    found: dict[int, tuple[float, float]], least: float, critical: float, noise: float, console: Console
) -> None:
    """A row for each batch size."""
    table = Table(title=f"To a loss of {TARGET}", title_justify="left", box=None, pad_edge=False)
    columns = (
        "batch size",
        "best rate",
        "steps",
        "samples",
        "steps by the sweep's fit",
        "by the noise scale",
    )
    for title in columns:
        table.add_column(title, justify="right")
    for size, (rate, steps) in found.items():
        by_fit, by_noise = (f"{least * (1 + scale / size):.0f}" for scale in (critical, noise))
        table.add_row(str(size), f"{rate:.2g}", f"{steps:.0f}", f"{size * steps:.0f}", by_fit, by_noise)
    console.print(table)


def draw(
    path: Path, found: dict[int, tuple[float, float]], least: float, critical: float, noise: float
) -> None:
    """Steps against the batch size: found, and as the model of large-batch training has them."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    sizes = list(found)
    axes.plot(sizes, [steps for _, steps in found.values()], "o", color="#1f5fa8", label="found")
    for scale, color, label in (
        (critical, "#1f5fa8", f"fitted: critical batch size {critical:.0f}"),
        (noise, "#b3372f", f"predicted: noise scale {noise:.0f}"),
    ):
        axes.plot(
            sizes, [least * (1 + scale / size) for size in sizes], color=color, linewidth=1.2, label=label
        )
        axes.axvline(scale, color=color, linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel=f"steps to a loss of {TARGET}")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    ticks = [tick for tick in (50, 100, 200, 400, 800) if tick <= 2 * max(s for _, s in found.values())]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    sys.exit(main())
