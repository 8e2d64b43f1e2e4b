"""Differentially private training: clipped sums, noise, Poisson sampling, and the epsilon that a run spends."""

from gradbatch.privacy.accounting import (
    Accountant as Accountant,
    epsilon as epsilon,
    noise_multiplier as noise_multiplier,
)
from gradbatch.privacy.adaptive import AdaptiveClipping as AdaptiveClipping
from gradbatch.privacy.clipping import (
    Clipped as Clipped,
    clipped_gradients as clipped_gradients,
    clipping as clipping,
)
from gradbatch.privacy.model_check import Finding as Finding, check_model as check_model
from gradbatch.privacy.noise import GaussianNoise as GaussianNoise
from gradbatch.privacy.private import Private as Private
from gradbatch.privacy.sampling import (
    PoissonLoader as PoissonLoader,
    PoissonSampler as PoissonSampler,
    poisson_loader as poisson_loader,
)
from gradbatch.privacy.training import make_private as make_private
