"""What a cross-check found: a row a layer, what was refused, and where gradients differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradbatch.errors import VerificationError
from gradbatch.plans.contractions import Plan

COLUMNS = ("layer", "type", "rule", "norms", "gradients", "FLOP", "memory", "error")
_NOTHING = "–"


@dataclass(frozen=True)
class LayerReport:
    """One layer with trainable parameters.

    Args:
        name: its path in the model.
        type: its class.
        rule: the layer rule that explains it; empty where it has none.
        refusal: why it has no per-sample gradients; ``None`` if it has.
        structure: kind of :class:`~gradbatch.PerSampleGrad` of its costliest parameter.
        norms: how the squared norms of that parameter are evaluated; ``None`` where there is nothing to decide.
        gradients: how its per-sample gradients are materialised, likewise.
        error: largest error of any of its parameters, see :func:`~gradbatch.verify.verify`; ``None`` if refused.
        maps: block maps of the parameters that differ from the reference, by name.
    """

    name: str
    type: str
    rule: str
    refusal: str | None = None
    structure: str = ""
    norms: Plan | None = None
    gradients: Plan | None = None
    error: float | None = None
    maps: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A cross-check of a model; printing it shows everything.

    Args:
        model: class of the model.
        layers: a row for each layer with trainable parameters.
        samples: ``N``.
        dtype: in which it was computed.
        device: where.
        reference: what the gradients were compared with; empty if all was refused.
        tolerance: largest error that still agrees.
        fallback: why it was not ``torch.func.vmap``; empty if it was.
    """

    model: str
    layers: Sequence[LayerReport]
    samples: int
    dtype: torch.dtype
    device: torch.device
    reference: str
    tolerance: float
    fallback: str = ""

    @property
    def ok(self) -> bool:
        """Whether every layer has per-sample gradients, and all agree with the reference."""
        return not self.refusals and not self.mismatches

    @property
    def refusals(self) -> dict[str, list[str]]:
        """What gradbatch refuses, by the reason: the layers concerned."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.refusal is not None:
                found.setdefault(layer.refusal, []).append(layer.name)
        return found

    @property
    def mismatches(self) -> dict[str, str]:
        """Block maps of the parameters that differ from the reference, by name."""
        return {name: drawn for layer in self.layers for name, drawn in layer.maps.items()}

    def raise_for_mismatch(self) -> None:
        """Do nothing if all that was compared agrees; a refusal is no mismatch.

        Raises:
            VerificationError: with the block map of every parameter that differs.
        """
        if self.mismatches:
            raise VerificationError(f"{self.headline()}\n\n{self.drawn_mismatches()}")

    def headline(self) -> str:
        """One sentence: what was compared with what, and how it ended."""
        errors = [layer.error for layer in self.layers if layer.error is not None]
        refused = len(self.layers) - len(errors)
        wrong = sum(bool(layer.maps) for layer in self.layers)
        layers = f"{len(errors)} layer{'s' if len(errors) != 1 else ''}"
        if wrong:
            verb = "differs" if wrong == 1 else "differ"
            ending = f"{wrong} of {layers} {verb} from {self.reference} by more than {self.tolerance:.0e}"
        elif errors:
            verb = "agrees" if len(errors) == 1 else "agree"
            ending = (
                f"{layers} {verb} with {self.reference} within {self.tolerance:.0e}, "
                f"largest error {_error(max(errors))}"
            )
        else:
            ending = "nothing could be compared"
        return (
            f"{self.model}, {self.samples} samples, {str(self.dtype).removeprefix('torch.')} on {self.device}: "
            f"{ending}{f'; {refused} refused' if refused else ''}."
        )

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table, row by row, under :data:`COLUMNS`; a refusal is numbered as in :meth:`notes`."""
        numbers = {reason: number for number, reason in enumerate(self.refusals, 1)}
        rows = []
        for layer in self.layers:
            rule = layer.rule if layer.refusal is None else f"refused ({numbers[layer.refusal]})"
            error = _NOTHING if layer.error is None else _error(layer.error)
            cost = (_count(layer.norms.flops), _size(layer.norms.bytes)) if layer.norms else (_NOTHING,) * 2
            # Without a plan there is nothing to decide: the structure says how the gradients are held.
            plans = (plan.name if plan else layer.structure for plan in (layer.norms, layer.gradients))
            cells = (rule, *plans, *cost, error)
            rows.append((layer.name, layer.type, *(cell or _NOTHING for cell in cells)))
        return rows

    def notes(self) -> list[str]:
        """What the table leaves open: the reasons of refusals, numbered, and of another reference than vmap."""
        reasons = [f"({number}) {reason}" for number, reason in enumerate(self.refusals, 1)]
        return reasons + [f"No torch.func.vmap: {self.fallback}."] * bool(self.fallback)

    def drawn_mismatches(self) -> str:
        """The block maps, each under the name of its parameter."""
        return "\n\n".join(f"{name}\n{drawn}" for name, drawn in self.mismatches.items())

    def __str__(self) -> str:
        table = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        parts = [self.headline(), "\n".join(lines), "\n".join(self.notes()), self.drawn_mismatches()]
        return "\n\n".join(part for part in parts if part)


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"


def _count(number: int) -> str:
    return _scaled(number, 1000, ("", "k", "M", "G", "T"))


def _size(number: int) -> str:
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        # 999.5 would be rounded up to a number of four digits.
        if number < step - 0.5:
            return f"{number:.3g} {unit}".rstrip()
        number /= step
    return f"{number:.3g} {units[-1]}"
