"""Random numbers that nobody can foresee: from the operating system, directly or as a seed.

A generator that a script has seeded by hand makes a run repeatable, and its noise known to whoever knows the seed.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor


def system_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of torch with a seed from the operating system.

    On a CPU torch uses 32 bits of the seed: enough to make runs differ, too few against somebody who tries all seeds.
    """
    return torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))


def system_integers(count: int) -> Tensor:
    """``[count]`` independent int64 with 64 random bits each, from the operating system's CSPRNG."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)


def system_uniform(count: int) -> Tensor:
    """``[count]`` float64, uniform on the multiples of 2⁻⁵³ from 0 to 1, 1 excluded."""
    return (system_integers(count) & (2**53 - 1)).double() * 2.0**-53


def system_normal(count: int) -> Tensor:
    """``[count]`` independent standard normal float64: the inverse distribution function of 53 random bits.

    Probabilities are the odd multiples of 2⁻⁵⁴ below one half, all of them exact in float64, and a sign. So the
    largest number is 8.3.
    """
    bits = system_integers(count)
    probability = ((bits & (2**52 - 1)).double() * 2 + 1) * 2.0**-54
    magnitude: Tensor = torch.special.ndtri(probability)
    return torch.where(bits < 0, magnitude, -magnitude)
