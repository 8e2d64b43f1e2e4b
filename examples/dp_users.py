"""Protect users, not records: everyone has drawn one to five of scikit-learn's digits, and is clipped with all of them.

A data set with an entry for each user, a batch that says whose each record is, and ``sample_ids``: then noise and
epsilon are for neighbours that differ by one user with all records. Writes a picture, and a log with a line for each
step. Norms of users' gradients are printed and logged here to look at: they are private, and no epsilon covers them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradbatch import privacy

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPSILON, DELTA, MAX_NORM, BATCH = 3.0, 1e-4, 1.0, 128  # the batch is of users, and delta for users
User = tuple[Tensor, Tensor]  # images [records, 64] and classes [records]
Log = list[dict[str, Any]]


def main() -> int:
    """Train with privacy and without, compare, draw; 1 if more than the promised epsilon was spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=EPSILON, help=f"to spend at most ({EPSILON:g})")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the users (20)")
    parser.add_argument("--picture", type=Path, default=Path("dp_users.png"), help="to write")
    parser.add_argument("--log", type=Path, default=Path("dp_users.jsonl"), help="to write")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    torch.manual_seed(0)

    users, unseen = load()
    both = (users, unseen, options.epochs)
    plain, _ = train(*both, lr=0.5, noise_multiplier=0.0, max_norm=1e6)
    log, private = train(*both, lr=2.0, target_epsilon=options.epsilon, max_norm=MAX_NORM)

    norms = [line["norm"] for line in log if "norm" in line]
    console.print(
        f"{len(users)} users with {sum(len(y) for _, y in users)} digits, {BATCH} users expected in a batch\n"
        f"unseen digits recognised: {log[-1]['accuracy']:.1%}, without privacy {plain[-1]['accuracy']:.1%}\n"
        f"epsilon spent: {private.epsilon():.3f} at delta {DELTA:g}, of neighbours that differ by one user\n"
        f"noise: {private.noise_multiplier:.2f} times the bound of {MAX_NORM:g}, in each of {private.steps} steps\n"
        f"median norm of a user's gradient (to look at, not to publish): {sum(norms) / len(norms):.2f}\n"
        f"Picture: [bold]{options.picture}[/], log: [bold]{options.log}[/]"
    )
    draw(options.picture, log, plain)
    lines = [{"run": "private", **line} for line in log] + [{"run": "plain", **line} for line in plain]
    options.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0 if private.epsilon() <= options.epsilon else 1


def load() -> tuple[list[User], User]:
    """480 users, each with one to five digits, and digits of nobody's to test with."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(labels))
    sizes = (torch.arange(480) % 5 + 1).tolist()
    sizes.append(len(labels) - sum(sizes))
    parts = (images[order].float() / 16).split(sizes), labels[order].long().split(sizes)
    *users, unseen = zip(*parts, strict=True)
    return users, unseen


def collate(drawn: list[User]) -> tuple[Tensor, Tensor, Tensor]:
    """All records of the users drawn, and whose each is."""
    images, labels = zip(*drawn, strict=True)
    ids = torch.arange(len(drawn)).repeat_interleave(torch.tensor([len(own) for own in labels]))
    return torch.cat(images), torch.cat(labels), ids


def train(users: list[User], unseen: User, epochs: int, lr: float, **how: Any) -> tuple[Log, privacy.Private]:
    """A user's loss is the mean over their records, so that nobody counts for more by having more."""
    torch.manual_seed(1)  # the same weights at first
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = privacy.poisson_loader(users, expected_batch_size=BATCH, epochs=epochs, collate_fn=collate)
    private = privacy.make_private(model, optimizer, loader, delta=DELTA, **how)
    log: Log = []
    for x, y, ids in private.loader:
        losses = F.cross_entropy(model(x), y, reduction="none") / ids.bincount()[ids]
        clipped = private.backward(losses, sample_ids=ids)
        optimizer.step()
        optimizer.zero_grad()
        accuracy = float((model(unseen[0]).argmax(1) == unseen[1]).float().mean())
        log.append({"step": private.steps, "users": len(clipped.norms), "accuracy": accuracy})
        if len(y):  # a batch may be empty
            log[-1]["norm"] = float(clipped.norms.median())
    return log, private


def draw(path: Path, log: Log, plain: Log) -> None:
    """Accuracy, and the median norm of users' gradients, over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot([line["accuracy"] for line in plain], color="gray", label="not private")
    left.plot([line["accuracy"] for line in log], color="steelblue", label="private")
    left.set(xlabel="step", ylabel="unseen digits recognised", ylim=(0, 1))
    right.plot([line.get("norm") for line in log], color="steelblue", label="median user")
    right.axhline(MAX_NORM, color="firebrick", label="bound")
    right.set(xlabel="step", ylabel="norm of a user's gradient", ylim=(0, None))
    for axis in (left, right):
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
