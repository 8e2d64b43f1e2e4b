"""Convolutions with a backward written by hand, which can also leave every sample's own weight gradient.

Each one exists as a friendly function with the arguments of its ``torch.nn.functional`` namesake, and as the
``torch.autograd.Function`` behind it.
"""

from gradbatch.functional.convolutions import (
    Conv1dFunction as Conv1dFunction,
    Conv2dFunction as Conv2dFunction,
    Conv3dFunction as Conv3dFunction,
    conv1d as conv1d,
    conv2d as conv2d,
    conv3d as conv3d,
)
from gradbatch.functional.transposed import (
    ConvTranspose1dFunction as ConvTranspose1dFunction,
    ConvTranspose2dFunction as ConvTranspose2dFunction,
    ConvTranspose3dFunction as ConvTranspose3dFunction,
    conv_transpose1d as conv_transpose1d,
    conv_transpose2d as conv_transpose2d,
    conv_transpose3d as conv_transpose3d,
)
