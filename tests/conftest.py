"""What every test shares: the device it runs on, a fixed seed, and how many examples hypothesis tries."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Two cores are shared by the workers, so an example may take long through no fault of its own: no deadline.
# In CI the examples are the same every time, so that a red run means the change and not the dice.
settings.register_profile(
    "gradbatch",
    max_examples=int(os.environ.get("GRADBATCH_EXAMPLES", "200")),
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("gradbatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests run: cpu (default), cuda, cuda:1")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of ``--device``; the test is skipped, with the reason, where this machine has none."""
    device = torch.device(request.config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"--device {device}: torch finds no CUDA device here")
    return device


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers, whatever ran before it on this worker."""
    torch.manual_seed(0)
