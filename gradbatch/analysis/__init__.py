"""Statistics of gradients: how noisy they are, in which layers, and what that says about the batch size.

Estimators are functions of norms and sums, which :func:`gradbatch.backward` and :func:`gradbatch.compute` give without
materialised gradients. :class:`GradientMonitor` measures them while a model is trained and writes a log;
:func:`write_report` makes a page of it.
"""

from gradbatch.analysis.agreement import (
    coherence as coherence,
    coherence_interval as coherence_interval,
    confusion as confusion,
    cosines as cosines,
    diversity as diversity,
    diversity_interval as diversity_interval,
    stiffness as stiffness,
    stiffness_interval as stiffness_interval,
)
from gradbatch.analysis.batch_size import (
    BatchTest as BatchTest,
    cabs_batch_size as cabs_batch_size,
    inner_product_test as inner_product_test,
    norm_test as norm_test,
    orthogonality_test as orthogonality_test,
)
from gradbatch.analysis.cadence import logarithmic as logarithmic
from gradbatch.analysis.callbacks import (
    lightning_callback as lightning_callback,
    transformers_callback as transformers_callback,
)
from gradbatch.analysis.elementwise import (
    FisherDiagonal as FisherDiagonal,
    stopping_evidence as stopping_evidence,
)
from gradbatch.analysis.influence import SampleScores as SampleScores, influence as influence
from gradbatch.analysis.intervals import mean_interval as mean_interval
from gradbatch.analysis.log import (
    Log as Log,
    Record as Record,
    Run as Run,
    Writer as Writer,
    read_log as read_log,
)
from gradbatch.analysis.monitor import (
    GradientMonitor as GradientMonitor,
    MonitoredStep as MonitoredStep,
)
from gradbatch.analysis.noise import (
    NoiseScale as NoiseScale,
    squared_gradient as squared_gradient,
    total_variance as total_variance,
)
from gradbatch.analysis.norms import (
    norm_histogram as norm_histogram,
    norm_quantiles as norm_quantiles,
    quantile_interval as quantile_interval,
)
from gradbatch.analysis.projection import RandomProjection as RandomProjection
from gradbatch.analysis.quantities import (
    BatchDotSum as BatchDotSum,
    EvidenceParts as EvidenceParts,
    FirstGram as FirstGram,
    SumL2Grad as SumL2Grad,
)
from gradbatch.analysis.report import write_report as write_report
from gradbatch.analysis.store import FeatureStore as FeatureStore
from gradbatch.analysis.tensorboard import TensorBoard as TensorBoard
from gradbatch.analysis.writers import Csv as Csv, JsonLines as JsonLines
