"""Where the user's backward pass started: from scalars, or from vectors with a gradient for each element.

The engine does not tell. But the function of torch's that called it waits on the stack for as long as the pass runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradbatch.capture import graph

# All ways into the engine from Python lead through this function, whose first argument are the roots.
_ENTRY = getattr(torch.autograd.graph, "_engine_run_backward", None)


def starts_from_vectors() -> bool:
    """Whether the running backward pass was started from something else than scalars.

    Hooks of a CUDA graph run on a thread of the engine's, while the caller waits on another; so all threads are looked
    at. A pass inside the pass (reentrant checkpointing) starts from vectors too. Both can only add passes to those that
    are found, so the answer is yes where every one of them starts from vectors.

    Edge cases: no, where another thread runs a pass from a scalar meanwhile, or torch has renamed the function.
    """
    found = [roots for top in sys._current_frames().values() for roots in _roots(top)]
    return bool(found) and all(any(_count(root) != 1 for root in roots) for roots in found)


def _roots(top: FrameType) -> Iterator[Any]:
    frame: FrameType | None = top
    while frame is not None:
        if _ENTRY is not None and frame.f_code is _ENTRY.__code__:
            yield frame.f_locals[frame.f_code.co_varnames[0]]
        frame = frame.f_back


def _count(root: Any) -> int:
    """Number of elements of a root, a tensor or a ``GradientEdge``."""
    return root.numel() if isinstance(root, Tensor) else graph.outputs(root.node)[root.output_nr][0].numel()
