"""Whether ``torch.compile`` makes the kernels of per-sample gradients faster: ``python -m benchmarks.compiled``.

Each is timed as it is and compiled, in turn, in shapes of the benchmark's models; medians of ratios. Compiling itself
is not counted.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import describe, time_steps
from gradbatch.plans.kernels import add_squares, squared_norm_ghost, squared_norms
from gradbatch.plans.slabs import Tile

Kernel = Callable[..., Tensor]


def ghost_norms(left: Tensor, right: Tensor) -> Tensor:
    """Positions against positions, without cancellation's estimate."""
    return squared_norm_ghost(left, right, Tile(len(left), left.shape[2], left.shape[3], len(left)))[0]


def dense_norms(left: Tensor, right: Tensor) -> Tensor:
    """Norms of materialised gradients."""
    return squared_norms(torch.matmul(left, right.mT))


def second_moments(left: Tensor, right: Tensor) -> Tensor:
    """Sums of squares of materialised gradients."""
    block = torch.matmul(left, right.mT)
    out = torch.zeros_like(block[0])
    add_squares(out, block)
    return out


def norm_layer(gradient: Tensor, normalised: Tensor) -> Tensor:
    """Gradients of the weight of a LayerNorm, and their norms."""
    return (gradient * normalised).sum(1).square().sum(1)


def cases() -> dict[str, tuple[Kernel, tuple[Tensor, ...]]]:
    """Kernels with operands."""

    def pair(samples: int, outputs: int, inputs: int, positions: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 1, outputs, positions), torch.randn(samples, 1, inputs, positions)

    return {
        "ghost norms, GPT 256 to 1024, T=128, N=8": (ghost_norms, pair(8, 1024, 256, 128)),
        "ghost norms, ViT 192 to 192, T=65, N=32": (ghost_norms, pair(32, 192, 192, 65)),
        "dense norms, convolution 64 to 64, 3x3, 256 positions, N=16": (
            dense_norms,
            pair(16, 64, 576, 256),
        ),
        "dense norms, convolution 16 to 32, 4x4, 25 positions, N=256": (
            dense_norms,
            pair(256, 32, 256, 25),
        ),
        "second moments, GPT 256 to 256, T=128, N=8": (second_moments, pair(8, 256, 256, 128)),
        "LayerNorm 192, T=65, N=32": (norm_layer, (torch.randn(32, 65, 192), torch.randn(32, 65, 192))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", default=51, type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads, {options.repeats} rounds")
    for name, (kernel, operands) in cases().items():
        compiled = torch.compile(kernel)
        torch.testing.assert_close(compiled(*operands), kernel(*operands), rtol=1e-3, atol=1e-3)
        steps = {
            "plain": lambda kernel=kernel, operands=operands: kernel(*operands),
            "compiled": lambda compiled=compiled, operands=operands: compiled(*operands),
        }
        times = time_steps(steps, torch.device("cpu"), options.repeats, budget=math.inf)
        ratio, low, high = describe(times["compiled"].ratios)
        milliseconds = 1e3 * describe(times["plain"].seconds)[0]
        print(
            f"{name}: {milliseconds:.2f} ms; compiled, in times of that, {ratio:.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
