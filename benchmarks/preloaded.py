"""Imports the peers, those that are there, before processes are forked: imports are memory, and no step's."""

import contextlib

with contextlib.suppress(ImportError):
    import opacus.validators  # noqa: F401

with contextlib.suppress(ImportError):
    import backpack.extensions  # noqa: F401

with contextlib.suppress(ImportError):
    import torch.nn.utils._per_sample_grad  # noqa: F401
