"""Two processes train one private model: each clips its share of every batch, and the noise is in the sum once.

``torchrun --nproc-per-node=2 -- examples/dp_distributed.py``, or run it plainly, and it does that; on CPUs, by gloo.
All ranks draw the same batch of scikit-learn's digits and keep a share each. A plain ``optimizer.step()`` adds up their
clipped sums and the noise. ``--shard`` spreads the parameters over the ranks too (``fully_shard``). Checks in the end
that all ranks have the same model, bit by bit. Rank 0 writes a picture, and a log with a line for each step.

Norms of gradients are printed and logged here to look at: they are private, and no epsilon covers them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gradbatch import privacy

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPSILON, DELTA, MAX_NORM, BATCH, PART = 3.0, 1e-5, 1.0, 256, 64  # of all ranks together, but for a part
Log = list[dict[str, Any]]


def main() -> int:
    """Start the processes, or be one of them; 1 if their models differ, or more was spent than promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=EPSILON, help=f"to spend at most ({EPSILON:g})")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training digits (20)")
    parser.add_argument("--shard", action="store_true", help="spread the parameters over the ranks too")
    parser.add_argument("--picture", type=Path, default=Path("dp_distributed.png"), help="to write")
    parser.add_argument("--log", type=Path, default=Path("dp_distributed.jsonl"), help="to write")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.run([*torchrun, __file__, *sys.argv[1:]], env=environment, check=False).returncode
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    try:
        return work(options)
    finally:
        dist.destroy_process_group()


def work(options: argparse.Namespace) -> int:
    """Train on this rank, together with all others; rank 0 talks."""
    torch.manual_seed(0)  # the same order of the digits on all ranks
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(labels))
    images, labels = images[order].float() / 16, labels[order].long()
    data, unseen = TensorDataset(images[360:], labels[360:]), (images[:360], labels[:360])

    plain, _, _ = train(data, unseen, options, lr=0.5, noise_multiplier=0.0, max_norm=1e6)
    log, private, model = train(
        data, unseen, options, lr=2.0, target_epsilon=options.epsilon, max_norm=MAX_NORM
    )
    same = agree(model)
    shares = gathered([line["share"] for line in log])
    if dist.get_rank() == 0:
        norms = [line["norm"] for line in log if "norm" in line]
        Console(highlight=False, soft_wrap=True).print(
            f"{len(data)} digits, {BATCH} of them expected in a batch\n"
            f"digits in a batch, on each rank: {', '.join(f'{sum(own) / len(own):.0f}' for own in shares)}\n"
            f"unseen digits recognised: {log[-1]['accuracy']:.1%}, without privacy {plain[-1]['accuracy']:.1%}\n"
            f"epsilon spent: {private.epsilon():.3f} at delta {DELTA:g}, of neighbours that differ by one digit\n"
            f"noise: {private.noise_multiplier:.2f} times the bound of {MAX_NORM:g}, in each of {private.steps} steps\n"
            f"median norm of a gradient on rank 0 (to look at, not to publish): {sum(norms) / len(norms):.2f}\n"
            f"all ranks have the same model: {'[green]yes[/]' if same else '[red]no[/]'}\n"
            f"Picture: [bold]{options.picture}[/], log: [bold]{options.log}[/]"
        )
        draw(options.picture, log, plain, shares)
        lines = [{"run": "private", **line, "share": own} for line, *own in zip(log, *shares, strict=True)]
        lines += [{"run": "plain", **line} for line in plain]
        options.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0 if same and private.epsilon() <= options.epsilon else 1


def train(
    data: TensorDataset, unseen: tuple[Tensor, Tensor], options: argparse.Namespace, lr: float, **how: Any
) -> tuple[Log, privacy.Private, nn.Module]:
    """As on one process, but for the line that spreads the parameters."""
    torch.manual_seed(1)  # the same weights at first, on all ranks
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    if options.shard:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = privacy.poisson_loader(data, expected_batch_size=BATCH, epochs=options.epochs)
    private = privacy.make_private(model, optimizer, loader, delta=DELTA, **how)
    log: Log = []
    for batch in private.loader:  # this rank's share
        norms = []
        # All ranks get as many parts, the last ones empty on some: they meet at each backward pass.
        for x, y in private.parts(batch, PART):
            norms.append(private.backward(F.cross_entropy(model(x), y, reduction="none")).norms)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            accuracy = float((model(unseen[0]).argmax(1) == unseen[1]).float().mean())
        log.append({"step": private.steps, "share": len(batch[1]), "accuracy": accuracy})
        if log[-1]["share"]:
            log[-1]["norm"] = float(torch.cat(norms).median())
    return log, private, model


def agree(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters, bit by bit."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    own = torch.cat([parameter.detach().flatten() for parameter in whole])
    return all(bool(torch.equal(other, own)) for other in gathered(own))


def gathered(own: Any) -> list[Any]:
    """What each rank has, on all ranks."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def draw(path: Path, log: Log, plain: Log, shares: list[list[int]]) -> None:
    """Accuracy over the steps, and each rank's share of the batches."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot([line["accuracy"] for line in plain], color="gray", label="not private")
    left.plot([line["accuracy"] for line in log], color="steelblue", label="private")
    left.set(xlabel="step", ylabel="unseen digits recognised", ylim=(0, 1))
    names = [f"rank {rank}" for rank in range(len(shares))]
    right.stackplot(range(len(log)), shares, labels=names, alpha=0.8)
    right.axhline(BATCH, color="firebrick", label="expected, in all")
    right.set(xlabel="step", ylabel="digits drawn")
    for axis in (left, right):
        axis.legend(frameon=False, loc="lower right")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
