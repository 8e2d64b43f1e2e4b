"""Gaussian noise for sums of clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.privacy.randomness import system_generator, system_normal

# How the secure mode draws: a sum of so many normal numbers, divided by two, in pieces that the cache holds, and
# rounded to multiples of a power of two that is at most std times this.
_SUMMANDS = 4
_PIECE = 1 << 17
_GRID = 2.0**-20


class GaussianNoise:
    r"""Draws Gaussian noise, from a generator or from the operating system.

    **Secure mode.** Differential privacy of the Gaussian mechanism is proven for real numbers. Floating-point noise
    takes only some values, and sums round: from the low bits of what is published, Mironov (2012) could tell data sets
    apart that should look alike. Besides, a generator of torch can be run again by whoever learns or guesses its state
    (on a CPU, 32 bits of a seed). ``secure=True`` hardens against both:

    - every bit comes from the operating system's CSPRNG, and no state is kept;
    - each number is the sum of four normal numbers over two, so that a value can come about in very many ways and leads
      back to none of them (Holohan and Braghin, 2021);
    - :meth:`add_to` adds in float64 and rounds the noised sum to multiples of a power of two, at most
      :math:`2^{-20}` of the standard deviation and far coarser than float64 there, which drops the low bits.

    What it does not give: a proof. The probabilities of the multiples are those of a Gaussian up to rounding of float64
    and not exactly, numbers beyond 16 standard deviations are never drawn, and the time that the draw takes is not
    constant. Mechanisms with a proof draw integers (the discrete Gaussian), and are not implemented. It also takes
    longer, about 0.2 s for a million numbers on one core.

    Without the secure mode, noise is drawn in float32 (float64 for float64) and nothing of the above holds, as in most
    published experiments.

    Args:
        generator: where the numbers come from; drawn on its device and moved. ``None``: a generator for each device,
            seeded by the operating system, so that no two runs agree.
        secure: draw from the operating system, hardened as above.

    Raises:
        UsageError: both a generator and ``secure``.

    Example:
        >>> import torch
        >>> from gradbatch import privacy
        >>> noise = privacy.GaussianNoise(torch.Generator().manual_seed(0))
        >>> gradient = torch.zeros(100_000)
        >>> noise.add_to([gradient], std=2.0)
        >>> f"{gradient.std():.1f}"
        '2.0'

    References:
        On Significance of the Least Significant Bits for Differential Privacy (Mironov, 2012),
        https://doi.org/10.1145/2382196.2382264. Secure Random Sampling in Differential Privacy (Holohan, Braghin,
        2021), https://arxiv.org/abs/2107.10138. The Discrete Gaussian for Differential Privacy (Canonne, Kamath,
        Steinke, 2020), https://arxiv.org/abs/2004.00010.
    """

    def __init__(self, generator: torch.Generator | None = None, secure: bool = False) -> None:
        if generator is not None and secure:
            raise UsageError(
                "secure noise comes from the operating system and cannot be repeated; give either a generator or "
                "secure=True"
            )
        self.generator, self.secure = generator, secure
        self._of_device: dict[torch.device, torch.Generator] = {}

    def draw(
        self,
        shape: Sequence[int],
        std: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Independent Gaussian numbers of mean 0.

        Args:
            shape: of the result.
            std: standard deviation, 0 or more.
            dtype: a real floating-point type. Numbers are drawn in float32 at least, and rounded to it.
            device: of the result.

        Returns:
            A tensor of that shape. In secure mode its elements are multiples of the grid of :meth:`add_to`; added to a
            sum in floating point they are not hardened, so use that.

        Raises:
            UsageError: a negative or infinite standard deviation, or a dtype that is not real floating point.
        """
        _check_std(std)
        if not dtype.is_floating_point:
            raise UsageError(f"noise of dtype {dtype}: Gaussian noise is real and floating point")
        device = torch.empty(0, device=device).device  # "cuda" is "cuda:0", or whichever is current
        numbers = self._normal(shape, dtype, device) * std
        return (_rounded(numbers, std) if self.secure else numbers).to(dtype)

    @torch.no_grad()
    def add_to(self, tensors: Iterable[Tensor], std: float | Sequence[float]) -> None:
        """Add independent noise to each element of some tensors, in place.

        Args:
            tensors: real or complex floating-point tensors, dense; drawn for in this order. The real and the imaginary
                part of a complex number are two elements.
            std: standard deviation, or one for each tensor. Where it is 0 nothing is drawn, and nothing rounded.

        Raises:
            UsageError: a standard deviation that is negative, infinite or missing, or a tensor that takes no noise
                (integers, sparse). Nothing is changed.
        """
        tensors = list(tensors)
        stds = [std] * len(tensors) if isinstance(std, float | int) else list(std)
        if len(stds) != len(tensors):
            raise UsageError(f"{len(stds)} standard deviations for {len(tensors)} tensors")
        for tensor, each in zip(tensors, stds, strict=True):
            _check_std(each)
            _check_takes_noise(tensor)
        for tensor, each in zip(tensors, stds, strict=True):
            if each > 0:
                self._add(torch.view_as_real(tensor) if tensor.is_complex() else tensor, each)

    def state_dict(self) -> dict[str, Any]:
        """State of the generators, by device; none in secure mode, whose numbers nothing can repeat."""
        generators = dict(self._of_device)
        if self.generator is not None:
            generators[self.generator.device] = self.generator
        return {
            "secure": self.secure,
            "generators": {str(device): generator.get_state() for device, generator in generators.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the noise where another run left off.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            UsageError: a state of the other mode, or of generators on another device than the one given.
        """
        if state["secure"] != self.secure:
            raise UsageError(
                f"this state is of noise with secure={state['secure']}, this noise has {self.secure}"
            )
        generators = {torch.device(device): saved for device, saved in state["generators"].items()}
        if self.generator is not None and set(generators) != {self.generator.device}:
            raise UsageError(
                f"this state is of generators on {sorted(map(str, generators))}, this noise has one on "
                f"{self.generator.device}"
            )
        for device, saved in generators.items():
            self._generator_for(device).set_state(saved)

    def _add(self, tensor: Tensor, std: float) -> None:
        normal = self._normal(tensor.shape, tensor.dtype, tensor.device)
        if self.secure:
            tensor.copy_(_rounded(tensor.to(normal.dtype) + normal * std, std))
        elif normal.dtype == tensor.dtype:
            tensor.add_(normal, alpha=std)
        else:
            tensor.copy_(tensor.to(normal.dtype) + normal * std)

    def _normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers, in float64 in secure mode and in at least float32 otherwise."""
        if self.secure:
            numbers = torch.empty(math.prod(shape), dtype=torch.float64)
            for piece in numbers.split(_PIECE):
                piece.copy_(system_normal(_SUMMANDS * len(piece)).view(_SUMMANDS, -1).sum(0))
            return numbers.div_(math.sqrt(_SUMMANDS)).view(tuple(shape)).to(device)
        generator = self._generator_for(device)
        drawn = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        return torch.randn(tuple(shape), generator=generator, dtype=drawn, device=generator.device).to(device)

    def _generator_for(self, device: torch.device) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        if device not in self._of_device:
            self._of_device[device] = system_generator(device)
        return self._of_device[device]


def _rounded(numbers: Tensor, std: float) -> Tensor:
    """To multiples of the largest power of two that is at most ``2⁻²⁰ std``: exact operations but for the rounding."""
    if std == 0:
        return numbers
    grid = 2.0 ** (math.frexp(std)[1] - 1) * _GRID
    return torch.round(numbers / grid) * grid


def _check_std(std: float) -> None:
    if not (isinstance(std, float | int) and 0 <= std < math.inf):
        raise UsageError(
            f"the standard deviation of the noise is {std!r}; it is a finite number of 0 or more"
        )


def _check_takes_noise(tensor: Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(
            f"a tensor of dtype {tensor.dtype} and shape {list(tensor.shape)} takes no Gaussian noise; make it "
            "floating point"
        )
    if tensor.layout != torch.strided:
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} with layout {tensor.layout}: noise falls on its zeros too; make "
            "it dense (for an embedding, sparse=False)"
        )
