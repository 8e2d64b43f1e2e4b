"""Times of a plain forward and backward pass: per-sample gradients, norms and a weighted sum of one grouped network.

Runs the contestants in a new order each round and takes the median of each, so that a busy moment hits all of them.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch


def network(groups: int) -> nn.Sequential:
    """A small image classifier whose inner convolutions have ``groups`` groups."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for stride in (1, 2, 1, 2):
        layers += [nn.Conv2d(64, 64, 3, stride, 1, groups=groups), nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def median_times(
    contestants: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each contestant, after one unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, run in random.sample(list(contestants.items()), len(contestants)):
            synchronise(device)
            start = time.perf_counter()
            run()
            synchronise(device)
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(groups: int, x: Tensor, y: Tensor, repeats: int) -> dict[str, float]:
    """Median seconds of a plain step and of each quantity on one network."""
    plain = network(groups).to(x.device)
    extended = gradbatch.extend(network(groups).to(x.device))
    quantities = {
        "BatchGrad": gradbatch.BatchGrad(),
        "BatchL2Grad": gradbatch.BatchL2Grad(),
        "WeightedSum": gradbatch.WeightedSum(torch.rand(len(x), device=x.device)),
    }

    def losses(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    def step(quantity: gradbatch.Quantity) -> None:
        gradbatch.backward(extended, losses(extended), quantity)

    contestants = {name: partial(step, quantity) for name, quantity in quantities.items()}
    contestants["plain"] = lambda: losses(plain).mean().backward()
    return median_times(contestants, repeats, x.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--batch", default=32, type=int)
    parser.add_argument("--repeats", default=10, type=int)
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(options.batch, 3, 32, 32, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    print(
        f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, batch {options.batch}"
    )
    for groups in (1, 8, 64):
        times = compare(groups, x, y, options.repeats)
        plain = times.pop("plain")
        ratios = "  ".join(f"{name} {seconds / plain:.2f}" for name, seconds in times.items())
        print(f"groups {groups:2d}: plain {1e3 * plain:.1f} ms; times of it: {ratios}")


if __name__ == "__main__":
    main()
