"""Draw the pictures of the guide to gradient statistics: ``python -m docs.pictures`` (half a minute).

A small convolutional network learns scikit-learn's digits, of which one in twenty has a wrong label. With chromium on
the path, the whole report is photographed as well.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradbatch.analysis import GradientMonitor, plots, read_log, write_report

FOLDER = Path(__file__).parent
PICTURES = (plots.noise_scale, plots.layer_signal, plots.norm_histogram, plots.hardest_samples)
STEPS, BATCH, WRONG = 1200, 64, 0.05
WINDOW = (980, 800)  # of the report's photograph: wide enough for two columns, down to the first pictures


def main() -> None:
    """Train, draw, and say which digits have a wrong label."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target).long()
    wrong = torch.randperm(len(labels))[: round(WRONG * len(labels))]
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, wrong.shape)) % 10
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "digits.jsonl"
        train(images, labels, path)
        for draw in PICTURES:
            target = FOLDER / f"analysis-{draw.__name__.replace('_', '-')}.png"
            draw(read_log(path)).savefig(target, dpi=150, pil_kwargs={"optimize": True})
        page = write_report(path, Path(directory) / "report.html")
        if browser := shutil.which("chromium"):
            photograph(browser, page, FOLDER / "report.png")
    sys.stdout.write(f"{len(wrong)} wrong labels: {sorted(wrong.tolist())}\n")


def network() -> nn.Sequential:
    """Four layers with names of their own, so that the heat map says which is which."""
    layers = nn.Sequential()
    layers.add_module("first", nn.Conv2d(1, 8, 3, padding=1))
    layers.add_module("relu1", nn.ReLU())
    layers.add_module("grouped", nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4))
    layers.add_module("relu2", nn.ReLU())
    layers.add_module("flatten", nn.Flatten())
    layers.add_module("hidden", nn.Linear(256, 32))
    layers.add_module("relu3", nn.ReLU())
    layers.add_module("head", nn.Linear(32, 10))
    return layers


def train(images: Tensor, labels: Tensor, path: Path) -> None:
    """A training loop with a monitor in it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = {"norms": 4, "tests": 4, "evidence": 20, "gram": 200}
    with GradientMonitor(model, path, every=every, preset="full") as monitor:
        for k in range(STEPS):
            batch = torch.randint(len(images), (BATCH,))
            optimizer.zero_grad()
            with monitor.step(k, ids=batch) as step:
                step.loss = loss = F.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
            optimizer.step()


def photograph(browser: str, page: Path, target: Path) -> None:
    """The top of a page, as a browser shows it, in as few colours as it needs."""
    size = "--window-size={},{}".format(*WINDOW)
    hidden = ("--headless", "--no-sandbox", "--hide-scrollbars", size, f"--screenshot={target}")
    subprocess.run([browser, *hidden, page.as_uri()], check=True, capture_output=True)
    few = Image.open(target).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(target, optimize=True)


if __name__ == "__main__":
    main()
