"""How noisy are the gradients of a network that learns digits, and whose labels are wrong? In half a minute.

Trains a small network on scikit-learn's digits and watches its gradients: how large a batch they ask for, from the
first steps to the last. Checks what batches of 16 say about it against the gradients of all digits. Then gives one
digit in twenty a wrong label, and finds these by the norms of their gradients while another network is trained.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchL2Grad
from gradbatch.analysis import (
    GradientMonitor,
    Log,
    NoiseScale,
    SampleScores,
    SumL2Grad,
    plots,
    read_log,
    write_report,
)
from gradbatch.analysis.summary import whole_noise

BATCH, SMALL, STRETCHES, FLIPPED = 128, 16, 5, 0.05
TOLERANCE = 0.1


def main() -> int:
    """Train, check, find; 1 if batches of 16 do not say what all digits say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="of training (1000)")
    parser.add_argument("--batches", type=int, default=2000, help="of 16 digits each, for the check (2000)")
    parser.add_argument("--picture", type=Path, default=Path("gradient_noise.png"), help="to write")
    parser.add_argument("--report", type=Path, help="also write the page of `gradbatch report` here")
    options = parser.parse_args()
    console = Console(highlight=False)
    torch.manual_seed(0)
    started = time.perf_counter()
    images, labels = load()

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "digits.jsonl"
        train(images, labels, options.steps, path)
        log = read_log(path)
        if options.report:
            write_report(path, options.report)
    show_course(log, console)
    plots.noise_scale(log).savefig(options.picture, dpi=200)

    error = check(images, labels, options.batches, console)
    find_wrong_labels(images, labels, console)
    console.print(f"\nPicture: [bold]{options.picture}[/] ({time.perf_counter() - started:.0f} s in all)")
    return 0 if error <= TOLERANCE else 1


def load() -> tuple[Tensor, Tensor]:
    """``[1797, 64]`` between 0 and 1, and the classes."""
    digits = load_digits()
    return torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()


def network(hidden: int) -> nn.Sequential:
    """A layer of ReLUs."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def train(images: Tensor, labels: Tensor, steps: int, path: Path) -> None:
    """A training loop with a monitor in it."""
    model = network(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = {"norms": 4, "tests": 4, "evidence": 20, "gram": 100}
    with GradientMonitor(model, path, every=every, preset="full") as monitor:
        for k in range(steps):
            batch = torch.randint(len(images), (BATCH,))
            optimizer.zero_grad()
            with monitor.step(k, ids=batch) as step:
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                step.loss = loss
            optimizer.step()


def show_course(log: Log, console: Console) -> None:
    """A row for each stretch of the training."""
    table = Table(
        title=f"Learning digits, {BATCH} a step",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for title in ("steps", "loss", "median norm", "noise scale", "95% interval"):
        table.add_column(title, justify="right")
    size = -(-len(log.records) // STRETCHES)
    for start in range(0, len(log.records), size):
        stretch = log.records[start : start + size]
        noise = whole_noise(stretch)
        low, high = noise.interval()
        losses = [record.loss for record in stretch if record.loss is not None]
        medians = [record.quantiles[3] for record in stretch if record.quantiles[3] is not None]
        table.add_row(
            f"{stretch[0].step} to {stretch[-1].step}",
            f"{sum(losses) / len(losses):.3f}",
            f"{sum(medians) / len(medians):.3f}",
            f"{noise.value():.0f}",
            f"{low:.0f} to {high:.0f}",
        )
    console.print(table)


def check(images: Tensor, labels: Tensor, batches: int, console: Console) -> float:
    """Relative error of the noise scale from small batches, where all per-sample gradients say what it is."""
    model = network(16).double()
    images = images.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    gradbatch.extend(model)
    grads = gradbatch.per_sample_grads(model, F.cross_entropy(model(images), labels, reduction="none"))
    rows = torch.cat([grad.flatten(1) for grad in grads.values()], 1)
    truth = float(rows.var(0, unbiased=False).sum() / rows.mean(0).square().sum())

    noise, ratios = NoiseScale(), []
    for _ in range(batches):
        # With replacement: independent draws from all digits, whose gradient is the true one here.
        batch = torch.randint(len(images), (SMALL,))
        losses = F.cross_entropy(model(images[batch]), labels[batch], reduction="none")
        results = gradbatch.backward(model, losses, BatchL2Grad(), SumL2Grad())
        parts = SMALL, results[BatchL2Grad].total().sum(), results[SumL2Grad].total()
        noise.update(*parts)
        one = NoiseScale()
        one.update(*parts)
        ratios.append(one.variance() / one.squared_gradient())
    value, (low, high) = float(noise.value()), noise.interval()
    alone = torch.stack(ratios)
    console.print(
        f"\nNoise scale of a network for digits, from the gradients of all {len(images)}: {truth:.1f}"
    )
    console.print(f"from {batches} batches of {SMALL}: {value:.1f} (95% interval {low:.1f} to {high:.1f})")
    console.print(f"mean of the batches' own ratios: {alone.mean():.1f} (they scatter by {alone.std():.0f});")
    console.print(f"{(alone < 0).double().mean():.0%} of them are negative, which is no error")
    return abs(value / truth - 1)


def find_wrong_labels(images: Tensor, labels: Tensor, console: Console) -> None:
    """Give some digits a wrong label, and look for them among those with the largest gradients."""
    count = round(FLIPPED * len(labels))
    wrong = torch.randperm(len(labels))[:count]
    given = labels.clone()
    given[wrong] = (labels[wrong] + torch.randint(1, 10, (count,))) % 10

    model = gradbatch.extend(network(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scores = SampleScores(len(images))
    for epoch in range(8):
        for batch in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(images[batch]), given[batch], reduction="none")
            results = gradbatch.backward(model, losses, BatchL2Grad(), reduction="mean")
            optimizer.step()
            if epoch >= 3:  # before, all digits have large gradients
                scores.update(batch, results[BatchL2Grad].total().sqrt())
    found = len(set(scores.largest(count)) & set(wrong.tolist()))
    first = len(set(scores.largest(count // 2)) & set(wrong.tolist()))
    console.print(
        f"\n{count} of {len(labels)} digits were given a wrong label. Of the {count} with the largest gradients"
    )
    console.print(f"while a network is trained, {found} are among them: precision {found / count:.0%};")
    console.print(
        f"of the first {count // 2}, {first / (count // 2):.0%}; by chance it would be {FLIPPED:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
