"""Clipping bounds that follow a quantile of the norms, at the price of a little noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradbatch.errors import UsageError
from gradbatch.privacy.clipping import Clipped
from gradbatch.quantities import ClippedSum


@dataclass(frozen=True)
class AdaptiveClipping:
    r"""Move the bound towards a quantile of the samples' gradient norms after each step.

    .. math:: C \leftarrow C \exp\left(-\eta\,(\tilde b - \gamma)\right), \qquad
        \tilde b = \tfrac12 + \tfrac1B \Bigl(\sum_n \bigl(\mathbb 1[\lVert g_n \rVert \le C] - \tfrac12\bigr)
        + \mathcal N(0, \sigma_b^2)\Bigr)

    ``B`` is the expected batch size: the size of a batch is private too. The share :math:`\tilde b` is cut to what a
    share can be, 0 to 1. One record moves the sum of the ``K`` groups' bits by ``sqrt(K) / 2``. So that a step as a
    whole has the noise multiplier ``z`` that is accounted for, its gradients get the larger one
    :math:`(z^{-2} - K (2 \sigma_b)^{-2})^{-1/2}`.

    Args:
        quantile: ``γ``: the share of samples whose gradients shall not be cut, between 0 and 1, both excluded.
        learning_rate: ``η``, positive.
        count_noise: ``σ_b``, standard deviation of the noise on the count; ``None``: a twentieth of the expected batch
            size. More than half the noise multiplier, times ``sqrt(K)``.

    Raises:
        UsageError: a value outside of its range.

    References:
        Differentially Private Learning with Adaptive Clipping (Andrew, Thakkar, McMahan, Ramaswamy, 2021),
        https://arxiv.org/abs/1905.03871
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise UsageError(f"quantile is {self.quantile}; it is between 0 and 1, both excluded")
        for name, value in (("learning_rate", self.learning_rate), ("count_noise", self.count_noise)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is {value}; it is a positive number")


class ClippingBounds:
    """The clipping bounds of a run, fixed or adaptive, and what they cost.

    Args:
        quantity: how gradients are clipped at first.
        names: of the parameters that are clipped.
        settings: of adaptive clipping; ``None``: the bounds stay.
        expected_batch_size: ``B``.
        noise_multiplier: ``z``, of a step as a whole.

    Raises:
        UsageError: the noise on the count is too small for ``z``, or adaptive clipping of normalised gradients.
    """

    def __init__(
        self,
        quantity: ClippedSum,
        names: Sequence[str],
        settings: AdaptiveClipping | None,
        expected_batch_size: float,
        noise_multiplier: float,
    ) -> None:
        self.quantity, self._settings, self._batch_size = quantity, settings, expected_batch_size
        self._bits: Tensor | None = None
        self.noise_multiplier = noise_multiplier
        if settings is None:
            return
        if quantity.style != "hard":
            raise UsageError(
                'adaptive clipping goes with style="hard": normalised gradients are all cut alike'
            )
        grouped = quantity.grouped(names)
        self._set(dict(zip(grouped.groups, grouped.bounds, strict=True)))
        self._count_noise = settings.count_noise or expected_batch_size / 20
        if noise_multiplier > 0:
            left = noise_multiplier**-2 - len(grouped.groups) / (2 * self._count_noise) ** 2
            if left <= 0:
                least = noise_multiplier * math.sqrt(len(grouped.groups)) / 2
                raise UsageError(
                    f"count_noise is {self._count_noise:.4g}; it has to be well above {least:.4g}, or the noise on the "
                    "count alone costs more than the whole step may"
                )
            self.noise_multiplier = left**-0.5

    def observe(self, clipped: Clipped) -> None:
        """Count whose norms are within the bounds, for the next :meth:`update`."""
        if self._settings is not None:
            norms = clipped.norms.reshape(len(clipped.norms), len(clipped.bounds)).double()
            bits = (norms <= norms.new_tensor(clipped.bounds)).double().sub_(0.5).sum(0)
            self._bits = bits if self._bits is None else self._bits + bits

    def discard(self) -> None:
        """Forget what was observed since the last update."""
        self._bits = None

    def counts(self) -> list[tuple[Tensor, float]]:
        """What was observed, and the standard deviation of the noise that it needs; empty if the bounds are fixed."""
        return [] if self._bits is None else [(self._bits, self._count_noise)]

    def update(self, noised: Tensor) -> None:
        """Move the bounds, once a logical batch, by its noised counts."""
        assert self._settings is not None
        shares = (0.5 + noised / self._batch_size).clamp(0, 1)
        steps = (shares - self._settings.quantile).tolist()
        rate = self._settings.learning_rate
        moved = zip(self.state_dict().items(), steps, strict=True)
        self._set({group: bound * math.exp(-rate * step) for (group, bound), step in moved})
        self.discard()

    def state_dict(self) -> dict[str, float]:
        """The bounds by group; empty if they are fixed."""
        if self._settings is None:
            return {}
        bound = self.quantity.max_norm
        return dict(bound) if isinstance(bound, Mapping) else {"": bound}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with bounds that :meth:`state_dict` returned."""
        if state.keys() != self.state_dict().keys():
            raise UsageError(
                f"the saved clipping bounds are of {list(state)}, those of this run of {list(self.state_dict())}: "
                "make_private got other arguments"
            )
        if state:
            self._set(state)

    def _set(self, bounds: Mapping[str, float]) -> None:
        flat = list(bounds) == [""]
        self.quantity = replace(self.quantity, max_norm=bounds[""] if flat else dict(bounds))
