"""Linear and bilinear layers: one group, one outer product a position."""

from collections.abc import Iterator

from torch import Tensor, nn

from gradbatch.factors import Dense, OuterProduct, PerSampleGrad
from gradbatch.rules.axes import by_position, total
from gradbatch.rules.call import Call
from gradbatch.rules.registry import layer_rule


def features_by_position(tensor: Tensor) -> Tensor:
    """``[N, *positions, features]`` to the operand ``[N, 1, features, T]`` of an outer product with one group."""
    return by_position(tensor, 1).mT.unsqueeze(1)


@layer_rule(nn.Linear, feature_axes=1, reads=())
def linear(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``y = x Wᵀ + b``: the weight's gradient is ``Σ_t g_t x_tᵀ``."""
    grad_output = call.grad_output
    if "weight" in call.needs:
        shape = (grad_output.shape[-1], call.input.shape[-1])
        yield (
            "weight",
            OuterProduct(features_by_position(grad_output), features_by_position(call.input), shape),
        )
    if "bias" in call.needs:
        yield "bias", Dense(total(by_position(grad_output, 1), (1,)))


@layer_rule(nn.Bilinear, feature_axes=1, reads=())
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
