"""What a cross-check found: a row a parameter, what was refused, and where gradients differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradbatch.errors import VerificationError
from gradbatch.plans.contractions import Plan

COLUMNS = (
    "parameter",
    "shape",
    "reader",
    "rule",
    "samples",
    "gradient",
    "norms",
    "FLOP",
    "memory",
    "error",
)
_NOTHING = "–"


@dataclass(frozen=True)
class Explained:
    """How one use of a parameter was explained and evaluated.

    Args:
        layer: the layer that the use lies in.
        operation: class of the layer, or type of the node of the autograd graph.
        reader: ``"module"`` for a layer's record, ``"node"`` for a node of the graph that a rule describes,
            ``"node call"`` where the node itself was called for several samples in turn.
        rule: name of the rule; empty for a node call.
        layout: where the samples lay in the output, in words.
    """

    layer: str
    operation: str
    reader: str
    rule: str
    layout: str

    @property
    def label(self) -> str:
        """The rule, behind the type of the node if it is one; a node that was called has only its type."""
        if self.reader == "module":
            return self.rule
        kind = self.operation.removesuffix("Backward")
        return f"{kind}: {self.rule}" if self.rule else kind


@dataclass(frozen=True)
class ParameterReport:
    """One trainable parameter.

    Args:
        name: its path in the model.
        shape: its shape.
        uses: how each of its uses was explained; none if no loss depends on it.
        refusal: why it has no per-sample gradients; ``None`` if it has.
        structure: kind of :class:`~gradbatch.PerSampleGrad`; empty if it was refused, or has no use.
        norms: how its squared norms are evaluated; ``None`` where the structure leaves nothing to decide.
        gradients: how its per-sample gradients are materialised, likewise.
        flops: operations that its squared norms cost; ``None`` if that is not known.
        bytes: temporary memory that they need, likewise.
        error: largest error of its gradients, see :func:`~gradbatch.verify.verify`; ``None`` if it was refused.
        map: block map of where its gradients differ from the reference; empty if they agree.
    """

    name: str
    shape: torch.Size
    uses: Sequence[Explained] = ()
    refusal: str | None = None
    structure: str = ""
    norms: Plan | None = None
    gradients: Plan | None = None
    flops: int | None = None
    bytes: int | None = None
    error: float | None = None
    map: str = ""

    @property
    def reader(self) -> str:
        """How the graph was read: every reader that explains one of the uses."""
        return ", ".join(dict.fromkeys(use.reader for use in self.uses))

    @property
    def rule(self) -> str:
        """Rules and node types of all uses, counted: ``linear x2, embedding``."""
        return _counted(use.label for use in self.uses)

    @property
    def layout(self) -> str:
        """Where the samples lay, in all uses."""
        return ", ".join(dict.fromkeys(use.layout for use in self.uses))


@dataclass(frozen=True)
class Report:
    """A cross-check of a model; printing it shows everything.

    Args:
        model: class of the model.
        parameters: a row for each trainable parameter.
        samples: ``N``.
        dtype: of the parameters.
        device: where it was computed.
        reference: what the gradients were compared with; empty if all was refused.
        tolerance: largest error that still agrees.
        fallback: why it was not ``torch.func.vmap``; empty if it was.
        node_calls: layers in which a node was called once for each sample, by its type; one entry a use.
        coarsest: dtype of the coarsest floating point numbers between parameters and losses.
    """

    model: str
    parameters: Sequence[ParameterReport]
    samples: int
    dtype: torch.dtype
    device: torch.device
    reference: str
    tolerance: float
    fallback: str = ""
    node_calls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    coarsest: torch.dtype | None = None

    @property
    def ok(self) -> bool:
        """Whether every parameter has per-sample gradients, and all agree with the reference."""
        return not self.refusals and not self.mismatches

    @property
    def refusals(self) -> dict[str, list[str]]:
        """What gradbatch refuses, by the reason: the parameters concerned."""
        found: dict[str, list[str]] = {}
        for parameter in self.parameters:
            if parameter.refusal is not None:
                found.setdefault(parameter.refusal, []).append(parameter.name)
        return found

    @property
    def mismatches(self) -> dict[str, str]:
        """Block maps of the parameters that differ from the reference, by name."""
        return {parameter.name: parameter.map for parameter in self.parameters if parameter.map}

    def raise_for_mismatch(self) -> None:
        """Do nothing if all that was compared agrees; a refusal is no mismatch.

        Raises:
            VerificationError: with the block map of every parameter that differs.
        """
        if self.mismatches:
            raise VerificationError(f"{self.headline()}\n\n{self.drawn_mismatches()}")

    def headline(self) -> str:
        """One sentence: what was compared with what, and how it ended."""
        errors = [parameter.error for parameter in self.parameters if parameter.error is not None]
        refused = len(self.parameters) - len(errors)
        wrong = len(self.mismatches)
        compared = f"{len(errors)} parameter{'s' if len(errors) != 1 else ''}"
        if wrong:
            verb = "differs" if wrong == 1 else "differ"
            ending = f"{wrong} of {compared} {verb} from {self.reference} by more than {self.tolerance:.0e}"
        elif errors:
            verb = "agrees" if len(errors) == 1 else "agree"
            within = f"within {self.tolerance:.0e}, largest error {_error(max(errors))}"
            ending = f"{compared} {verb} with {self.reference} {within if any(errors) else 'exactly'}"
        else:
            ending = "nothing could be compared"
        return (
            f"{self.model}, {self.samples} samples, {_name(self.dtype)} on {self.device}: "
            f"{ending}{f'; {refused} refused' if refused else ''}."
        )

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table, row by row, under :data:`COLUMNS`; a refusal is numbered as in :meth:`notes`."""
        numbers = {reason: number for number, reason in enumerate(self.refusals, 1)}
        rows = []
        for parameter in self.parameters:
            unused = self.samples and parameter.refusal is None and not parameter.uses
            cells = (
                "x".join(map(str, parameter.shape)),
                parameter.reader,
                f"refused ({numbers[parameter.refusal]})"
                if parameter.refusal is not None
                else parameter.rule,
                parameter.layout,
                "unused" if unused else parameter.structure,
                parameter.norms.name if parameter.norms is not None else "",
                "" if parameter.flops is None else _count(parameter.flops),
                "" if parameter.bytes is None else _size(parameter.bytes),
                "" if parameter.error is None else _error(parameter.error),
            )
            rows.append((parameter.name, *(cell or _NOTHING for cell in cells)))
        return rows

    def notes(self) -> list[str]:
        """What the table leaves open: numbered refusals, node calls, another reference than vmap, coarse numbers."""
        notes = [f"({number}) {reason}" for number, reason in enumerate(self.refusals, 1)]
        for operation, layers in self.node_calls.items():
            uses = f"{len(layers)} use{'s' if len(layers) != 1 else ''}"
            notes.append(
                f"{operation} has no rule: {uses} evaluated by a call for each of {self.samples} samples, right but "
                f"slow, in {_counted(layers)}."
            )
        if self.fallback:
            notes.append(f"No torch.func.vmap: {self.fallback}.")
        if self.coarsest is not None and self.coarsest != self.dtype:
            notes.append(
                f"The model computes in {_name(self.coarsest)} between its {_name(self.dtype)} parameters and its "
                "output, so no closer agreement can be asked for."
            )
        return notes

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


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{word} x{n}" if n > 1 else word for word, n in Counter(words).items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "exact"


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
