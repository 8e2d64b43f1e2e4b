"""What does privacy cost? A network learns scikit-learn's digits privately, and once more without, in half a minute.

Says first how much noise the promised epsilon needs. Then trains by DP-SGD, keeps account of what is spent, and shows
the accuracy on digits that no training saw beside that of the same network, trained on batches drawn alike without
clipping and noise. Writes a picture, and a log with a line for each step.

Norms of gradients and losses on training digits are printed and logged here to look at: they are computed from private
data without noise, and no epsilon covers them. What may be published are the weights, and what is computed from them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gradbatch import privacy

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPSILON, DELTA, MAX_NORM, BATCH = 3.0, 1e-5, 1.0, 256
POINTS = 8  # at which epsilon is drawn
QUANTILES = (0.1, 0.5, 0.9)
Log = list[dict[str, Any]]


def main() -> int:
    """Train twice, compare, draw; 1 if more than the promised epsilon was spent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=EPSILON, help=f"to spend at most ({EPSILON:g})")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training digits (30)")
    parser.add_argument("--secure", action="store_true", help="noise and batches from the system's CSPRNG")
    parser.add_argument("--picture", type=Path, default=Path("dp_digits.png"), help="to write")
    parser.add_argument(
        "--log", type=Path, default=Path("dp_digits.jsonl"), help="to write, a line for each step"
    )
    options = parser.parse_args()
    console = Console(highlight=False)
    torch.manual_seed(0)
    started = time.perf_counter()

    images, labels = load()
    test = len(images) // 5
    unseen, data = (images[:test], labels[:test]), TensorDataset(images[test:], labels[test:])
    private_log, private = train_privately(
        data, unseen, options.epsilon, options.epochs, options.secure, console
    )
    plain_log = train_plainly(data, unseen, options.epochs)

    show_comparison(private_log, plain_log, private, len(data), console)
    show_norms(private_log, console)
    draw(options.picture, private_log, plain_log, options.epsilon)
    options.log.write_text("".join(json.dumps(line) + "\n" for line in [*private_log, *plain_log]))
    console.print(
        f"\nPicture: [bold]{options.picture}[/], log: [bold]{options.log}[/] "
        f"({time.perf_counter() - started:.0f} s in all)"
    )
    return 0 if private.epsilon() <= options.epsilon else 1


def load() -> tuple[Tensor, Tensor]:
    """The digits in a random order: ``[1797, 1, 8, 8]`` between 0 and 1, and their classes."""
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    return images[order], torch.from_numpy(digits.target)[order].long()


def network() -> nn.Sequential:
    """Small: noise grows with the number of weights, and the digits' signal does not. The same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def train_privately(
    data: TensorDataset,
    unseen: tuple[Tensor, Tensor],
    epsilon: float,
    epochs: int,
    secure: bool,
    console: Console,
) -> tuple[Log, privacy.Private]:
    """DP-SGD, with the noise that ``epsilon`` asks for."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    loader = privacy.poisson_loader(data, expected_batch_size=BATCH, epochs=epochs, secure=secure)
    private = privacy.make_private(
        model,
        optimizer,
        loader,
        target_epsilon=epsilon,
        delta=DELTA,
        max_norm=MAX_NORM,
        noise=privacy.GaussianNoise(secure=secure),
    )
    console.print(
        f"{len(data)} digits to train on, of which each is in a batch with probability {loader.sample_rate:.3f}. "
        f"({epsilon:g}, {DELTA:g})-differential privacy over {len(loader)} steps needs noise of "
        f"{private.noise_multiplier:.2f} times the bound on the norm."
    )
    log: Log = []
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for x, y in progress.track(private.loader):
            losses = F.cross_entropy(model(x), y, reduction="none")
            clipped = private.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
            line = measured("private", model, unseen, len(x), losses)
            if len(x):
                spread = clipped.norms.quantile(torch.tensor(QUANTILES)).tolist()
                line |= {f"norm_{quantile:g}": norm for quantile, norm in zip(QUANTILES, spread, strict=True)}
                line["cut"] = float((clipped.factors < 1).float().mean())
            log.append(line)
    # The account is the same whenever it is asked; asked after each step, it would take longer than the training.
    for steps in {round(len(log) * part / POINTS) for part in range(1, POINTS + 1)} - {0}:
        log[steps - 1]["epsilon"] = privacy.epsilon(
            noise_multiplier=private.noise_multiplier,
            sample_rate=loader.sample_rate,
            steps=steps,
            delta=DELTA,
        )
    return log, private


def train_plainly(data: TensorDataset, unseen: tuple[Tensor, Tensor], epochs: int) -> Log:
    """The same network on batches drawn alike, with neither clipping nor noise."""
    model, log = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in privacy.poisson_loader(data, expected_batch_size=BATCH, epochs=epochs):
        losses = F.cross_entropy(model(x), y, reduction="none")
        (losses.sum() / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append(measured("plain", model, unseen, len(x), losses))
    return log


@torch.no_grad()
def measured(
    run: str, model: nn.Module, unseen: tuple[Tensor, Tensor], size: int, losses: Tensor
) -> dict[str, Any]:
    """What is logged of every step."""
    images, labels = unseen
    accuracy = float((model(images).argmax(1) == labels).float().mean())
    return {"run": run, "batch": size, "loss": float(losses.sum() / max(size, 1)), "accuracy": accuracy}


def show_comparison(
    private_log: Log, plain_log: Log, private: privacy.Private, records: int, console: Console
) -> None:
    """What privacy cost, and what was bought."""
    table = Table(title="\nAfter training", title_justify="left", box=None, pad_edge=False)
    for title in ("", "private", "not private"):
        table.add_column(title, justify="left" if not title else "right")
    rows = [
        (
            "unseen digits recognised",
            f"{private_log[-1]['accuracy']:.1%}",
            f"{plain_log[-1]['accuracy']:.1%}",
        ),
        (f"epsilon spent, at delta {DELTA:g}", f"{private.epsilon():.3f}", "∞"),
        ("steps", str(private.steps), str(len(plain_log))),
        ("noise, times the bound", f"{private.noise_multiplier:.2f}", "–"),
        ("samples not finite", str(private.non_finite), "–"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        f"Neighbours: training sets that differ by one of the {records} digits, added or removed. Batches are drawn by "
        "Poisson sampling, as the account assumes."
    )


def show_norms(log: Log, console: Console) -> None:
    """A row for each sixth of the steps: how norms lie to the bound."""
    table = Table(
        title=f"\nGradient norms before clipping to {MAX_NORM:g} (private: to look at, not to publish)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for title in ("steps", *(f"{quantile:.0%} below" for quantile in QUANTILES), "cut"):
        table.add_column(title, justify="right")
    drawn = [line for line in log if line["batch"]]
    width = max(1, len(drawn) // 6)
    for start in range(0, len(drawn) - width + 1, width):
        part = drawn[start : start + width]
        norms = [sum(line[f"norm_{quantile:g}"] for line in part) / len(part) for quantile in QUANTILES]
        cut = sum(line["cut"] for line in part) / len(part)
        table.add_row(f"{start + 1}–{start + width}", *(f"{norm:.2f}" for norm in norms), f"{cut:.0%}")
    console.print(table)


def draw(path: Path, private_log: Log, plain_log: Log, epsilon: float) -> None:
    """Accuracy, epsilon and norms over the steps."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 3.6), layout="constrained")
    left.plot([line["accuracy"] for line in plain_log], color="gray", label="not private")
    left.plot([line["accuracy"] for line in private_log], color="steelblue", label="private")
    left.set(xlabel="step", ylabel="unseen digits recognised", ylim=(0, 1))
    left.legend(frameon=False)

    spent = [(step, line["epsilon"]) for step, line in enumerate(private_log, start=1) if "epsilon" in line]
    middle.plot(*zip((0, 0), *spent, strict=True), marker="o", markersize=4, color="steelblue", label="spent")
    middle.axhline(epsilon, color="firebrick", label="promised")
    middle.set(xlabel="step", ylabel="epsilon spent", ylim=(0, None))
    middle.legend(frameon=False)

    steps = [step for step, line in enumerate(private_log) if line["batch"]]
    low, half, high = ([private_log[step][f"norm_{quantile:g}"] for step in steps] for quantile in QUANTILES)
    right.fill_between(steps, low, high, color="steelblue", alpha=0.25, linewidth=0, label="10% to 90%")
    right.plot(steps, half, color="steelblue", label="median")
    right.axhline(MAX_NORM, color="firebrick", label="bound")
    right.set(xlabel="step", ylabel="gradient norm", yscale="log")
    right.legend(frameon=False)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
