"""The tables of the node reader against the running torch: its nodes, what they keep, and what if it has new names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils import parametrizations

import gradbatch
from gradbatch import SlowPathWarning, UnsupportedLayer
from gradbatch.capture import graph
from gradbatch.capture.readings import POINTWISE, READINGS, SHIFTS
from gradbatch.capture.shared import COMBINING, UNARY
from tests.capture.by_nodes import assert_captured, assert_same, read, watch, without_recorded_calls
from tests.capture.reading_examples import EVERY_EXAMPLE, EXAMPLES, Example
from tests.capture.reference import Losses, draw, expected, sum_of_squares
from tests.oracle import projection
from tests.rules.case import Case
from tests.rules.cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
    pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning"),
]


def assert_example(example: Example, kind: str, reader: str | None = "node") -> None:
    """Right both ways, and its nodes of a type are read as expected (``None``: in any way)."""
    model, x = example.model(), example.batch()
    losses = lambda: sum_of_squares(torch.sin(model(x)))  # noqa: E731
    right = expected(model, losses)
    captured = read(model, losses())
    readers = {evaluation.reader for evaluation in captured.evaluations if evaluation.operation == kind}
    assert readers and (reader is None or readers == {reader})
    assert_captured(model, captured, right)
    assert_same(watch(model, losses), right)


# Nodes that are made for some devices only, or not yet in every torch.
ELSEWHERE = {"CudnnBatchNormBackward", "FusedRmsNormBackward"}
# Of one operand: what these make of a parameter is shared by all samples, and taken through the region.
READ = {*READINGS, *POINTWISE, *SHIFTS} - UNARY - ELSEWHERE


def keeps(kind: str) -> set[str] | None:
    """What the nodes of a type keep in this torch, whether or not this machine makes any; ``None``: it has none."""
    types = {name: getattr(torch._C._functions, name) for name in dir(torch._C._functions)}
    names = [set(dir(found)) for name, found in types.items() if name.rstrip("0123456789") == kind]
    return {name for kept in names for name in kept if name.startswith("_saved_")} if names else None


def test_nodes_that_are_said_to_be_made_elsewhere_are_not_made_here() -> None:
    x, weight = draw(4, 3), draw(3).requires_grad_()
    with pytest.raises(NotImplementedError, match="cudnn_batch_norm"):
        torch.ops.aten.cudnn_batch_norm(x, weight, None, None, None, True, 0.1, 1e-5)
    assert graph.kind(graph.node_of(F.rms_norm(x, (3,), weight))) == "MulBackward"


@pytest.mark.parametrize("kind", sorted(READ))
def test_a_node_of_every_type_in_the_tables_is_read_by_its_rule(kind: str) -> None:
    for example in EVERY_EXAMPLE[kind]:
        assert_example(example, kind)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_an_operand_without_axes_is_right(shape: tuple[int, ...]) -> None:
    example = Example(lambda m, x: x.masked_fill(x > 0, m.w.sum()), (3,), {"w": shape})
    assert_example(example, "MaskedFillBackward", reader="node call")


@pytest.mark.parametrize(
    ("repeats", "shape"),
    [
        ((4, 1, 1), (1, 2, 3)),  # a repetition a sample
        ((4, 3, 1), (3,)),
        ((2, 1, 2), (2, 2, 3)),  # two samples a repetition
        ((1, 2, 1), (4, 1, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("samples", [4, 2, 1])
def test_a_repeated_parameter_is_read_wherever_the_samples_lie(
    repeats: tuple[int, ...], shape: tuple[int, ...], samples: int
) -> None:
    def repeated(m: Any, x: Tensor) -> Tensor:
        table = m.w.repeat(*repeats)
        return table.reshape(samples, -1).cumsum(1) * x

    assert_example(Example(repeated, (1,), {"w": shape}, samples=samples), "RepeatBackward")


def test_repetitions_that_are_scattered_over_the_samples_are_read() -> None:
    def repeated(m: Any, x: Tensor) -> Tensor:
        rows = m.w.repeat(6, 2)[torch.tensor([7, 2, 11, 0, 5, 5, 9, 4])]
        return rows.view(4, 2, -1) * x.view(4, 1, 1)

    assert_example(Example(repeated, (1,), {"w": (2, 3)}), "RepeatBackward")


def test_a_node_that_computes_one_sample_s_value_is_called_once() -> None:
    """A table of positions that is resized for each image is as quick as in the ordinary backward."""

    def resized(m: Any, x: Tensor) -> Tensor:
        tables = [F.interpolate(m.w, size=size, mode="bilinear").mean((2, 3)) for size in range(2, 6)]
        return torch.cat(tables) * x

    example = Example(resized, (3,), {"w": (1, 3, 4, 4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        assert_example(example, "UpsampleBilinear2DBackward")


@pytest.mark.parametrize("kind", sorted({*READINGS, *POINTWISE, *SHIFTS, *UNARY, *COMBINING} - ELSEWHERE))
def test_every_name_in_the_tables_is_that_of_a_node(kind: str) -> None:
    assert keeps(kind) is not None


def test_tables_have_an_example_for_each_of_their_lines() -> None:
    assert EVERY_EXAMPLE.keys() == READ
    for kind, examples in EXAMPLES.items():
        assert {example.reading for example in examples} == set(range(len(READINGS[kind])))


@pytest.mark.parametrize(
    ("kind", "number"),
    [(kind, number) for kind, several in EXAMPLES.items() for number in range(len(READINGS[kind]))],
)
def test_each_of_several_readings_is_the_one_that_reads_its_example(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READINGS, kind, (READINGS[kind][number],))
    for example in EXAMPLES[kind]:
        if example.reading == number:
            assert_example(example, kind)


# What the rules' calls are made of, by type of node.
ARGUMENTS: dict[str, str] = {
    "MmBackward": "self mat2",
    "AddmmBackward": "mat1 mat2 alpha beta",
    "BmmBackward": "self mat2",
    "BaddbmmBackward": "batch1 batch2 alpha beta",
    "MvBackward": "self",
    "ConvolutionBackward": "input weight stride padding dilation groups transposed",
    "EmbeddingBackward": "indices padding_idx scale_grad_by_freq",
    "IndexBackward": "indices",
    "IndexSelectBackward": "index dim",
    "NativeLayerNormBackward": "input normalized_shape result1 result2",
    "NativeGroupNormBackward": "input result1 result2",
    "NativeBatchNormBackward": "input result1 result2 running_mean running_var eps training",
    "TrilinearBackward": "i1 i3 expand1 expand2 expand3 sumdim",
    "AddmvBackward": "beta",
}
ATTRIBUTES = [(kind, name) for kind, names in ARGUMENTS.items() for name in names.split()]


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_is_read_of_a_node_is_there_and_nothing_else_is_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, saved = set(), graph.saved

    def noted(node: Node, name: str) -> Any:
        if graph.kind(node) == kind:
            found.add(name)
        return saved(node, name)

    monkeypatch.setattr(graph, "saved", noted)
    for example in EVERY_EXAMPLE[kind]:
        assert_example(example, kind)
    assert found == set(ARGUMENTS[kind].split())
    assert found <= {name.removeprefix("_saved_") for name in keeps(kind) or ()}


def stand_in(kind: str, values: dict[str, Any]) -> Any:
    """A node that keeps what ``values`` says under the names of another type of node, and nothing else."""
    kept = keeps(kind)
    assert kept is not None
    names = kept & {f"_saved_{name}" for name in values}
    return type(kind, (), {name: values[name.removeprefix("_saved_")] for name in names})()


def test_batch_norms_by_cudnn_are_read_like_those_of_torch_itself() -> None:
    (reading,) = READINGS["CudnnBatchNormBackward"]
    (right,) = READINGS["NativeBatchNormBackward"]
    x, mean, variance, weight = draw(4, 3, 5), draw(3), draw(3).square(), draw(3).requires_grad_()
    for training in (True, False):
        node = F.batch_norm(x, mean, variance, weight, None, training, eps=0.5).grad_fn
        values = {name: graph.saved(node, name) for name in graph.saved_names(node)}
        node_there = stand_in("CudnnBatchNormBackward", {**values, "epsilon": 0.5})
        torch.testing.assert_close(reading.arguments(node_there), right.arguments(node))


def test_fused_norms_by_the_root_of_the_mean_square_are_read_as_what_they_compute() -> None:
    (reading,) = READINGS["FusedRmsNormBackward"]
    x, weight = draw(4, 5, 3), draw(3).requires_grad_()
    if keeps("FusedRmsNormBackward") is None:
        return  # not yet in torch 2.6
    scale = (x.square().mean(2, keepdim=True) + 0.1).rsqrt()
    values = {"input": x, "result1": scale, "normalized_shape": (3,), "weight": weight}
    node_there = stand_in("FusedRmsNormBackward", values)
    normalised = F.rms_norm(x, (3,), eps=0.1)
    torch.testing.assert_close(reading.arguments(node_there)["input"], normalised)
    settings = SimpleNamespace(**reading.settings(node_there))
    assert reading.features(settings, 3) == 1


# ---------------------------------------------------------------------- another torch, with other names


def hide(monkeypatch: pytest.MonkeyPatch, is_hidden: Callable[[Node, str], bool]) -> None:
    """Let nodes keep what they keep under names that gradbatch does not know."""
    saved, saved_names = graph.saved, graph.saved_names

    def hidden(node: Node, name: str) -> Any:
        if is_hidden(node, name):
            raise AttributeError(f"_saved_{name}")
        return saved(node, name)

    def shown(node: Node) -> list[str]:
        return [name for name in saved_names(node) if not is_hidden(node, name)]

    monkeypatch.setattr(graph, "saved", hidden)
    monkeypatch.setattr(graph, "saved_names", shown)


# Flags that say whether the samples are independent. Where they cannot be seen, the use is refused.
GUARDS = {
    "NativeBatchNormBackward": "training",
    "EmbeddingBackward": "scale_grad_by_freq",
    "EmbeddingBagBackward": "scale_grad_by_freq",
}


def assert_refused_for(flag: str, model: nn.Module, losses: Losses) -> None:
    for run in (read, lambda model, _: watch(model, losses)):
        with pytest.raises(UnsupportedLayer, match=flag):
            run(model, losses())


@pytest.mark.parametrize(("kind", "name"), ATTRIBUTES)
def test_one_name_that_is_missing_changes_no_result(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, lambda node, asked: graph.kind(node) == kind and asked == name)
    for example in EVERY_EXAMPLE[kind]:
        if GUARDS.get(kind) == name and example.samples > 1:
            model, x = example.model(), example.batch()
            assert_refused_for(name, model, lambda model=model, x=x: sum_of_squares(model(x)))
        else:
            assert_example(example, kind, reader=None)


GUARDED = {"BatchNorm": "training", "Embedding": "scale_grad_by_freq"}
"""The flags of cases, by what the name of the layer begins with."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_torch_that_shows_nothing_changes_no_result(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_recorded_calls(monkeypatch)
    hide(monkeypatch, lambda node, name: True)
    inputs, target = case.batch(4, device)
    right = case.reference(inputs, target)
    model = gradbatch.extend(case.model(device))
    losses = lambda: projection(model(*inputs), target)  # noqa: E731
    flags = [flag for start, flag in GUARDED.items() if case.name.startswith(start)]
    if flags and case.name != "Embedding, no ids":
        assert_refused_for(flags[0], model, losses)
        return
    assert_captured(model, read(model, losses()), right)
    assert_same(watch(model, losses), right)


@pytest.mark.parametrize("kind", sorted(ARGUMENTS.keys() - GUARDS.keys()))
def test_a_torch_that_shows_nothing_is_said_to_be_slow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, lambda node, name: graph.kind(node) == kind)
    example = EVERY_EXAMPLE[kind][0]
    model, x = example.model(), example.batch()
    with pytest.warns(SlowPathWarning, match=f"{kind} has no rule"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(x)))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, norm_first=True, bias=False),
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.GroupNorm(1, 5), nn.Conv1d(5, 2, 2), nn.PReLU()),
    ],
    ids=["transformer", "weight_norm", "network"],
)
def test_a_torch_that_shows_nothing_of_whole_models_changes_no_result(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_recorded_calls(monkeypatch)
    hide(monkeypatch, lambda node, name: True)
    model, x = gradbatch.extend(build().double()), draw(4, 5, 4)
    losses = lambda: torch.sin(model(x)).flatten(1).sum(1)  # noqa: E731
    right = expected(model, losses)
    assert_captured(model, read(model, losses()), right)
    assert_same(watch(model, losses), right)
