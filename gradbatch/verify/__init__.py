"""A model's per-sample gradients, cross-checked layer by layer against ``torch.func.vmap``."""

from gradbatch.verify.check import verify as verify
from gradbatch.verify.report import LayerReport as LayerReport, Report as Report
