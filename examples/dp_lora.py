"""Fine-tune a small transformer privately with LoRA: it knows Python code, and learns English, in under a minute.

The base predicts the next character of lines of the standard library that are no comments, and count as public. Then it
is frozen. Layers of low rank beside the linear layers of its last block (Hu et al., 2021,
https://arxiv.org/abs/2106.09685) and its head learn from the library's comments, which stand for private text: what is
clipped, noised and published are these parameters alone. The blocks before do the same in every step, so each line goes
through them once. For comparison, the same is learned without clipping and noise. Writes a picture, and a log with a
line for each step.

Norms of gradients are printed and logged here to look at: they are private, and no epsilon covers them.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gradbatch import privacy

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPSILON, DELTA, MAX_NORM, BATCH = 3.0, 1e-6, 1.0, 256
RATE, EVERY = 3e-3, 10  # learning rate; steps between two looks at unseen lines
WIDTH, HEADS, BLOCKS, RANK = 64, 4, 2, 4
# All characters that can be printed in ASCII: chosen without a look at the data.
CHARACTERS, LENGTH = 95, 24
Log = list[dict[str, Any]]


class Block(nn.Module):
    """Attention to the characters before, and two layers for each character."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [N, LENGTH, WIDTH]
        normed = self.norm1(x)
        heads = [
            linear(normed).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    """Characters and where they are: ``[N, LENGTH]`` to ``[N, LENGTH, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        return self.character(text) + self.place.weight


def head() -> nn.Sequential:
    """Scores of the next character."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS))


class LoRA(nn.Module):
    """A frozen linear layer, and beside it a product of two small ones, zero at first."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def main() -> int:
    """Train the base, fine-tune twice, compare, draw; 1 if more than the promised epsilon was spent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=EPSILON, help=f"to spend at most ({EPSILON:g})")
    parser.add_argument("--epochs", type=float, default=2.0, help="passes over the private lines (2)")
    parser.add_argument("--base-steps", type=int, default=150, help="of training on public lines (150)")
    parser.add_argument("--picture", type=Path, default=Path("dp_lora.png"), help="to write")
    parser.add_argument(
        "--log", type=Path, default=Path("dp_lora.jsonl"), help="to write, a line for each step"
    )
    options = parser.parse_args()
    console = Console(highlight=False)
    torch.manual_seed(0)
    started = time.perf_counter()

    code, comments = lines()
    base = train_base(code, options.base_steps).requires_grad_(False)
    with torch.no_grad():  # once and for all: what the frozen layers make of a line depends on it alone
        features = base[:-2](comments[:, :-1])
    data, unseen = TensorDataset(features[1000:], comments[1000:, 1:]), (features[:1000], comments[:1000, 1:])
    before = measured(base[-2:], unseen)
    private_log, private = fine_tune_privately(adapted(base), data, unseen, options, console)
    plain_log = fine_tune(adapted(base), data, unseen, options.epochs)

    show(before, private_log, plain_log, private, console)
    draw(options.picture, before, private_log, plain_log)
    options.log.write_text("".join(json.dumps(line) + "\n" for line in [*private_log, *plain_log]))
    console.print(
        f"\nPicture: [bold]{options.picture}[/], log: [bold]{options.log}[/] "
        f"({time.perf_counter() - started:.0f} s in all)"
    )
    return 0 if private.epsilon() <= options.epsilon else 1


def lines() -> tuple[Tensor, Tensor]:
    """Different lines of the standard library, and its comments, ``[n, LENGTH + 1]`` each, in a random order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted([*root.glob("*.py"), *root.glob("*/*.py")])
    files = [path for path in files if not re.search("test|packages", str(path.relative_to(root)))]
    texts = [path.read_text("utf-8", "ignore") for path in files]
    found = sorted({line.strip() for text in texts for line in text.splitlines()})
    found = [line for line in found if line.isascii() and line.isprintable()]
    code = [line for line in found if line[:1] != "#"]
    return numbers(code), numbers([line[2:] for line in found if line.startswith("# ")])


def numbers(texts: list[str]) -> Tensor:
    """The beginnings of those texts that are long enough."""
    rows = [list(text[: LENGTH + 1].encode()) for text in texts if len(text) > LENGTH]
    return torch.tensor(rows)[torch.randperm(len(rows))] - ord(" ")


def losses_of(model: nn.Sequential, x: Tensor, targets: Tensor) -> Tensor:
    """Mean over the characters of each line, ``[N]``."""
    return (
        F.cross_entropy(model(x).flatten(0, 1), targets.flatten(), reduction="none")
        .view(targets.shape)
        .mean(1)
    )


def train_base(code: Tensor, steps: int) -> nn.Sequential:
    """Learn the public lines, without privacy."""
    base = nn.Sequential(Embedding(), *(Block() for _ in range(BLOCKS)), head())
    optimizer = torch.optim.Adam(base.parameters(), lr=3e-3)
    for _ in range(steps):
        part = code[torch.randint(len(code), (128,))]
        optimizer.zero_grad()
        losses_of(base, part[:, :-1], part[:, 1:]).mean().backward()
        optimizer.step()
    return base


def adapted(base: nn.Sequential) -> nn.Sequential:
    """The base's last block with LoRA, and its head to train on; the same numbers each time."""
    block, own_head = copy.deepcopy(base[-2]), copy.deepcopy(base[-1]).requires_grad_(True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRA(layer))
    return nn.Sequential(block, own_head)


def fine_tune_privately(
    model: nn.Sequential, data: TensorDataset, unseen: tuple[Tensor, Tensor], options: Any, console: Console
) -> tuple[Log, privacy.Private]:
    """DP-Adam on what is not frozen."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=RATE)
    loader = privacy.poisson_loader(data, expected_batch_size=BATCH, epochs=options.epochs)
    private = privacy.make_private(
        model, optimizer, loader, target_epsilon=options.epsilon, delta=DELTA, max_norm=MAX_NORM
    )
    console.print(
        f"{len(data)} private lines to learn from, with {sum(map(torch.numel, trainable))} parameters. "
        f"({options.epsilon:g}, {DELTA:g})-differential privacy over {len(loader)} steps needs noise of "
        f"{private.noise_multiplier:.2f} times the bound on the norm."
    )
    log: Log = []
    for x, y in private.loader:
        clipped = private.backward(losses_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        line = {"run": "private", "step": private.steps, "batch": len(y)}
        if len(y):
            line["norms"] = clipped.norms.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
        if private.steps % EVERY == 0 or private.steps == len(loader):
            line |= measured(model, unseen)
        log.append(line)
    log[-1]["epsilon"] = private.epsilon()
    return log, private


def fine_tune(model: nn.Sequential, data: TensorDataset, unseen: tuple[Tensor, Tensor], epochs: float) -> Log:
    """The same on batches drawn alike, with neither clipping nor noise."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)
    loader, log = privacy.poisson_loader(data, expected_batch_size=BATCH, epochs=epochs), []
    for step, (x, y) in enumerate(loader, start=1):
        (losses_of(model, x, y).sum() / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({"run": "plain", "step": step, "batch": len(y)})
        if step % EVERY == 0 or step == len(loader):
            log[-1] |= measured(model, unseen)
    return log


@torch.no_grad()
def measured(model: nn.Sequential, unseen: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Loss and accuracy on lines that no training sees."""
    scores, targets = model(unseen[0]), unseen[1]
    return {
        "loss": float(F.cross_entropy(scores.flatten(0, 1), targets.flatten())),
        "accuracy": float((scores.argmax(2) == targets).float().mean()),
    }


def show(
    before: dict[str, float], private_log: Log, plain_log: Log, private: privacy.Private, console: Console
) -> None:
    """What was learned, with privacy and without, and how norms lie to the bound."""
    table = Table(title="\nOn unseen comments", title_justify="left", box=None, pad_edge=False)
    for title in ("", "base", "private", "not private"):
        table.add_column(title, justify="right" if title else "left")
    each = (before, private_log[-1], plain_log[-1])
    table.add_row("next character right", *(f"{line['accuracy']:.1%}" for line in each))
    table.add_row("loss (nats a character)", *(f"{line['loss']:.3f}" for line in each))
    table.add_row(f"epsilon, at delta {DELTA:g}", "0", f"{private.epsilon():.3f}", "∞")
    console.print(table)
    norms = [line["norms"] for line in private_log if "norms" in line]
    spread = ", ".join(f"{sum(column) / len(norms):.2f}" for column in zip(*norms, strict=True))
    console.print(
        f"\nGradient norms before clipping to {MAX_NORM:g} (private: to look at, not to publish): {spread} at 10%, 50% "
        "and 90% of the lines. Neighbours: sets of comments that differ by one, added or removed."
    )


def draw(path: Path, before: dict[str, float], private_log: Log, plain_log: Log) -> None:
    """Accuracy and norms over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for log, colour, label in ((plain_log, "gray", "not private"), (private_log, "steelblue", "private")):
        points = [(line["step"], line["accuracy"]) for line in log if "accuracy" in line]
        left.plot(*zip((0, before["accuracy"]), *points, strict=True), color=colour, label=label)
    left.axhline(before["accuracy"], color="black", linestyle=":", label="base")
    left.set(xlabel="step", ylabel="next characters right")
    left.legend(frameon=False)

    steps, norms = zip(
        *((line["step"], line["norms"]) for line in private_log if "norms" in line), strict=True
    )
    low, half, high = zip(*norms, strict=True)
    right.fill_between(steps, low, high, color="steelblue", alpha=0.25, linewidth=0, label="10% to 90%")
    right.plot(steps, half, color="steelblue", label="median")
    right.axhline(MAX_NORM, color="firebrick", label="bound")
    right.set(xlabel="step", ylabel="gradient norm", ylim=(0, None))
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
