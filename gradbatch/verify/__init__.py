"""A model's per-sample gradients, cross-checked parameter by parameter against ``torch.func.vmap``."""

from gradbatch.verify.check import verify as verify
from gradbatch.verify.report import (
    Explained as Explained,
    ParameterReport as ParameterReport,
    Report as Report,
)
