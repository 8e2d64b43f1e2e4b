"""The examples run, from a directory of their own, without a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_the_digits_are_trained_on_checked_and_drawn(tmp_path: Path) -> None:
    for package in ("sklearn", "matplotlib", "rich"):
        pytest.importorskip(package, reason="the demo needs gradbatch[demo]")
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--epochs", "2", "--picture", "some.png"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "agree with torch.func.vmap" in ended.stdout and "2/2 epochs" in ended.stdout
    assert "Gradient norms by class" in ended.stdout and "The hardest digits" in ended.stdout
    assert (tmp_path / "some.png").stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["some.png"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_has_its_line(path: Path) -> None:
    assert f"[{path.name}]({path.name})" in (ROOT / "examples" / "README.md").read_text()
