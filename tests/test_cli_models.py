"""The command on models of other libraries: small, with random weights, and with inputs of its own."""

from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

from gradbatch import UsageError
from gradbatch.cli import models
from gradbatch.cli.models import VIDEOS, first_working, settings_of
from tests.test_cli import run
from tests.zoo.check import as_its_library_expects
from tests.zoo.torchvision_shim import make_torchvision_importable


@pytest.fixture
def library() -> Any:
    """Skips where a library is not installed, and lets torchvision in beside any torch."""

    def require(package: str) -> None:
        with as_its_library_expects():
            make_torchvision_importable()
            pytest.importorskip(package)

    return require


def check(*arguments: str) -> tuple[int, str]:
    with as_its_library_expects():
        return run("check", *arguments)


@pytest.mark.parametrize(
    ("config", "arguments", "inputs", "model"),
    [
        ("BertConfig", [], "input_ids=3,7:50", "BertModel, 3 samples, float64 on cpu: 39 parameters agree"),
        ("GPT2Config", ["--config", "n_layer=1"], "input_ids=3,7:50", "float64 on cpu: 16 parameters agree"),
        (
            "T5Config",
            ["--config", "num_layers=1"],
            "input_ids=3,7:50 --input decoder_input_ids=3,7:50",
            "T5Model",
        ),
        ("ViTConfig", ["--config", "hidden_act=relu"], "pixel_values=3,3,32,32", "ViTModel, 3 samples"),
        (
            "BertConfig",
            ["--input", "input_ids=2,5:9", "--input", "attention_mask=2,5:2", "--dtype", "float32"],
            "input_ids=2,5:9 --input attention_mask=2,5:2",
            "BertModel, 2 samples, float32",
        ),
    ],
)
def test_models_of_transformers(
    config: str, arguments: list[str], inputs: str, model: str, library: Any
) -> None:
    library("transformers")
    code, output = check("--hf", config, *arguments)
    assert code == 0, output
    assert (
        output.startswith(f"{config}(") and f"in eval mode, parameters perturbed: --input {inputs} " in output
    )
    assert model in output and "=32, " in output


@pytest.mark.parametrize(
    ("name", "arguments", "inputs"),
    [
        ("resnet10t", [], "3,3,64,64"),
        ("test_vit", ["--config", "img_size=32", "--config", "depth=2"], "3,3,32,32"),
        ("test_vit2", ["--no-perturb"], "3,3,64,64"),
        ("test_vit", ["--parameters", "head.*", "--tolerance", "1e-9"], "3,3,64,64"),
    ],
)
def test_models_of_timm(name: str, arguments: list[str], inputs: str, library: Any) -> None:
    library("timm")
    code, output = check("--timm", name, *arguments)
    state = "in eval mode" + (", parameters perturbed" if "--no-perturb" not in arguments else "")
    assert code == 0 and output.startswith(f"timm's {name}, {state}: --input {inputs} "), output


@pytest.mark.parametrize(
    ("name", "arguments", "inputs"),
    [
        ("squeezenet1_1", [], "3,3,64,64"),
        ("lraspp_mobilenet_v3_large", ["--parameters", "classifier.*"], "3,3,64,64"),
    ],
)
def test_models_of_torchvision(name: str, arguments: list[str], inputs: str, library: Any) -> None:
    library("torchvision")
    code, output = check("--torchvision", name, *arguments)
    described = f"torchvision's {name}, in eval mode, parameters perturbed: --input {inputs} "
    assert code == 0 and output.startswith(described), output


class OfVideos(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        samples, _, frames, height, width = input.shape
        if (frames, height, width) != (16, 224, 224):
            raise ValueError("too small")
        return input.new_zeros(samples)


def test_inputs_are_tried_from_small_to_large() -> None:
    assert first_working(OfVideos(), "--own", ["3,64,64", *VIDEOS]) == ["3,3,16,224,224"]
    with pytest.raises(
        UsageError, match=r"--own takes none of 3,3,64,64, 3,3,8,64,64 .*ValueError: too small"
    ):
        first_working(OfVideos(), "--own", ["3,64,64", "3,8,64,64"])


def test_batch_normalisation_is_refused_in_train_mode(library: Any) -> None:
    library("torchvision")
    code, output = check("--torchvision", "resnet18", "--train")
    assert code == 2 and "torchvision's resnet18, in train mode" in output and "(--eval)" in output


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        ("transformers", ["--hf", "BertConfg"], "no such configuration class; did you mean BertConfig"),
        ("transformers", ["--hf", "BertModel"], "no such configuration class"),
        ("transformers", ["--hf", "BertConfig", "--config", "hiden_size=3"], "did you mean hidden_size"),
        ("transformers", ["--hf", "BertConfig", "--config", "hidden_size=33"], "is not a multiple of"),
        ("timm", ["--timm", "resnet-18"], "did you mean resnet18"),
        ("timm", ["--timm", "resnet18", "--config", "wings=2"], "unexpected keyword argument"),
        ("torchvision", ["--torchvision", "resnet19"], "no such model; did you mean resnet1"),
        ("torchvision", ["--torchvision", "raft_small"], "say what it takes with --input"),
        ("torchvision", ["--torchvision", "resnet18", "--config", "3"], "give KEY=VALUE"),
    ],
)
def test_what_cannot_be_built_is_told(package: str, arguments: list[str], message: str, library: Any) -> None:
    library(package)
    code, output = check(*arguments)
    assert code == 2 and "Error: " in output and message in output, output


@pytest.mark.parametrize(
    ("option", "package"), [("--hf", "transformers"), ("--timm", "timm"), ("--torchvision", "torchvision")]
)
def test_without_its_library_a_model_says_how_to_get_it(
    option: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"{option} needs {package}: pip install {package}"):
        models.BUILDERS[option]("resnet18", {}, [])


def test_a_library_that_fails_on_import_says_what_it_failed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            try:
                raise RuntimeError("operator torchvision::nms does not exist\nand more")
            except RuntimeError as error:
                raise ModuleNotFoundError(f"Could not import module '{name}'") from error

    monkeypatch.setattr(models, "_imported", lambda package, option: Lazy(package))
    with pytest.raises(UsageError) as raised:
        models.from_transformers("BertConfig", {}, [])
    assert str(raised.value) == (
        "--hf BertConfig: ModuleNotFoundError: Could not import module 'BertConfig' "
        "(because of RuntimeError: operator torchvision::nms does not exist). The installed torchvision was built for "
        "another torch: install both anew, from one source"
    )


def test_settings_are_literals_or_words() -> None:
    pairs = ["a=3", "b=[1, 2]", "c=gelu_new", "d='x y'", "e=None", "f=1e-3", "g=a"]
    assert settings_of(pairs) == {
        "a": 3,
        "b": [1, 2],
        "c": "gelu_new",
        "d": "x y",
        "e": None,
        "f": 1e-3,
        "g": "a",
    }
    for pair in ("a", "a=", "=3", "a=[1", "a=x y", "a-b=3"):
        with pytest.raises(UsageError, match="give KEY=VALUE"):
            settings_of([pair])
