"""torchvision beside a torch that it was not compiled for: its Python models need none of its compiled operators."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch


@cache
def make_torchvision_importable() -> None:
    """Declare the operators that torchvision's import looks up, where its own library of them did not load.

    transformers imports torchvision where it is installed, so it needs this too. Where it is not, nothing is done.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        # What the failed import left behind would be found by the next one.
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declare_operators()


def _declare_operators() -> None:
    """Schemas without kernels: calling one is an error, and no model of the zoo does."""
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
