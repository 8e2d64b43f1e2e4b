"""What a whole private step costs, from drawing its Poisson batch to the optimizer.

``python -m benchmarks.private_step --models resnet gpt``. Times of an ordinary step on the same batch, with
``privacy.make_private``, and with each peer that computes clipped sums: these get their noise, division and step by a
few lines here. All draw the same batches; ``--fixed`` gives all of them one size. Contestants run in a new order each
round; medians.
"""

import argparse
import copy
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cases import CASES, Batch
from benchmarks.contestants import PEERS
from benchmarks.contestants.base import Contestant
from benchmarks.measure import describe, first_line, time_steps
from benchmarks.quantities import CLIP
from gradbatch import privacy

NOISE = 1.0
WARM_UP = 4  # the first steps of gradbatch measure where samples lie, and optimizers make their state


class Drawn:
    """Stands for the batch that was drawn last."""

    def __init__(self, loader: Iterable[list[Tensor]]) -> None:
        self._batches = iter(loader)
        self.current: Batch | None = None

    def next(self) -> Batch:
        """Draw another one."""
        self.current = Batch(*next(self._batches))
        return self.current

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)

    def __len__(self) -> int:
        assert self.current is not None
        return len(self.current)


def loader_of(data: Batch, samples: int, steps: int, fixed: bool) -> DataLoader[list[Tensor]]:
    """A loader that gives everybody the same batches."""
    dataset = TensorDataset(data.inputs, data.labels)
    generator = torch.Generator().manual_seed(0)
    if fixed:
        sampler = torch.utils.data.RandomSampler(dataset, num_samples=samples * steps, generator=generator)
        return DataLoader(dataset, batch_size=samples, sampler=sampler)
    return privacy.poisson_loader(dataset, expected_batch_size=samples, steps=steps, generator=generator)


def plain(model: nn.Module, loader: DataLoader[list[Tensor]]) -> Callable[[], object]:
    """An ordinary step."""
    optimizer, drawn = torch.optim.SGD(model.parameters(), lr=1e-3), Drawn(loader)

    def step() -> None:
        drawn.next().losses(model).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(model: nn.Module, loader: DataLoader[list[Tensor]]) -> Callable[[], object]:
    """The same, made private."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    private = privacy.make_private(
        model,
        optimizer,
        loader,
        noise_multiplier=NOISE,
        max_norm=CLIP,
        sampling="poisson" if isinstance(loader, privacy.PoissonLoader) else "shuffle-unaccounted",
    )
    drawn = iter(private.loader)

    def step() -> None:
        private.backward(Batch(*next(drawn)).losses(model))
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer(
    model: nn.Module, loader: DataLoader[list[Tensor]], contestant: Contestant, samples: int
) -> Callable[[], object]:
    """The same around a peer's clipped sum."""
    parameters = dict(model.named_parameters())
    optimizer, drawn = torch.optim.SGD(parameters.values(), lr=1e-3), Drawn(loader)
    clipped = contestant.prepare(model, drawn, "clipped sum")

    def step() -> None:
        drawn.next()
        for name, total in clipped().items():
            noise = torch.normal(0.0, NOISE * CLIP, total.shape, device=total.device)
            parameters[name].grad = (total.detach() + noise) / samples
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, fixed: bool, repeats: int, peers: list[str]) -> str:
    """The line of one model."""
    case, steps = CASES[name], repeats + WARM_UP
    model, data = case.build(torch.device("cpu"), samples=40 * case.samples)

    def prepared(make: Callable[..., Callable[[], object]], *more: object) -> Callable[[], object]:
        step = make(copy.deepcopy(model), loader_of(data, case.samples, steps, fixed), *more)
        for _ in range(WARM_UP):
            step()
        return step

    contestants = {"plain": prepared(plain), "gradbatch": prepared(ours)}
    refused = []

    def enter(other: str) -> None:
        try:
            contestants[other] = prepared(peer, PEERS[other], case.samples)
        except Exception as error:  # whatever a package raises on a model that it does not take
            refused.append(f"{other}: {first_line(error)}")

    for other in peers:
        enter(other)
    times = time_steps(contestants, torch.device("cpu"), repeats, budget=math.inf)
    seconds = describe(times.pop("plain").seconds)[0]
    told = "  ".join(f"{what} {describe(timing.ratios)[0]:.2f}" for what, timing in times.items())
    sizes = f"N={case.samples}" if fixed else f"Poisson batches of {case.samples}"
    return "; ".join([f"{name}, {sizes}: plain {1e3 * seconds:.0f} ms, in its times {told}", *refused])


def main() -> None:
    able = [name for name, contestant in PEERS.items() if "clipped sum" in contestant.offers]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet", "gpt"], choices=list(CASES))
    parser.add_argument("--peers", nargs="*", default=able, choices=able)
    parser.add_argument("--repeats", default=15, type=int)
    parser.add_argument("--fixed", action="store_true", help="batches of one size")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads, {options.repeats} rounds")
    # Peers warn of versions of torch and of hooks on every call.
    warnings.simplefilter("ignore")
    for name in options.models:
        print(measure(name, options.fixed, options.repeats, options.peers), flush=True)


if __name__ == "__main__":
    main()
