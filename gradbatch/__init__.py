"""Per-sample gradients, and anything derived from them, from one backward pass of any ``torch.nn.Module``."""

from gradbatch.api import (
    backward as backward,
    compute as compute,
    extend as extend,
    per_sample_grads as per_sample_grads,
    retract as retract,
)
from gradbatch.errors import (
    CoupledSamples as CoupledSamples,
    DistributedError as DistributedError,
    GradBatchError as GradBatchError,
    QuantityError as QuantityError,
    RuleError as RuleError,
    SlowPathWarning as SlowPathWarning,
    StaleCapture as StaleCapture,
    UnsupportedLayer as UnsupportedLayer,
    UsageError as UsageError,
    VerificationError as VerificationError,
)
from gradbatch.factors import (
    Blocks as Blocks,
    Concat as Concat,
    Dense as Dense,
    OuterProduct as OuterProduct,
    Permuted as Permuted,
    PerSampleGrad as PerSampleGrad,
    RowScatter as RowScatter,
    Sum as Sum,
)
from gradbatch.plans.contractions import Planner as Planner
from gradbatch.quantities import (
    BatchDotGrad as BatchDotGrad,
    BatchGrad as BatchGrad,
    BatchL2Grad as BatchL2Grad,
    ClippedSum as ClippedSum,
    Quantity as Quantity,
    SumGradSquared as SumGradSquared,
    Variance as Variance,
    WeightedSum as WeightedSum,
)
from gradbatch.results import QuantityResult as QuantityResult, Results as Results
from gradbatch.rules import Call as Call, layer_rule as layer_rule
from gradbatch.verify import verify as verify

__version__ = "0.1.0"
