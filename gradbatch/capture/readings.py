"""The table of the node reader: how nodes of the autograd graph are read as calls of functions that have a rule.

The node's type names the function, and what it saved are the arguments; each entry hands its call to the same rule that
serves the layer of that function. What no entry describes is evaluated by calling the node itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradbatch.capture import graph
from gradbatch.capture.layouts import OwnerMap, Owners
from gradbatch.rules import Layout, RuleFunction, SampleLayout
from gradbatch.rules.axes import full
from gradbatch.rules.convolution import convolution, transposed_convolution
from gradbatch.rules.embedding import embedding, embedding_bag, indexed_rows
from gradbatch.rules.linear import batched_product, bilinear, product, product_with_vector
from gradbatch.rules.normalisation import normalised_channels, normalised_features

# Operations element by element: an input gradient is the output gradient times numbers, until broadcasting is undone.
POINTWISE = frozenset(
    f"{name}Backward"
    for name in """Add Sub Rsub Mul Div Pow Where Lerp Addcmul Addcdiv Maximum Minimum Clamp ClampMin ClampMax
    PreluKernel ToCopy Clone Neg MaskedFill Atan2 Hypot Fmod Remainder Xlogy Fmax Fmin Logaddexp""".split()  # noqa: SIM905
)
# The added operand of a product, with the name of its factor.
SHIFTS = {"AddmmBackward": "beta", "BaddbmmBackward": "beta", "AddmvBackward": "beta"}

# The same numbers in another shape, and on other axes.
RESHAPING = frozenset(
    f"{name}Backward"
    for name in "View UnsafeView ReshapeAlias Alias Squeeze Unsqueeze Clone ToCopy".split()  # noqa: SIM905
)
TRANSPOSING = frozenset({"TBackward", "TransposeBackward", "PermuteBackward"})


@dataclass(frozen=True)
class Reading:
    """How the nodes of one type are read.

    Args:
        rule: what the call is handed to.
        slots: what the rule calls the input gradients that it explains, by their place in ``next_functions``.
        arguments: of the call, from the node, the first is the input; none if the node is no such call after all.
        settings: what the rule reads of ``call.module``, from the node.
        features: trailing axes of the output that belong to the function, from the settings and the number of axes.
        order: of the output's axes before that, where the samples lie on other than leading ones.
        axis: where the samples must lie in the reordered output; ``None``: on any leading axis.
        applies: whether a node of the type is such a call.
    """

    rule: RuleFunction
    slots: Mapping[int, str]
    arguments: Callable[[Node], Mapping[str, Tensor]]
    settings: Callable[[Node], Mapping[str, Any]]
    features: Callable[[Any, int], int]
    order: Sequence[int] | None = None
    axis: int | None = None
    applies: Callable[[Node], bool] = lambda _: True

    def layout(self, owners: Owners, output: torch.Size, features: int) -> Layout | None:
        """Where the samples lie in the reordered output, if the rule can do with it."""
        dims, lead = len(output), len(output) - features
        order = range(dims) if self.order is None else self.order
        if isinstance(owners, OwnerMap):
            if self.axis is not None or lead < 1:
                return None
            return OwnerMap(owners.owner.permute(*order), owners.samples).rows(lead)
        if owners.axis is None:
            return owners if self.axis is None else None
        axis = list(order).index(owners.axis)
        if axis >= lead or (self.axis is not None and axis != self.axis):
            return None
        return SampleLayout(owners.samples, axis, owners.stride)


def _none(_: Node) -> Mapping[str, Any]:
    return {}


def _one(_: Any, __: int) -> int:
    return 1


def _products(kind: str, left: str, right: str, first: int, batched: bool) -> tuple[Reading, Reading]:
    """Readings of ``X W`` with the second factor as the weight, and with the first, transposed."""
    rule, scaled = batched_product if batched else product, kind.startswith(("Addmm", "Baddbmm"))

    def settings(transposed: bool) -> Callable[[Node], Mapping[str, Any]]:
        return lambda node: {
            "alpha": graph.saved(node, "alpha") if scaled else 1,
            "transposed": transposed,
        }

    axis = 1 if batched else None
    order = (0, 2, 1) if batched else (1, 0)
    return (
        Reading(
            rule,
            {first + 1: "weight"},
            lambda node: {"input": graph.saved(node, left)},
            settings(False),
            _one,
            axis=axis,
        ),
        Reading(
            rule,
            {first: "weight"},
            lambda node: {"input": graph.saved(node, right).mT},
            settings(True),
            _one,
            order,
            axis,
        ),
    )


def _convolution_settings(node: Node) -> Mapping[str, Any]:
    names = ("stride", "padding", "dilation")
    kernel = tuple(graph.saved(node, "weight").shape[2:])
    return {
        "kernel_size": kernel,
        "groups": graph.saved(node, "groups"),
        "padding_mode": "zeros",
        # One entry may stand for all dimensions.
        **{name: (value := tuple(graph.saved(node, name))) * (len(kernel) // len(value)) for name in names},
    }


def _convolution(transposed: bool) -> Reading:
    return Reading(
        transposed_convolution if transposed else convolution,
        {1: "weight", 2: "bias"},
        lambda node: {"input": graph.saved(node, "input")},
        _convolution_settings,
        lambda settings, _: len(settings.kernel_size) + 1,
        applies=lambda node: graph.saved(node, "transposed") == transposed,
    )


def _input(name: str) -> Callable[[Node], Mapping[str, Tensor]]:
    return lambda node: {"input": graph.saved(node, name)}


def _layer_norm(node: Node) -> Mapping[str, Tensor]:
    input, mean, scale = (full(graph.saved(node, name)) for name in ("input", "result1", "result2"))
    return {"input": (input - mean) * scale}


def _fused_rms_norm(node: Node) -> Mapping[str, Tensor]:
    return {"input": full(graph.saved(node, "input")) * full(graph.saved(node, "result1"))}


def _group_norm(node: Node) -> Mapping[str, Tensor]:
    input = full(graph.saved(node, "input"))
    mean, scale = (full(graph.saved(node, name)) for name in ("result1", "result2"))
    groups = input.reshape(*mean.shape, -1)
    return {"input": ((groups - mean.unsqueeze(-1)) * scale.unsqueeze(-1)).view(input.shape)}


def _batch_norm(node: Node) -> Mapping[str, Tensor]:
    input = full(graph.saved(node, "input"))
    if graph.saved(node, "training"):
        mean, scale = full(graph.saved(node, "result1")), full(graph.saved(node, "result2"))
    else:
        mean = full(graph.saved(node, "running_mean"))
        try:
            eps = graph.saved(node, "eps")
        except AttributeError:
            eps = graph.saved(node, "epsilon")  # cuDNN's
        scale = (full(graph.saved(node, "running_var")) + eps).rsqrt()
    channels = (-1, *(1,) * (input.dim() - 2))
    return {"input": (input - mean.view(channels)) * scale.view(channels)}


def _embedding_settings(node: Node) -> Mapping[str, Any]:
    padding = graph.saved(node, "padding_idx")
    return {
        # None is saved as the largest number there is.
        "padding_idx": padding if padding < 2**62 else None,
        "scale_grad_by_freq": graph.saved(node, "scale_grad_by_freq"),
    }


def _weighted_bags(node: Node) -> Mapping[str, Tensor]:
    names = {"input": "indices", "offsets": "offsets", "per_sample_weights": "per_sample_weights"}
    return {name: graph.saved(node, saved) for name, saved in names.items()}


def _bag_settings(node: Node) -> Mapping[str, Any]:
    padding = graph.saved(node, "padding_idx")
    padding = padding - 2**64 if padding >= 2**63 else padding
    return {
        "mode": "sum",
        "padding_idx": None if padding < 0 else padding,
        "scale_grad_by_freq": graph.saved(node, "scale_grad_by_freq"),
    }


def _trilinear_is_bilinear(node: Node) -> bool:
    names = ("expand1", "expand2", "expand3", "sumdim")
    return [list(graph.saved(node, name)) for name in names] == [[1, 3], [0], [1, 2], [2, 3]]


def _norm(arguments: Callable[[Node], Mapping[str, Tensor]], slots: Mapping[int, str]) -> Reading:
    return Reading(
        normalised_features,
        slots,
        arguments,
        lambda node: {"normalized_shape": tuple(graph.saved(node, "normalized_shape"))},
        lambda settings, _: len(settings.normalized_shape),
    )


def _channel_norm(arguments: Callable[[Node], Mapping[str, Tensor]]) -> Reading:
    slots = {1: "weight", 2: "bias"}
    return Reading(normalised_channels, slots, arguments, _none, lambda _, dim: dim - 1)


def _selected(name: str, applies: Callable[[Node], bool] = lambda _: True) -> Reading:
    def ids(node: Node) -> Mapping[str, Tensor]:
        index = graph.saved(node, name)
        if isinstance(index, tuple):
            index, *others = index
            if (
                index is None
                or index.dtype in (torch.bool, torch.uint8)
                or any(other is not None for other in others)
            ):
                return {}
        rows = graph.input_shape(node, 0)[0]
        return {"input": torch.where(index < 0, index + rows, index)}

    return Reading(
        indexed_rows,
        {0: "weight"},
        ids,
        _none,
        lambda settings, _: len(settings.weight.shape) - 1,
        applies=applies,
    )


READINGS: dict[str, tuple[Reading, ...]] = {
    "MmBackward": _products("Mm", "self", "mat2", 0, batched=False),
    "AddmmBackward": _products("Addmm", "mat1", "mat2", 1, batched=False),
    "BmmBackward": _products("Bmm", "self", "mat2", 0, batched=True),
    "BaddbmmBackward": _products("Baddbmm", "batch1", "batch2", 1, batched=True),
    "MvBackward": (
        Reading(product_with_vector, {1: "weight"}, _input("self"), lambda _: {"alpha": 1}, lambda *_: 0),
    ),
    "ConvolutionBackward": (_convolution(transposed=False), _convolution(transposed=True)),
    "EmbeddingBackward": (Reading(embedding, {0: "weight"}, _input("indices"), _embedding_settings, _one),),
    "EmbeddingBagBackward": (
        # Only a sum can be weighted; without weights the node keeps what depends on the mode.
        Reading(
            embedding_bag,
            {0: "weight"},
            _weighted_bags,
            _bag_settings,
            _one,
            applies=lambda node: (
                graph.saved(node, "per_sample_weights") is not None
                and not graph.saved(node, "scale_grad_by_freq")
            ),
        ),
    ),
    "IndexBackward": (_selected("indices"),),
    "IndexSelectBackward": (_selected("index", lambda node: graph.saved(node, "dim") == 0),),
    "NativeLayerNormBackward": (_norm(_layer_norm, {1: "weight", 2: "bias"}),),
    "FusedRmsNormBackward": (_norm(_fused_rms_norm, {1: "weight"}),),
    "NativeGroupNormBackward": (_channel_norm(_group_norm),),
    "NativeBatchNormBackward": (_channel_norm(_batch_norm),),
    "CudnnBatchNormBackward": (_channel_norm(_batch_norm),),
    "TrilinearBackward": (
        Reading(
            bilinear,
            {1: "weight"},
            lambda node: {"input1": graph.saved(node, "i1"), "input2": graph.saved(node, "i3")},
            _none,
            _one,
            applies=_trilinear_is_bilinear,
        ),
    ),
}

KEPT: Mapping[str, Sequence[str]] = {
    "MkldnnRnnLayerBackward": ("result0", "result3"),
    "NativeGroupNormBackward": ("result1", "result2"),
    "NativeLayerNormBackward": ("result1", "result2"),
}
"""What kernels keep for their backward that can spare a layer's rule work, by type of node: names of what it saved."""
