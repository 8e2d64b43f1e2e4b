"""Embedding tables: the gradient of a sample touches only the rows that the sample looked up."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradbatch.errors import UnsupportedLayer
from gradbatch.factors import PerSampleGrad, RowScatter
from gradbatch.factors.views import reshaped
from gradbatch.rules.axes import by_position, full
from gradbatch.rules.call import Call, RowLayout
from gradbatch.rules.registry import layer_rule

# RowScatter's id of a row that does not exist.
NO_ROW = -1


def occurrences(ids: Tensor) -> Tensor:
    """How often each id occurs in its own sample, ``[N, T]``.

    Args:
        ids: ``[N, T]``.
    """
    span = int(ids.max()) + 2 if ids.numel() else 1
    keys = torch.arange(len(ids), device=ids.device).unsqueeze(1) * span + (ids + 1)
    _, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    each: Tensor = counts[inverse]
    return each


@layer_rule(nn.Embedding, feature_axes=1, reads=())
def embedding(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """One row of the output gradient for each looked-up id.

    With ``scale_grad_by_freq`` an id's gradient is divided by how often it occurs in its own sample, as it is when
    that sample is a batch of its own; so the sum over samples is not the batch's gradient, which divides by how often
    it occurs in the batch.
    """
    if "weight" not in call.needs:
        return
    module = call.module
    ids = by_position(call.input, 0).long()
    values = by_position(call.grad_output, 1)
    if module.scale_grad_by_freq:
        if isinstance(call.layout, RowLayout):
            raise UnsupportedLayer(
                "scale_grad_by_freq counts how often a sample looks an id up, but where the samples lie irregularly, "
                "lookups without a gradient have no owner. Set scale_grad_by_freq=False, or keep the samples on an axis"
            )
        values = full(values) / occurrences(ids).unsqueeze(-1)
    if module.padding_idx is not None:
        ids = ids.masked_fill(ids == module.padding_idx, NO_ROW)
    yield "weight", RowScatter(ids, values, module.weight.shape)


def indexed_rows(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """``table[ids]``: one row of the output gradient for each id, which is not negative."""
    shape = call.module.weight.shape
    ids = by_position(call.input, 0).long()
    width = math.prod(shape[1:])
    values = by_position(call.grad_output, len(shape) - 1).reshape(*ids.shape, width)
    yield "weight", reshaped(RowScatter(ids, values, (shape[0], width)), shape)


def pad_bags(
    input: Tensor, offsets: Tensor | None, weights: Tensor | None, bags: int
) -> tuple[Tensor, Tensor | None]:
    """Bring bags of ids to one length: ids ``[bags, longest]`` filled with :data:`NO_ROW`, weights with 0.

    Args:
        input: ids ``[bags, length]``, or ``[ids]`` with the start of each bag in ``offsets``.
        offsets: ``[bags]``, or ``[bags + 1]`` with the end of the last one.
        weights: one for each id, or ``None``.
        bags: number of bags.
    """
    if input.dim() == 2:
        return input.long(), weights
    assert offsets is not None  # torch itself refuses one-dimensional ids without offsets
    if len(offsets) > bags and int(offsets[-1]) != len(input):
        raise UnsupportedLayer(
            f"the last offset is {int(offsets[-1])}, but there are {len(input)} ids; with include_last_offset=True it "
            "has to be their number (torch's kernels disagree about the ids behind it)"
        )
    starts = offsets.long()[:bags]
    ends = offsets.long()[bags:] if len(offsets) > bags else starts.new_tensor([len(input)])
    lengths = torch.diff(starts, append=ends[:1])
    longest = int(lengths.max()) if bags else 0
    place = torch.arange(longest, device=input.device)
    inside = place < lengths.unsqueeze(1)
    index = (starts.unsqueeze(1) + place).masked_fill(~inside, 0)
    if len(input) == 0:
        return input.new_full((bags, longest), NO_ROW, dtype=torch.long), None
    ids = input.long()[index].masked_fill(~inside, NO_ROW)
    return ids, None if weights is None else weights[index].masked_fill(~inside, 0)


# Only the maximum is looked for again in the weight, which max_norm changes in every forward.
@layer_rule(nn.EmbeddingBag, feature_axes=1, reads=lambda module: ("weight",) if module.mode == "max" else ())
def embedding_bag(call: Call) -> Iterator[tuple[str, PerSampleGrad]]:
    """The bag's output gradient for each of its ids, weighted, averaged, or where the id is the maximum."""
    if "weight" not in call.needs:
        return
    module, arguments = call.module, call.arguments
    bags = call.raw_grad_output.shape[0]
    ids, weights = pad_bags(arguments["input"], arguments["offsets"], arguments["per_sample_weights"], bags)
    if module.padding_idx is not None:
        ids = ids.masked_fill(ids == module.padding_idx, NO_ROW)
    present = ids.ne(NO_ROW)
    values = full(call.raw_grad_output).unsqueeze(1).expand(-1, ids.shape[1], -1)
    if module.mode == "mean":
        values = values / present.sum(1).clamp_min(1).view(-1, 1, 1)
    elif module.mode == "max" and ids.shape[1]:
        # The forward keeps which id was largest to itself, so find it again; ties go to the first, as there.
        rows = module.weight.detach()[ids.clamp_min(0)].masked_fill(~present.unsqueeze(-1), -torch.inf)
        largest = rows.argmax(1, keepdim=True)
        place = torch.arange(ids.shape[1], device=ids.device).view(1, -1, 1)
        values = values.masked_fill(place != largest, 0)
    elif weights is not None:
        values = values * weights.unsqueeze(-1)
    ids, values = by_position(call.sample_first(ids), 0), by_position(call.sample_first(values), 1)
    if module.scale_grad_by_freq:
        values = values / occurrences(ids).unsqueeze(-1)
    yield "weight", RowScatter(ids, values, module.weight.shape)
