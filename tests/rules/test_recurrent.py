"""Recurrent layers by their rule alone, against one backward pass of torch's own layer for each sample."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from gradbatch.factors import Dense, OuterProduct, PerSampleGrad
from gradbatch.rules import Call, LayerRule, SampleLayout, rule_for, why_no_rule
from gradbatch.rules.recurrent import arrange, declines
from tests.oracle import assert_right

FEATURES, HIDDEN, STEPS, SEQUENCES = 5, 4, 4, 3
TOLERANCE = 1e-12

Outputs = list[Tensor]


@dataclass(frozen=True)
class Case:
    """A recurrent layer with some options, and what it is called with.

    Args:
        name: for test ids.
        kind: type of the layer.
        options: further arguments of its constructor.
        lengths: of packed sequences; ``None`` for a plain batch.
        initial: whether initial states are given.
        used: numbers of the floating point outputs that have a gradient; ``None`` for all.
    """

    name: str
    kind: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None
    initial: bool = False
    used: tuple[int, ...] | None = None

    def build(self, device: torch.device) -> Any:
        return self.kind(FEATURES, HIDDEN, **self.options).to(device, torch.double)

    def arguments(self, module: Any, sequences: int = SEQUENCES) -> dict[str, Any]:
        like = module.weight_ih if self.is_cell else module.weight_ih_l0
        batch = (sequences,) if self.is_cell else (sequences, STEPS)
        input: Any = like.new_empty(*batch, FEATURES).normal_()
        if self.lengths is not None:
            ordered = list(self.lengths) == sorted(self.lengths, reverse=True)
            input = pack_padded_sequence(input, self.lengths, batch_first=True, enforce_sorted=ordered)
        elif not self.is_cell and not module.batch_first:
            input = input.transpose(0, 1)
        return {"input": input, "hx": self.states(module, like, sequences) if self.initial else None}

    def states(self, module: Any, like: Tensor, sequences: int) -> Any:
        rows = () if self.is_cell else (module.num_layers * (1 + module.bidirectional),)
        hidden = like.new_empty(*rows, sequences, self.options.get("proj_size", 0) or HIDDEN).normal_()
        if self.kind is not nn.LSTM:
            return hidden
        return hidden, like.new_empty(*rows, sequences, HIDDEN).normal_()

    @property
    def is_cell(self) -> bool:
        return issubclass(self.kind, nn.RNNCellBase)


LAYERS, CELLS = (nn.RNN, nn.LSTM, nn.GRU), (nn.RNNCell, nn.GRUCell)
EVERYTHING: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
PACKINGS = {"plain": None, "sorted": (4, 3, 1), "unsorted": (2, 4, 1), "equally long": (4, 4, 4)}


def flavours(kind: type[nn.Module]) -> Iterator[dict[str, Any]]:
    """Options that every packing, and a call with and without initial states, is tried with."""
    yield {}
    yield {"batch_first": True}
    yield EVERYTHING
    if kind is nn.LSTM:
        yield {**EVERYTHING, "proj_size": 3}
    if kind is nn.RNN:
        yield {**EVERYTHING, "nonlinearity": "relu"}


def layer_cases(kind: type[nn.Module]) -> Iterator[Case]:
    for packing, lengths in PACKINGS.items():
        for options in flavours(kind):
            name = ", ".join([kind.__name__, *options, packing])
            yield Case(name, kind, options, lengths)
            yield Case(f"{name}, initial", kind, options, lengths, initial=True)
        for used in ((), (0,), (1,), (2,))[: 4 if kind is nn.LSTM else 3]:
            name = f"{kind.__name__}, {packing}, gradient of {used}"
            yield Case(name, kind, EVERYTHING, lengths, used=used)
    for options in ({"bias": False}, {"bias": False, **EVERYTHING}, {"num_layers": 3}):
        yield Case(", ".join([kind.__name__, *options]), kind, options)


def cell_cases() -> Iterator[Case]:
    for kind in CELLS:
        for options in ({}, {"bias": False}):
            yield Case(", ".join([kind.__name__, *options]), kind, options)
            yield Case(", ".join([kind.__name__, *options, "initial"]), kind, options, initial=True)
    yield Case("RNNCell, relu, initial", nn.RNNCell, {"nonlinearity": "relu"}, initial=True)


CASES = [*(case for kind in LAYERS for case in layer_cases(kind)), *cell_cases()]
# The richest of each kind, for promises that hold whatever the options.
RICHEST = [
    Case(f"{kind.__name__}, {options}, {lengths}", kind, options, lengths, initial=True)
    for kind in (*LAYERS, *CELLS)
    for options in ([{}] if kind in CELLS else list(flavours(kind))[2:])
    for lengths in ([None] if kind in CELLS else [None, (2, 4, 1)])
]

richest = pytest.mark.parametrize("case", RICHEST, ids=lambda case: case.name)
richest_layers = pytest.mark.parametrize(
    "case", [case for case in RICHEST if not case.is_cell], ids=lambda case: case.name
)


# ---------------------------------------------------------------------- the call, and torch's own gradients


def flat(value: Any) -> Outputs:
    """Tensors of nested tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value or () for tensor in flat(part)]


def run(module: Any, arguments: Mapping[str, Any]) -> Outputs:
    return flat(module(**arguments))


def taught(module: Any) -> LayerRule:
    rule = rule_for(module)
    assert rule is not None
    return rule


def gradients(outputs: Outputs, used: tuple[int, ...] | None) -> Outputs:
    """Random output gradients; zeros for outputs that are not used or not numbers."""
    floating = [i for i, output in enumerate(outputs) if output.is_floating_point()]
    wanted = floating if used is None else [floating[number] for number in used]
    draw = {True: torch.randn_like, False: torch.zeros_like}
    return [draw[i in wanted](output) for i, output in enumerate(outputs)]


def drawn(case: Case, device: torch.device) -> tuple[Any, dict[str, Any], Outputs]:
    """A layer, arguments for it, and gradients of its outputs."""
    module = case.build(device)
    arguments = case.arguments(module)
    return module, arguments, gradients(run(module, arguments), case.used)


def call(module: Any, arguments: Mapping[str, Any], grads: Outputs, layout: SampleLayout) -> Call:
    arranged = tuple(arrange(module, arguments, i, grad) for i, grad in enumerate(grads))
    return Call(
        module=module,
        name="layer",
        args=(),
        kwargs=arguments,
        arguments=arguments,
        raw_grad_output=arranged if len(arranged) > 1 else arranged[0],
        layout=layout,
        feature_axes=taught(module).count_feature_axes(module, arranged[0].dim()),
        training=module.training,
        needs=frozenset(name for name, p in module.named_parameters() if p.requires_grad),
    )


def found(module: Any, arguments: Mapping[str, Any], grads: Outputs, layout: Any) -> dict[str, PerSampleGrad]:
    with torch.no_grad():
        pairs = list(taught(module).function(call(module, arguments, grads, layout)))
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def owners(case: Case, module: Any, arguments: Mapping[str, Any], outputs: Outputs) -> Outputs:
    """Number of the sequence that each element of the outputs belongs to, by torch's own packing."""
    sequences = torch.arange(outputs[-1].shape[0 if case.is_cell else 1], device=outputs[0].device)
    states = sequences.unsqueeze(1)
    first = states if case.is_cell else states.expand(-1, STEPS).unsqueeze(-1)
    if case.lengths is not None:
        first = pack_padded_sequence(first, case.lengths, batch_first=True, enforce_sorted=False).data
    elif not (case.is_cell or module.batch_first):
        first = first.transpose(0, 1)
    return [first, *(states for _ in outputs[1:])]


def one_by_one(
    case: Case, module: Any, arguments: Mapping[str, Any], grads: Outputs, layout: SampleLayout
) -> dict[str, Tensor]:
    """Per-sample gradients by one backward pass of torch's own layer for each sample."""
    outputs = run(module, arguments)
    belongs = owners(case, module, arguments, outputs)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    used = [i for i, output in enumerate(outputs) if output.requires_grad]
    sequence_owner = layout.owner(int(belongs[-1].max()) + 1).to(belongs[0].device)
    rows = []
    for sample in range(layout.samples):
        masked = [grads[i] * (sequence_owner[belongs[i]] == sample) for i in used]
        wanted = [outputs[i] for i in used]
        rows.append(torch.autograd.grad(wanted, [*parameters.values()], masked, retain_graph=True))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(parameters)}


def check(case: Case, module: Any, layout: SampleLayout, sequences: int = SEQUENCES) -> None:
    arguments = case.arguments(module, sequences)
    grads = gradients(run(module, arguments), case.used)
    actual = found(module, arguments, grads, layout)
    expected = one_by_one(case, module, arguments, grads, layout)
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        assert_right(grad.dense(), expected[name], TOLERANCE, name)


# ---------------------------------------------------------------------- promises


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_one_backward_pass_a_sample(case: Case, device: torch.device) -> None:
    check(case, case.build(device), SampleLayout(SEQUENCES))


@richest
@pytest.mark.parametrize("layout", [SampleLayout(2, 0, 2), SampleLayout(2, 0, 1)], ids=["rows", "mixed"])
def test_a_sample_may_own_several_sequences(case: Case, layout: SampleLayout, device: torch.device) -> None:
    lengths = None if case.lengths is None else (*case.lengths, case.lengths[-1])
    check(replace(case, lengths=lengths), case.build(device), layout, 2 * layout.samples)


@richest
def test_weights_have_outer_products_and_biases_nothing_to_factor(case: Case, device: torch.device) -> None:
    module, arguments, grads = drawn(case, device)
    for name, grad in found(module, arguments, grads, SampleLayout(SEQUENCES)).items():
        assert type(grad) is (OuterProduct if name.startswith("weight") else Dense), name
        if isinstance(grad, OuterProduct):
            assert grad.left.shape[3] == (1 if case.is_cell else STEPS), "one position a time step"


@richest
def test_the_sum_over_samples_is_the_gradient_of_the_batch(case: Case, device: torch.device) -> None:
    module, arguments, grads = drawn(case, device)
    outputs = run(module, arguments)
    actual = found(module, arguments, grads, SampleLayout(SEQUENCES))
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    expected = torch.autograd.grad([o for o, _ in pairs], [*module.parameters()], [g for _, g in pairs])
    for (name, _), gradient in zip(module.named_parameters(), expected, strict=True):
        assert_right(actual[name].sum(), gradient, TOLERANCE, name)


@richest
def test_all_samples_and_steps_share_one_backward_pass(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, arguments, grads = drawn(case, device)
    passes = []
    backward = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: passes.append(args) or backward(*args))
    found(module, arguments, grads, SampleLayout(SEQUENCES))
    assert len(passes) == 1
    assert all(parameter.grad is None for parameter in module.parameters())


@richest_layers
@pytest.mark.parametrize("trained", ["l0", "l0_reverse", "l1", "weight_hh", "bias_ih_l0"])
def test_only_what_is_trained_is_yielded(case: Case, trained: str, device: torch.device) -> None:
    module = case.build(device)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(trained) or name.endswith(trained))
    check(case, module, SampleLayout(SEQUENCES))


@richest_layers
def test_outputs_are_arranged_as_if_each_sequence_were_alone(case: Case, device: torch.device) -> None:
    module = case.build(device)
    arguments = case.arguments(module)
    arranged = [arrange(module, arguments, i, output) for i, output in enumerate(run(module, arguments))]
    input = arguments["input"]
    if case.lengths is not None:
        input, _ = pad_packed_sequence(input)
    for n, length in enumerate(case.lengths or [STEPS] * SEQUENCES):
        states = tuple(state[:, n : n + 1].contiguous() for state in flat(arguments["hx"]))
        alone = run(module, {"input": input[:length, n : n + 1], "hx": states if states[1:] else states[0]})
        whole = [output[n : n + 1] for output in arranged if output.is_floating_point()]
        assert not whole[0][:, length:].any(), "zeros beyond the end"
        whole[0] = whole[0][:, :length]
        for part, expected in zip(whole, alone, strict=True):
            assert_right(part, expected.transpose(0, 1), TOLERANCE)
    integers = [i for i, output in enumerate(arranged) if not output.is_floating_point()]
    assert all(torch.equal(arranged[i], run(module, arguments)[i]) for i in integers)


@pytest.mark.parametrize("layout", [SampleLayout(1), SampleLayout(1, None)], ids=["axis 0", "no axis"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_a_single_sample_needs_no_batch_axis(
    kind: Any, initial: bool, layout: SampleLayout, device: torch.device
) -> None:
    case = Case("unbatched", kind, {} if kind in CELLS else EVERYTHING, initial=initial)
    module = case.build(device)
    batched = case.arguments(module, 1)
    axis = 0 if case.is_cell else 1
    states = tuple(state.squeeze(axis) for state in flat(batched["hx"]))
    single = {"input": batched["input"].squeeze(axis), "hx": states if states[1:] else (*states, None)[0]}
    outputs = run(module, single)
    grads = gradients(outputs, None)
    actual = found(module, single, grads, layout)
    expected = torch.autograd.grad(outputs, [*module.parameters()], grads)
    for (name, _), gradient in zip(module.named_parameters(), expected, strict=True):
        assert_right(actual[name].dense(), gradient.unsqueeze(0), TOLERANCE, name)


@richest
def test_half_precision_is_replayed_in_single(case: Case, device: torch.device) -> None:
    halves = case.build(device).to(torch.bfloat16)
    module = copy.deepcopy(halves).double()
    arguments = rounded(case.arguments(module))
    grads = rounded(gradients(run(module, arguments), None))
    exact = found(module, arguments, grads, SampleLayout(SEQUENCES))
    low = rounded(arguments, torch.bfloat16), rounded(grads, torch.bfloat16)
    for name, grad in found(halves, *low, SampleLayout(SEQUENCES)).items():
        assert grad.dtype == torch.float32
        assert_right(grad.dense(), exact[name].dense(), 1e-5, name)


def rounded(value: Any, dtype: torch.dtype = torch.double) -> Any:
    """Anything that holds tensors, with numbers that bfloat16 has, in a given dtype."""
    if isinstance(value, dict):
        return {name: rounded(part, dtype) for name, part in value.items()}
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_floating_point()):
        return value.to(torch.bfloat16).to(dtype)
    return value if isinstance(value, Tensor) else type(value)(rounded(part, dtype) for part in value)


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_between_layers_is_declined_while_it_drops(kind: Any) -> None:
    module = kind(FEATURES, HIDDEN, num_layers=2, dropout=0.5)
    assert taught(module.eval()).declines is declines
    assert rule_for(module.train()) is None
    assert "dropout between its layers" in why_no_rule(module)
    assert "dropout between its layers" in (declines(module) or "")
    assert declines(module.eval()) is None
    assert declines(kind(FEATURES, HIDDEN, num_layers=2)) is None
    assert all(declines(cell(FEATURES, HIDDEN)) is None for cell in CELLS)
