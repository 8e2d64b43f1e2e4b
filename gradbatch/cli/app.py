"""Arguments, tables and exit codes of the ``gradbatch`` command."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gradbatch
from gradbatch.analysis import write_report
from gradbatch.cli.loading import load_model, make_inputs, try_out, usable_device
from gradbatch.cli.models import BUILDERS, Built, perturb, settings_of
from gradbatch.errors import GradBatchError
from gradbatch.verify import Report, verify
from gradbatch.verify.report import COLUMNS

MISMATCH, NOT_CHECKED = 1, 2

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Precision(str, Enum):
    """Dtypes that a model can be checked in."""

    float64 = "float64"
    float32 = "float32"


# What the library's messages tell the caller of a function to do, and what does the same here.
IN_OPTIONS = {
    "layer.eval()": "--eval",
    "parameters=": "--parameters",
    "parameters: '": "--parameters: '",
    "Pass loss=, a function from the output to one loss a sample": (
        "Name a function that makes a model whose output has a row for each sample"
    ),
}

# Columns that may be folded, and from which width on; and those that a narrow terminal does without.
FOLDED = {"parameter": 30, "rule": 18}
LEFT_OUT_FIRST = ("memory", "FLOP", "norms", "shape", "gradient", "samples", "reader")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradbatch {gradbatch.__version__} (torch {torch.__version__})")
        raise typer.Exit


def _help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


# A flag has no value: the empty metavar keeps typer from naming one.
Help = Annotated[
    bool, typer.Option("--help", callback=_help, is_eager=True, metavar="", help="Say this, and stop.")
]


@app.callback(add_help_option=False)
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, metavar="", help="Say the version, and stop."
        ),
    ] = False,
    helped: Help = False,
) -> None:
    """Per-sample gradients of any torch.nn.Module."""


@app.command(no_args_is_help=True, add_help_option=False)
def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="PACKAGE.MODULE:FACTORY",
            help="A model, or a class or function that makes one without arguments. The current directory is "
            "importable.",
        ),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Instead, a small model of a configuration class of transformers: BertConfig.",
        ),
    ] = None,
    timm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Instead, a model of timm: resnet18.")
    ] = None,
    torchvision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Instead, a model of torchvision: resnet18.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A field of the configuration, or an argument of what builds the model of timm or torchvision; "
            "repeatable.",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "--int-input",
            metavar="[NAME=]SHAPE[:BOUND]",
            help="Shape of an input, samples first: 8,3,32,32; with a bound, integers below it: 8,16:1000; with a "
            "name, passed by it: mask=8,16:2. Once for each argument of the model, in order. Models of other "
            "libraries have small inputs of their own.",
        ),
    ] = None,
    dtype: Annotated[
        Precision, typer.Option(help="What to compute in; float64 tells mistakes from rounding.")
    ] = Precision.float64,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
    evaluation: Annotated[
        bool | None,
        typer.Option(
            "--eval/--train",
            metavar="",
            help="Mode of the model; BatchNorm can be checked in eval mode only.  [default: train, and eval for "
            "models of other libraries]",
        ),
    ] = None,
    perturbed: Annotated[
        bool | None,
        typer.Option(
            "--perturb/--no-perturb",
            metavar="",
            help="Add small random numbers to all parameters: behind one that is zero, every gradient is zero and "
            "nothing is checked.  [default: for models of other libraries]",
        ),
    ] = None,
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
    helped: Help = False,
) -> None:
    """Compare a model's per-sample gradients with torch.func.vmap, parameter by parameter.

    Exit code 0: all agree. 1: some differ; a map shows where. 2: something was refused, or could not be run.
    """
    named = {"--hf": hf, "--timm": timm, "--torchvision": torchvision}
    options = {option: name for option, name in named.items() if name is not None}
    if (target is not None) + len(options) != 1:
        raise typer.BadParameter(f"name one model: PACKAGE.MODULE:FACTORY, or one of {', '.join(named)}")
    if target is not None and not inputs:
        raise typer.BadParameter("your own model needs one: the shape of its input", param_hint="--input")
    if target is not None and config:
        raise typer.BadParameter(f"goes with one of {', '.join(named)}", param_hint="--config")
    console = Console()
    try:
        torch.manual_seed(seed)
        precision, where = getattr(torch, dtype.value), usable_device(device)
        with _exactly(precision):
            built = _built(target, options, settings_of(config or ()), inputs or ())
            drawn = make_inputs(built.inputs, precision, where)
            evaluation, perturbed = (not target if o is None else o for o in (evaluation, perturbed))
            model = built.model.to(where, precision).train(not evaluation)
            try_out(model, drawn)
            if perturbed:
                perturb(model)
            report = verify(model, drawn.named(model), tolerance=tolerance, parameters=parameters or None)
    except GradBatchError as error:
        Console(stderr=True).print(Text(f"Error: {_in_options(str(error))}", style="red"))
        raise typer.Exit(NOT_CHECKED) from error
    if target is None:
        state = f"in {'eval' if evaluation else 'train'} mode{', parameters perturbed' if perturbed else ''}"
        console.print(
            Text(f"{built.origin}, {state}: --input {' --input '.join(built.inputs)}\n"), soft_wrap=True
        )
    _show(report, console)
    if not report.ok:
        raise typer.Exit(MISMATCH if report.mismatches else NOT_CHECKED)


@app.command(no_args_is_help=True, add_help_option=False)
def report(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG...", help="Log of a GradientMonitor; of several ranks, all of theirs."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    helped: Help = False,
) -> None:
    """Write a page about a run's gradients: noise scale, batch size, layers, hardest samples.

    Exit code 0: it is written. 2: a log could not be read, or the page not be written.
    """
    try:
        typer.echo(f"Written: {write_report(logs, output)}")
    except GradBatchError as error:
        Console(stderr=True).print(Text(f"Error: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(NOT_CHECKED) from error


def _built(
    target: str | None, options: Mapping[str, str], settings: Mapping[str, Any], inputs: Sequence[str]
) -> Built:
    if target is not None:
        return Built(load_model(target), target, inputs)
    ((option, name),) = options.items()
    return BUILDERS[option](name, settings, inputs)


@contextmanager
def _exactly(precision: torch.dtype) -> Iterator[None]:
    """New numbers in the wanted precision, and float32 as float32: the ten bits of TF32 would look like a mistake."""
    default, before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(precision)
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(default)


def _in_options(message: str) -> str:
    for call, option in IN_OPTIONS.items():
        message = message.replace(call, option)
    return message


def _show(report: Report, console: Console) -> None:
    if not console.is_terminal:
        console = Console(width=160)  # a file or a log has room
    rows = report.rows()
    shown = _fitting(rows, console.width)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in shown:
        numeric, folded = column in ("FLOP", "memory", "error"), column in FOLDED
        table.add_column(
            column, justify="right" if numeric else "left", overflow="fold", no_wrap=not folded, min_width=5
        )
    for parameter, cells in zip(report.parameters, rows, strict=True):
        style = "red" if parameter.map else "yellow" if parameter.refusal is not None else ""
        table.add_row(*(Text(cells[COLUMNS.index(column)]) for column in shown), style=style)
    console.print(table)
    if left_out := [column for column in COLUMNS if column not in shown]:
        console.print(Text(f"\nA wider terminal also shows: {', '.join(left_out)}."))
    for note in report.notes():
        console.print()
        console.print(Text(_in_options(note), style="yellow"))
    if report.mismatches:
        console.print()
        # Drawn in columns: never wrapped.
        console.print(Text(report.drawn_mismatches()), no_wrap=True, overflow="ignore", crop=False)
    console.print()
    console.print(
        Text(report.headline(), style="green" if report.ok else "red" if report.mismatches else "yellow")
    )


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The columns of the table that fit side by side, names and rules folded if need be."""
    needed = {
        column: max(len(cell) for cell in (column, *cells))
        for column, cells in zip(COLUMNS, zip(*rows, strict=True), strict=True)
    }
    needed |= {column: min(needed[column], least) for column, least in FOLDED.items()}
    shown = list(COLUMNS)
    for column in LEFT_OUT_FIRST:
        if sum(needed[name] + 2 for name in shown) > width:
            shown.remove(column)
    return shown
