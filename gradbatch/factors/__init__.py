"""Per-sample gradients as small algebraic objects: tensor algebra that knows no layer and no quantity."""

from gradbatch.factors.base import PerSampleGrad as PerSampleGrad
from gradbatch.factors.blocks import Blocks as Blocks
from gradbatch.factors.dense import Dense as Dense
from gradbatch.factors.outer_product import OuterProduct as OuterProduct
from gradbatch.factors.permuted import Permuted as Permuted
from gradbatch.factors.row_scatter import RowScatter as RowScatter
from gradbatch.factors.sums import Concat as Concat, Sum as Sum
