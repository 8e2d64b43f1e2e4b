"""Quantities: what a user asks for, each written once in terms of :class:`~gradbatch.PerSampleGrad`."""

from gradbatch.quantities.base import Quantity as Quantity
from gradbatch.quantities.first_order import BatchDotGrad as BatchDotGrad
from gradbatch.quantities.first_order import BatchGrad as BatchGrad
from gradbatch.quantities.first_order import BatchL2Grad as BatchL2Grad
from gradbatch.quantities.first_order import WeightedSum as WeightedSum
from gradbatch.quantities.moments import SumGradSquared as SumGradSquared
from gradbatch.quantities.moments import Variance as Variance
