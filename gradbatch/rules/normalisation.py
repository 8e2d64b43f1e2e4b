"""Normalisation layers: ``y = w x̂ + b``, with ``x̂`` recomputed from the input, and from what the forward kept.

Their per-sample gradients are as small as a bias, so they are materialised. Layers that normalise over the batch are
taught in eval mode only; in training the samples are coupled, and the capture refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbatch.factors import Dense, PerSampleGrad
from gradbatch.rules.axes import by_position, full, total
from gradbatch.rules.call import Call
from gradbatch.rules.registry import layer_rule


def _scale_and_shift(
    call: Call, features: int, normalise: Callable[[Tensor], Tensor], per_channel: bool
) -> Iterator[tuple[str, PerSampleGrad]]:
    """Gradients of an elementwise affine map after a normalisation.

    Args:
        call: the layer's call.
        features: trailing axes that are normalised together, or the channel axis and all behind it.
        normalise: from ``[rows, *features]`` to ``x̂`` of the same shape.
        per_channel: one weight a channel (the first feature axis) rather than one for each element.
    """
    grad_output = full(by_position(call.grad_output, features))
    summed = (1, *range(3, grad_output.dim())) if per_channel else (1,)
    if "weight" in call.needs:
        input = by_position(call.input, features)
        normalised = full(normalise(input.flatten(0, 1))).view(input.shape)
        yield "weight", Dense(total(grad_output * normalised, summed))
    if "bias" in call.needs:
        yield "bias", Dense(total(grad_output, summed))


@layer_rule(nn.LayerNorm, feature_axes=lambda module, _: len(module.normalized_shape), reads=())
def layer_norm(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Normalised over the last axes, one weight an element of them."""
    shape, eps = call.module.normalized_shape, call.module.eps
    output = call.raw_grad_output
    rows = *output.shape[: -len(shape)], *(1,) * len(shape)
    moments = (
        _kept_moments(call, rows, torch.promote_types(output.dtype, torch.float32))
        if "weight" in call.needs
        else None
    )
    if moments is None:
        yield from _scale_and_shift(
            call, len(shape), lambda x: F.layer_norm(full(x), shape, eps=eps), per_channel=False
        )
        return
    grad_output, mean, inverse = (by_position(t, len(shape)) for t in (full(call.grad_output), *moments))
    # Divided by the deviation as the positions are added up: one pass less over all elements.
    products = (by_position(full(call.input), len(shape)) - mean).mul_(grad_output).flatten(2)
    yield "weight", Dense(torch.bmm(inverse.flatten(1).unsqueeze(1), products).view(len(products), *shape))
    if "bias" in call.needs:
        yield "bias", Dense(total(grad_output, (1,)))


@layer_rule(nn.RMSNorm, feature_axes=lambda module, _: len(module.normalized_shape), reads=())
def rms_norm(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Divided by the root mean square of the last axes."""
    shape, eps = call.module.normalized_shape, call.module.eps
    # In the input's own dtype: where eps is None, its value depends on the dtype.
    yield from _scale_and_shift(call, len(shape), lambda x: F.rms_norm(x, shape, eps=eps), per_channel=False)


def _channel_and_behind(module: Any, output_dim: int) -> int:
    return output_dim - 1


@layer_rule(nn.GroupNorm, feature_axes=_channel_and_behind, reads=())
def group_norm(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Normalised over each group of channels and all positions of an image."""
    yield from _as_one_image(call, call.feature_axes or 1, call.module.num_groups)


def _as_one_image(call: Call, features: int, groups: int) -> Iterator[tuple[str, PerSampleGrad]]:
    """Normalised over groups of an image's channels: as one image with the channels of all.

    Its scale has an element for each channel of each image, so that torch's own backward, which reads input and output
    gradient once, leaves the images apart. Of the forward it needs the moments alone, which are mostly still there.

    Args:
        call: the layer's call.
        features: trailing axes: the channel axis and all behind it.
        groups: of an image's channels.
    """
    input = full(by_position(call.input, features))
    samples, positions, channels = input.shape[:3]
    rows = samples * positions
    image = input.reshape(1, rows * channels, *input.shape[3:])
    if image.numel():
        grad_output = full(by_position(call.grad_output, features)).reshape(image.shape)
        kept = _kept_moments(call, (call.raw_grad_output.shape[0], groups), image.dtype)
        moments = [t.reshape(1, -1) for t in kept or _moments(image, rows * groups, call.module.eps)]
        sizes = 1, rows * channels, math.prod(image.shape[2:]), rows * groups
        wanted = [False, "weight" in call.needs, "bias" in call.needs]
        scale = image.new_ones(rows * channels)
        found = torch.ops.aten.native_group_norm_backward(
            grad_output.contiguous(), image.contiguous(), *moments, scale, *sizes, wanted
        )
    else:
        found = (None, *(input.new_zeros(rows * channels) for _ in range(2)))
    for name, gradient in zip(("weight", "bias"), found[1:], strict=True):
        if name in call.needs:
            yield name, Dense(total(gradient.view(samples, positions, channels), (1,)))


def _kept_moments(call: Call, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Mean and inverse deviation of all that is normalised together, as the forward found them, samples first.

    Args:
        call: the layer's call.
        shape: in which the forward keeps each.
        dtype: in which they are of use.
    """
    for kept in call.kept.values():
        mean, inverse = kept["result1"], kept["result2"]
        if mean.shape == inverse.shape == tuple(shape) and mean.dtype == inverse.dtype == dtype:
            return call.sample_first(mean), call.sample_first(inverse)
    return None


def _moments(image: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    sizes = 1, image.shape[1], math.prod(image.shape[2:]), groups
    _, mean, inverse = torch.ops.aten.native_group_norm(image.contiguous(), None, None, *sizes, eps)
    return mean, inverse


def _instance_norm_axes(module: Any, output_dim: int) -> int:
    return {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}[type(module)]


@layer_rule(
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    feature_axes=_instance_norm_axes,
    reads=lambda module: (
        () if module.training or not module.track_running_stats else ("running_mean", "running_var")
    ),
)
def instance_norm(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Normalised over the positions of each channel of an image, or by running statistics in eval mode."""
    module = call.module
    features = call.feature_axes or 2
    if call.training or not module.track_running_stats:
        yield from _as_one_image(call, features, module.num_features)
    else:
        # Not instance_norm, which writes to the statistics that it is given, in older torch even where it only reads.
        yield from _scale_and_shift(call, features, _by_statistics(module), per_channel=True)


@layer_rule(
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    feature_axes=_channel_and_behind,
    # A train-mode forward changes the statistics behind the back of their version counters, but counts itself.
    reads=("running_mean", "running_var", "num_batches_tracked"),
)
def batch_norm(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Eval mode: normalised by running statistics, which are constants."""
    yield from _scale_and_shift(call, call.feature_axes or 1, _by_statistics(call.module), per_channel=True)


def _by_statistics(module: Any) -> Callable[[Tensor], Tensor]:
    def normalise(input: Tensor) -> Tensor:
        return F.batch_norm(full(input), full(module.running_mean), full(module.running_var), eps=module.eps)

    return normalise


def normalised_features(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Scale and shift of an input that is normalised already, one weight for each element of the last axes."""
    yield from _scale_and_shift(call, call.feature_axes or 0, lambda x: x, per_channel=False)


def normalised_channels(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """Scale and shift of an input that is normalised already, one weight a channel."""
    yield from _scale_and_shift(call, call.feature_axes or 1, lambda x: x, per_channel=True)
