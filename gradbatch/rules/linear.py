"""Linear and bilinear layers: one group, one outer product a position."""

from collections.abc import Iterator

from torch import Tensor, nn

from gradbatch.factors import Dense, OuterProduct, PerSampleGrad
from gradbatch.rules.axes import by_position, total
from gradbatch.rules.call import Call
from gradbatch.rules.registry import layer_rule


def features_by_position(tensor: Tensor) -> Tensor:
    """``[N, *positions, features]`` to the operand ``[N, 1, features, T]`` of an outer product with one group."""
    if tensor.dim() == 2:  # at one position, where the order in memory makes no difference
        return tensor.reshape(tensor.shape[0], 1, tensor.shape[1], 1)
    return by_position(tensor, 1).mT.unsqueeze(1)


@layer_rule(nn.Linear, feature_axes=1, reads=(), by_row=True)
def linear(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``y = x Wᵀ + b``: the weight's gradient is ``Σ_t g_t x_tᵀ``."""
    grad_output = call.grad_output
    if "weight" in call.needs:
        inputs = call.input
        shape = (grad_output.shape[-1], inputs.shape[-1])
        yield "weight", OuterProduct(features_by_position(grad_output), features_by_position(inputs), shape)
    if "bias" in call.needs:
        yield "bias", Dense(total(by_position(grad_output, 1), (1,)))


@layer_rule(nn.Bilinear, feature_axes=1, reads=(), by_row=True)
def bilinear(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``y_p = xᵀ W_p z + b_p``: an outer product of the output gradient with ``x_t zᵀ_t``, flattened."""
    grad_output = call.grad_output
    if "weight" in call.needs:
        first, second = (
            by_position(call.sample_first(call.arguments[name]), 1) for name in ("input1", "input2")
        )
        pairs = (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(2)
        shape = (grad_output.shape[-1], first.shape[-1], second.shape[-1])
        yield "weight", OuterProduct(features_by_position(grad_output), features_by_position(pairs), shape)
    if "bias" in call.needs:
        yield "bias", Dense(total(by_position(grad_output, 1), (1,)))


def product(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``Y = α X W``, rows of ``Y`` owned by samples: the gradient of ``W`` is ``α Σ_t x_t g_tᵀ``.

    Of its transpose, where ``call.module.transposed``: then ``X`` and ``Y`` come transposed from the other side.
    """
    scale = call.module.alpha
    left = features_by_position(call.input) * scale if scale != 1 else features_by_position(call.input)
    right = features_by_position(call.grad_output)
    if call.module.transposed:
        left, right = right, left
    yield "weight", OuterProduct(left, right, (left.shape[2], right.shape[2]))


def product_with_vector(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``y = α X v``, elements of ``y`` owned by samples: the gradient of ``v`` is ``α Σ_t g_t x_t``."""
    left = by_position(call.grad_output.unsqueeze(-1) * call.module.alpha, 1).mT.unsqueeze(1)
    right = features_by_position(call.input)
    yield "weight", OuterProduct(left, right, (right.shape[2],))


def batched_product(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``Y_b = α X_b W_b``, rows of every ``Y_b`` owned by samples: one group for each ``b``."""
    left, right = call.input * call.module.alpha, call.grad_output
    if left.dim() == 3:  # one row a sample, whose axis is left out
        left, right = left.unsqueeze(2), right.unsqueeze(2)
    left, right = left.mT, right.mT
    if call.module.transposed:
        left, right = right, left
    yield "weight", OuterProduct(left, right, (left.shape[1], left.shape[2], right.shape[2]))
