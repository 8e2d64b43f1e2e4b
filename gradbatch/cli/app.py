"""Arguments, tables and exit codes of the ``gradbatch`` command."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gradbatch
from gradbatch.cli.loading import load_model, make_input, try_out, usable_device
from gradbatch.errors import GradBatchError
from gradbatch.verify import Report, verify
from gradbatch.verify.report import COLUMNS

MISMATCH, NOT_CHECKED = 1, 2

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Precision(str, Enum):
    """Dtypes that a model can be checked in."""

    float64 = "float64"
    float32 = "float32"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradbatch {gradbatch.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version, and stop.")
    ] = False,
) -> None:
    """Per-sample gradients of any torch.nn.Module."""


@app.command(no_args_is_help=True)
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:FACTORY",
            help="A model, or a class or function that makes one without arguments. The current directory is "
            "importable.",
        ),
    ],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            "--int-input",
            metavar="SHAPE[:BOUND]",
            help="Shape of an input, samples first: 8,3,32,32; with a bound, integers below it: 8,16:1000. Once for "
            "each argument of the model, in order.",
        ),
    ],
    dtype: Annotated[
        Precision, typer.Option(help="What to compute in; float64 tells mistakes from rounding.")
    ] = Precision.float64,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
    evaluation: Annotated[
        bool,
        typer.Option(
            "--eval", help="Put the model in eval mode (BatchNorm cannot be checked in train mode)."
        ),
    ] = False,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Check only parameters named like this, e.g. 'head.*'; repeatable."
        ),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative error that agrees.  [default: by dtype]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the model's initialisation and of the inputs.")] = 0,
) -> None:
    """Compare a model's per-sample gradients with torch.func.vmap, layer by layer.

    Exit code 0: all agree. 1: some differ; a map shows where. 2: something was refused, or could not be run.
    """
    console = Console()
    try:
        torch.manual_seed(seed)
        precision = getattr(torch, dtype.value)
        where = usable_device(device)
        tensors = [make_input(spec, precision).to(where) for spec in inputs]
        model = load_model(target).to(where, precision).train(not evaluation)
        with _without_tf32():
            try_out(model, tensors)
            report = verify(model, tensors, tolerance=tolerance, parameters=parameters or None)
    except GradBatchError as error:
        Console(stderr=True).print(Text(f"Error: {error}", style="red"))
        raise typer.Exit(NOT_CHECKED) from error
    _show(report, console)
    if not report.ok:
        raise typer.Exit(MISMATCH if report.mismatches else NOT_CHECKED)


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute float32 as float32: the ten bits of TF32 would look like a mistake."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _show(report: Report, console: Console) -> None:
    if not console.is_terminal:
        console = Console(width=160)  # a file or a log has room
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        numeric, name = column in ("FLOP", "memory", "error"), column in ("layer", "type")
        table.add_column(
            column, justify="right" if numeric else "left", overflow="fold", no_wrap=not name, min_width=6
        )
    for layer, cells in zip(report.layers, report.rows(), strict=True):
        style = "red" if layer.maps else "yellow" if layer.refusal is not None else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    console.print(table)
    for note in report.notes():
        console.print()
        console.print(Text(note, style="yellow"))
    if report.mismatches:
        console.print()
        # Drawn in columns: never wrapped.
        console.print(Text(report.drawn_mismatches()), no_wrap=True, overflow="ignore", crop=False)
    console.print()
    console.print(
        Text(report.headline(), style="green" if report.ok else "red" if report.mismatches else "yellow")
    )
