"""Per-sample gradients, and anything derived from them, from one backward pass of any ``torch.nn.Module``."""

from gradbatch.api import backward as backward
from gradbatch.api import compute as compute
from gradbatch.api import extend as extend
from gradbatch.api import per_sample_grads as per_sample_grads
from gradbatch.api import retract as retract
from gradbatch.errors import CoupledSamples as CoupledSamples
from gradbatch.errors import GradBatchError as GradBatchError
from gradbatch.errors import RuleError as RuleError
from gradbatch.errors import StaleCapture as StaleCapture
from gradbatch.errors import UnsupportedLayer as UnsupportedLayer
from gradbatch.errors import UsageError as UsageError
from gradbatch.errors import VerificationError as VerificationError
from gradbatch.factors import Concat as Concat
from gradbatch.factors import Dense as Dense
from gradbatch.factors import OuterProduct as OuterProduct
from gradbatch.factors import PerSampleGrad as PerSampleGrad
from gradbatch.factors import RowScatter as RowScatter
from gradbatch.factors import Sum as Sum
from gradbatch.plans.contractions import Planner as Planner
from gradbatch.quantities import BatchDotGrad as BatchDotGrad
from gradbatch.quantities import BatchGrad as BatchGrad
from gradbatch.quantities import BatchL2Grad as BatchL2Grad
from gradbatch.quantities import Quantity as Quantity
from gradbatch.quantities import SumGradSquared as SumGradSquared
from gradbatch.quantities import Variance as Variance
from gradbatch.quantities import WeightedSum as WeightedSum
from gradbatch.results import QuantityResult as QuantityResult
from gradbatch.results import Results as Results
from gradbatch.rules import Call as Call
from gradbatch.rules import layer_rule as layer_rule

__version__ = "0.1.0"
