"""Every layer of torch.nn through both readers: the recorded calls of its module, and the nodes of the graph alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.common_modules import module_db

import gradbatch
from gradbatch import UnsupportedLayer
from gradbatch.capture.direct import Captured
from tests.capture.by_nodes import assert_captured, assert_same, dense, read, watch, without_recorded_calls
from tests.capture.reference import draw, expected, wired
from tests.oracle import Gradients, projection
from tests.rules.case import Case
from tests.rules.cases import CASES

pytestmark = [
    # torch's own remarks on what it does inside.
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
    pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# The node does not say which ids are whose, so that it cannot count those of one sample.
COUNTING_BAGS = [
    case for case in CASES if case.name.startswith("EmbeddingBag") and "scale_grad_by_freq" in case.name
]

SAMPLES = 4

NODE_CALLS = {
    "EmbeddingBagBackward": "its rule reads the layer's arguments; the node keeps what depends on the mode instead",
    "RepeatBackward": "InstanceNorm and bias_k repeat a parameter for each sample: no sum of products, and small",
}
"""Operations that may be called once for each sample where no layer rule applies, with the reason."""


@every_case
def test_a_layer_with_a_rule_is_read_by_the_recorded_calls_of_its_module(
    case: Case, device: torch.device
) -> None:
    inputs, target = case.batch(SAMPLES, device)
    right = case.reference(inputs, target)
    model = gradbatch.extend(case.model(device))
    captured = read(model, projection(model(*inputs), target))
    assert {evaluation.reader for evaluation in captured.evaluations} <= {"module"}
    assert_captured(model, captured, right)
    assert_same(watch(model, lambda: projection(model(*inputs), target)), right)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in COUNTING_BAGS], ids=lambda case: case.name
)
def test_a_layer_with_a_rule_is_right_by_the_nodes_of_the_graph_alone(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_recorded_calls(monkeypatch)
    inputs, target = case.batch(SAMPLES, device)
    model = gradbatch.extend(case.model(device))
    losses = lambda: projection(model(*inputs), target)  # noqa: E731
    right = case.reference(inputs, target)
    captured = read(model, losses())
    check_readers(captured)
    assert_captured(model, captured, right)
    assert_same(watch(model, losses), right)


@pytest.mark.parametrize("case", COUNTING_BAGS, ids=lambda case: case.name)
def test_a_bag_that_counts_over_the_batch_is_refused_by_the_nodes_of_the_graph_alone(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_recorded_calls(monkeypatch)
    inputs, target = case.batch(SAMPLES, device)
    model = gradbatch.extend(case.model(device))
    losses = lambda: projection(model(*inputs), target)  # noqa: E731
    for run in (lambda: read(model, losses()), lambda: watch(model, losses)):
        with pytest.raises(UnsupportedLayer, match=r"layer \(EmbeddingBag\).*scale_grad_by_freq"):
            run()


def check_readers(captured: Captured) -> None:
    """Nodes have a rule, unless it stands above why they have none."""
    called = set()
    for evaluation in captured.evaluations:
        assert evaluation.reader in ("node", "node call")
        if evaluation.reader == "node call":
            called.add(evaluation.operation)
    assert called <= NODE_CALLS.keys()


# ---------------------------------------------------------------------- layers that have no rule

Forward = Callable[..., Tensor]


def first(self: nn.Module, x: Tensor) -> Tensor:
    return self.own(x)[0]


def memory(self: nn.Module, x: Tensor) -> Tensor:
    return self.own(x)[1]


def attend(other_sizes: bool, self: nn.Module, x: Tensor, weights: bool = False) -> Tensor:
    keys, values = (x[..., :3], x[..., :2]) if other_sizes else (x, x)
    return self.own(x, torch.tanh(keys), torch.sin(values), need_weights=weights)[0]


def attend_with_weights(other_sizes: bool, self: nn.Module, x: Tensor) -> Tensor:
    return attend(other_sizes, self, x, weights=True)


def itself(self: nn.Module, x: Tensor) -> Tensor:
    return self.own(x)


def in_two_parts(self: nn.Module, x: Tensor) -> Tensor:
    return self.own(x, torch.tanh(x))


def causal(self: nn.Module, x: Tensor) -> Tensor:
    return self.own(x, torch.full((5, 5), -torch.inf, dtype=x.dtype, device=x.device).triu(1))


def padded(self: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.tensor([5, 3, 1, 4], device=x.device)
    steps = torch.arange(5, device=x.device)
    return self.own(x, src_key_padding_mask=steps >= lengths.unsqueeze(1))


def with_labels(self: nn.Module, x: Tensor) -> Tensor:
    output = self.own(x, torch.tensor([0, 5, 9, 3], device=x.device))
    return output.output if isinstance(output, tuple) else output


def samples_first(forward: Forward) -> Forward:
    return forward


def steps_first(forward: Forward) -> Forward:
    return lambda self, x: forward(self, x.transpose(0, 1)).transpose(0, 1)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


class Untaught(NamedTuple):
    """A layer without a rule, built from what ``build`` returns, and the shape of one sample."""

    name: str
    build: Callable[[], nn.Module]
    shape: Sequence[int]
    forward: Forward = itself


def untaught() -> Iterator[Untaught]:
    yield Untaught("LSTMCell", partial(nn.LSTMCell, 3, 4), (3,), first)
    yield Untaught("LSTMCell, memory", partial(nn.LSTMCell, 3, 4), (3,), memory)
    yield from _losses_with_weights()
    yield from _parametrised()
    for batch_first in (True, False):
        yield from _attentions(batch_first)
        for norm_first in (True, False):
            yield from _transformers(batch_first, norm_first)
    layer = partial(nn.TransformerEncoderLayer, 4, 2, 6, 0.0, batch_first=True)
    for forward in (causal, padded):
        build = lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)  # noqa: E731
        yield Untaught(f"TransformerEncoder, {forward.__name__}", build, (5, 4), forward)


def _losses_with_weights() -> Iterator[Untaught]:
    adaptive = partial(nn.AdaptiveLogSoftmaxWithLoss, 6, 10, [3, 7], div_value=1.5, head_bias=True)
    yield Untaught("AdaptiveLogSoftmaxWithLoss", adaptive, (6,), with_labels)
    if hasattr(nn, "LinearCrossEntropyLoss"):  # not yet in torch 2.6
        for bias in (True, False):
            build = partial(nn.LinearCrossEntropyLoss, 6, 10, bias=bias, reduction="none")
            yield Untaught(f"LinearCrossEntropyLoss, bias={bias}", build, (6,), with_labels)


def _parametrised() -> Iterator[Untaught]:
    for change in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
        # In eval mode, as spectral_norm changes its vectors in every other forward.
        yield Untaught(change.__name__, lambda change=change: change(nn.Linear(4, 3)).eval(), (5, 4))
        convolution = lambda change=change: change(nn.Conv2d(2, 4, 3, groups=2)).eval()  # noqa: E731
        yield Untaught(f"{change.__name__}, convolution", convolution, (2, 5, 4))
    yield Untaught("a parametrisation of one's own", lambda: symmetric(nn.Linear(4, 4)), (4,))


def _attentions(batch_first: bool) -> Iterator[Untaught]:
    order = samples_first if batch_first else steps_first
    build = partial(nn.MultiheadAttention, 4, 2, batch_first=batch_first)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "no bias": {"bias": False},
        "bias_k and bias_v": {"add_bias_kv": True},
        "a zero in front": {"add_zero_attn": True},
        "keys of other sizes": {"kdim": 3, "vdim": 2},
    }
    for title, chosen in options.items():
        for forward in (attend, attend_with_weights):
            name = f"MultiheadAttention, {title}, {forward.__name__}, {order.__name__}"
            yield Untaught(name, partial(build, **chosen), (5, 4), order(partial(forward, "kdim" in chosen)))


def _transformers(batch_first: bool, norm_first: bool) -> Iterator[Untaught]:
    order = samples_first if batch_first else steps_first
    options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
    for build, forward in (
        (partial(nn.TransformerEncoderLayer, 4, 2, 6, **options), itself),
        (partial(nn.TransformerDecoderLayer, 4, 2, 6, **options), in_two_parts),
        (partial(nn.Transformer, 4, 2, 1, 1, 6, **options), in_two_parts),
    ):
        name = f"{build.func.__name__}, norm_first={norm_first}, {order.__name__}"
        yield Untaught(name, build, (5, 4), order(forward))


LAYERS = list(untaught())


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_a_layer_without_a_rule_is_right(layer: Untaught, device: torch.device) -> None:
    model = wired(layer.forward, own=layer.build()).to(device)
    x = draw(SAMPLES, *layer.shape).to(device)
    target = torch.randn_like(model(x))
    losses = lambda: projection(model(x), target)  # noqa: E731
    right = without_noise(expected(model, losses))
    captured = read(model, losses())
    called = {e.operation for e in captured.evaluations if e.reader == "node call"}
    assert called <= NODE_CALLS.keys()
    assert_same(without_noise(dense(model, captured)), right)
    assert_same(without_noise(watch(model, losses)), right)


def without_noise(gradients: Gradients) -> Gradients:
    """Rounding errors of gradients that are zero by arithmetic (the bias of keys) as the zeros that they stand for."""
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    return {
        name: torch.where(gradient.abs() > 1e-13 * largest, gradient, torch.zeros_like(gradient))
        for name, gradient in gradients.items()
    }


def test_no_layer_of_torch_is_left_out() -> None:
    with torch.random.fork_rng():
        tried = {type(case.build()) for case in CASES}
        tried |= {type(part) for layer in LAYERS for part in layer.build().modules()}
        known = {info.module_cls for info in module_db if has_parameters(info)}
    # Lazy layers turn into those that they stand for.
    left = {kind for kind in known - tried if not issubclass(kind, nn.modules.lazy.LazyModuleMixin)}
    assert not left, left


def has_parameters(info: Any) -> bool:
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.double, requires_grad=False, training=True
    )
    made = inputs[0].constructor_input
    return any(True for _ in info.module_cls(*made.args, **made.kwargs).parameters())
