"""The command's exit code says how a check ended, and its output why."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gradbatch
from gradbatch import cli
from gradbatch.cli.app import app

MODELS = """
import torch
from torch import nn
import gradbatch
from gradbatch.rules.convolution import convolution

class Right(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))

class GroupForgotten(nn.Conv2d):
    pass

@gradbatch.layer_rule(GroupForgotten, feature_axes=3)
def group_forgotten(call):
    for name, grad in convolution(call):
        values = grad.dense().clone()
        values[:, values.shape[1] // 2 :] *= 2
        yield name, gradbatch.Dense(values)

def wrong():
    return nn.Sequential(GroupForgotten(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 2))

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.scale = nn.Embedding(50, 4), nn.Parameter(torch.ones(4))
    def forward(self, ids, weights):
        return self.embedding(ids) * self.scale * weights

class Coupled(Scaled):
    def forward(self, ids, weights):
        scaled = self.scale * weights
        return self.embedding(ids) * (scaled - scaled.mean(0))

class Named(Scaled):
    def forward(self, ids, weights):
        return {"scaled": super().forward(ids, weights), "size": ids.shape}

def frozen():
    return nn.Linear(3, 2).requires_grad_(False)

def zero():
    model = wrong()
    nn.init.zeros_(model[2].weight)
    return model

class Holder:
    inner = Right

def norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

def flat():
    return nn.Sequential(nn.Linear(3, 2), nn.Flatten(0))

def failing():
    raise ValueError("no weights here")

instance = nn.Linear(3, 2)
number = 3
"""


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package of the user's own in the current directory."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "their_package").mkdir()
    (directory / "their_package" / "__init__.py").touch()
    (directory / "their_package" / "models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "path", [*sys.path])
        yield directory
    for name in [name for name in sys.modules if name.split(".")[0] == "their_package"]:
        del sys.modules[name]


def run(*arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed with its lines joined."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def check(name: str, *arguments: str) -> tuple[int, str]:
    return run("check", f"their_package.models:{name}", *arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Right", ["--input", "3,4,6,6"]),
        ("Holder.inner", ["--input", "3,4,6,6", "--dtype", "float32"]),
        ("instance", ["--input", "3,7,3", "--seed", "1", "--tolerance", "1e-9"]),
        ("norm", ["--input", "5,3", "--eval"]),
        ("Scaled", ["--input", "5,7:50", "--input", "5,7,1"]),
        (
            "Scaled",
            ["--input", "5,7:50", "--input", "5,7,1", "--parameters", "embed*", "--parameters", "*.weight"],
        ),
        ("Scaled", ["--int-input", "5,7:50", "--input", "5,7,1", "--parameters", "*.weight"]),
    ],
)
def test_a_right_model_gives_zero(name: str, arguments: list[str]) -> None:
    code, output = check(name, *arguments)
    assert code == 0 and "agree" in output and "torch.func.vmap" in output, output


def test_the_table_has_a_row_for_each_parameter() -> None:
    code, output = check("Right", "--input", "3,4,6,6")
    assert code == 0 and "parameter shape reader rule samples gradient norms FLOP memory error" in output
    assert "0.weight 6x2x3x3 module convolution axis 0 OuterProduct" in output
    assert "3.bias 5 module linear axis 0 Dense – 30 120 B" in output
    assert "Right, 3 samples, float64 on cpu: 4 parameters agree" in output


def test_inputs_may_be_passed_by_name_and_outputs_be_a_dictionary() -> None:
    for inputs in (
        ["ids=5,7:50", "weights=5,7,1"],
        ["5,7:50", "weights=5,7,1"],
        ["weights=5,7,1", "ids=5,7:50"],
    ):
        code, output = check("Named", *(word for spec in inputs for word in ("--input", spec)))
        assert (
            code == 0
            and "Named, 5 samples, float64 on cpu: 2 parameters agree with torch.func.vmap" in output
        )


def test_parameters_that_are_zero_are_perturbed_on_demand() -> None:
    # Behind the zeros the gradient of the first layer is zero, whatever its rule does.
    assert check("zero", "--input", "3,4,4,4")[0] == 0
    code, output = check("zero", "--input", "3,4,4,4", "--perturb")
    assert code == 1 and "2 of 4 parameters differ" in output


def test_a_wrong_rule_gives_one_and_the_block_map() -> None:
    code, output = check("wrong", "--input", "3,4,4,4")
    assert code == 1
    assert "0.weight 6x2x3x3 module group_forgotten" in output
    assert "in 3 of 3 samples and 1 of 2 groups" in output
    assert "samples x groups" in output and "kernel [3, 3]" in output
    assert "2 of 4 parameters differ from torch.func.vmap by more than 1e-10" in output


def test_the_block_map_keeps_its_columns_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = CliRunner().invoke(app, ["check", "their_package.models:wrong", "--input", "3,4,4,4"])
    assert result.exit_code == 1
    assert "elements differ by more than 1e-10, in 3 of 3 samples and 1 of 2 groups." in result.output


@pytest.mark.parametrize(("columns", "shown"), [(200, 10), (80, 8), (40, 4)])
def test_a_narrow_terminal_does_without_the_least_important_columns(
    columns: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = CliRunner().invoke(app, ["check", "their_package.models:Right", "--input", "3,4,6,6"])
    first, *others = re.sub(r"\x1b\[[\d;]*m", "", result.output).splitlines()
    assert len(first.split()) == shown and first.split()[0] == "parameter" and first.split()[-1] == "error"
    assert any("A wider terminal also shows:" in line for line in others) == (shown < 10)
    assert max(map(len, (first, *others))) <= columns


def test_a_refused_parameter_gives_two_and_is_named() -> None:
    code, output = check("Coupled", "--input", "5,7:50", "--input", "5,7,1")
    assert code == 2
    assert "scale 4 – refused (1)" in output and "embedding.weight 50x4 module embedding" in output
    assert "(Coupled): the gradients that arrive at its MulBackward" in output and "1 refused" in output


def test_coupled_samples_give_two_and_name_the_layer() -> None:
    code, output = check("norm", "--input", "5,3")
    assert code == 2 and "1 (BatchNorm1d) normalises over the batch" in output
    assert "eval mode with running statistics (--eval)" in output and "layer.eval()" not in output


def test_a_function_that_mixes_the_samples_is_asked_for_another_target() -> None:
    code, output = check("flat", "--input", "5,3")
    assert code == 2 and "what is a sample? Name a function that makes a model whose output" in output


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("their_package.models", ["--input", "2,3"], "is no package.module:factory"),
        (":Right", ["--input", "2,3"], "is no package.module:factory"),
        ("their_package/models.py:Right", ["--input", "2,3"], "would: their_package.models:Right"),
        ("./models.py:Right", ["--input", "2,3"], "would: models:Right"),
        ("their_package.other:Right", ["--input", "2,3"], "cannot import their_package.other"),
        (
            "their_package.models:Rihgt",
            ["--input", "2,3"],
            "there is Right, GroupForgotten, group_forgotten, wrong, Scaled",
        ),
        ("their_package.models:number", ["--input", "2,3"], "is of type int"),
        ("their_package.models:failing", ["--input", "2,3"], "failing() failed: ValueError: no weights here"),
        ("builtins:dict", ["--input", "2,3"], "dict() returned something of type dict"),
        ("their_package.models:instance", ["--input", "2,4"], "Linear fails on inputs [2, 4] float64"),
        ("their_package.models:instance", ["--input", "2,x"], "'2,x' is no input"),
        ("their_package.models:instance", ["--input", "2,-3"], "'2,-3' is no input"),
        ("their_package.models:instance", ["--input", "2,3:0"], "'2,3:0' is no input"),
        ("their_package.models:instance", ["--input", ""], "'' is no input"),
        ("their_package.models:instance", ["--input", "3=2,3"], "'3=2,3' is no input"),
        ("their_package.models:instance", ["--input", "inputs=2,3"], "unexpected keyword argument 'inputs'"),
        ("their_package.models:instance", ["--input", "2,3", "--input", "input=2,3"], "multiple values"),
        ("their_package.models:instance", ["--input", "2,3", "--device", "abacus"], "--device abacus"),
        (
            "their_package.models:instance",
            ["--input", "2,3", "--parameters", "w"],
            "--parameters: 'w' matches none",
        ),
        (
            "their_package.models:frozen",
            ["--input", "2,3"],
            "Error: this Linear has no trainable parameters, all 2 are frozen",
        ),
    ],
)
def test_what_cannot_be_run_gives_two_and_says_why(target: str, arguments: list[str], message: str) -> None:
    code, output = run("check", target, *arguments)
    assert code == 2 and "Error: " in output and message in output, output
    assert "Traceback" not in output


def test_the_version_is_the_package_s() -> None:
    code, output = run("--version")
    assert code == 0 and output.startswith(f"gradbatch {gradbatch.__version__} ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Commands"),
        (["check"], "Arguments"),
        (["check", "their_package.models:Right"], "Invalid value for --input"),
        (["check", "--input", "2,3"], "name one model"),
        (["check", "their_package.models:Right", "--hf", "BertConfig"], "name one model"),
        (["check", "--timm", "resnet18", "--torchvision", "resnet18"], "name one model"),
        (
            ["check", "their_package.models:Right", "--input", "2,3", "--config", "a=1"],
            "goes with one of --hf",
        ),
    ],
)
def test_too_few_words_and_too_many_are_answered_with_the_usage(arguments: list[str], message: str) -> None:
    code, output = run(*arguments)
    assert code == 2 and "Usage:" in output and message in output


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"]])
def test_help_names_no_value_for_flags(arguments: list[str]) -> None:
    code, output = run(*arguments)
    assert code == 0 and "--help" in output and "bool" not in output


@pytest.mark.parametrize(("there", "needs"), [([], "typer and rich"), (["typer"], "rich")])
def test_without_its_packages_the_command_says_how_to_get_them(
    there: list[str], needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> Any:
        return object() if name in there else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(SystemExit, match=rf"needs {needs}: pip install 'gradbatch\[cli\]'"):
        cli.main()


def test_the_entry_point_runs_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gradbatch", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
