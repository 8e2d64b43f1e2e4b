"""Quantities: what a user asks for, each written once in terms of :class:`~gradbatch.PerSampleGrad`."""

from gradbatch.quantities.base import Quantity as Quantity
from gradbatch.quantities.clipping import ClippedSum as ClippedSum
from gradbatch.quantities.first_order import (
    BatchDotGrad as BatchDotGrad,
    BatchGrad as BatchGrad,
    BatchL2Grad as BatchL2Grad,
    WeightedSum as WeightedSum,
)
from gradbatch.quantities.moments import SumGradSquared as SumGradSquared, Variance as Variance
