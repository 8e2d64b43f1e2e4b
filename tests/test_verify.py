"""Verify finds what is wrong, says what is refused, and leaves the model as it was."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import UsageError, VerificationError
from gradbatch.capture.hooks import recorder_of
from gradbatch.rules.convolution import convolution
from gradbatch.verify import ParameterReport, Report, verify


def doubles(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=torch.double, device=device)


def network() -> nn.Sequential:
    """A grouped and a depthwise convolution; the first bias has no gradient but rounding."""
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2),
        nn.GroupNorm(6, 6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).double()


class GroupForgotten(nn.Conv2d):
    """A convolution whose rule doubles the weight gradient of the second half of the output channels."""


@gradbatch.layer_rule(GroupForgotten, feature_axes=3)
def group_forgotten(call: gradbatch.Call) -> Iterator[tuple[str, gradbatch.PerSampleGrad]]:
    for name, grad in convolution(call):
        wrong = grad.dense().clone()
        wrong[:, wrong.shape[1] // 2 :] *= 2 if name == "weight" else 1
        yield name, gradbatch.Dense(wrong)


def by_name(report: Report) -> dict[str, ParameterReport]:
    return {parameter.name: parameter for parameter in report.parameters}


def test_a_right_model_agrees_and_the_report_says_how_each_parameter_is_evaluated(
    device: torch.device,
) -> None:
    report = verify(network().to(device), doubles(3, 4, 8, 8, device=device))
    report.raise_for_mismatch()
    assert report.ok and not report.refusals and not report.mismatches
    assert (report.reference, report.fallback, report.samples) == ("torch.func.vmap", "", 3)
    assert (report.dtype, report.device.type, report.tolerance) == (torch.double, device.type, 1e-10)
    rows = by_name(report)
    assert {name: (row.rule, row.structure) for name, row in rows.items()} == {
        "0.weight": ("convolution", "OuterProduct"),
        "0.bias": ("convolution", "Dense"),
        "1.weight": ("group_norm", "Dense"),
        "1.bias": ("group_norm", "Dense"),
        "3.weight": ("convolution", "OuterProduct"),
        "3.bias": ("convolution", "Dense"),
        "5.weight": ("linear", "OuterProduct"),
        "5.bias": ("linear", "Dense"),
    }
    for row in rows.values():
        assert row.error is not None and row.error < 1e-12 and row.refusal is None
        assert (row.reader, row.layout) == ("module", "axis 0")
    convolved, affine = rows["3.weight"], rows["1.weight"]
    assert convolved.norms is not None and convolved.norms.operation == "squared_norm"
    assert convolved.gradients is not None and convolved.gradients.operation == "dense"
    assert (convolved.flops, convolved.bytes) == (convolved.norms.flops, convolved.norms.bytes)
    # Six numbers of eight bytes for each of three samples, squared and added up.
    assert (affine.norms, affine.flops, affine.bytes) == (None, 2 * 18, 8 * 18)
    lines = str(report).splitlines()
    assert "8 parameters agree with torch.func.vmap within 1e-10" in lines[0]
    assert (
        " ".join(lines[2].split()) == "parameter shape reader rule samples gradient norms FLOP memory error"
    )
    assert lines[7].split()[:4] == ["3.weight", "6x1x3x3", "module", "convolution"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_agrees_in_lower_precision(dtype: torch.dtype) -> None:
    report = verify(network().to(dtype), torch.randn(3, 4, 8, 8, dtype=dtype))
    assert report.ok and report.dtype == dtype, str(report)


def test_a_wrong_rule_is_found_and_drawn() -> None:
    model = nn.Sequential(GroupForgotten(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 2)).double()
    report = verify(model, doubles(3, 4, 4, 4))
    assert not report.ok and not report.refusals and list(report.mismatches) == ["0.weight"]
    wrong, *right = report.parameters
    assert (wrong.error or 0) > 0.1 and all((r.error or 0) < 1e-12 and not r.map for r in right)
    assert "1 of 4 parameters differs from torch.func.vmap by more than 1e-10" in report.headline()
    with pytest.raises(
        VerificationError, match=r"0\.weight\n.* in 3 of 3 samples and 1 of 2 groups"
    ) as raised:
        report.raise_for_mismatch()
    assert "samples x groups" in str(raised.value) and "kernel [3, 3]" in str(raised.value)
    assert str(raised.value).partition("\n\n")[2] in str(report)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.RReLU(), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(3, 4), Branch(), nn.Linear(4, 2)),
    ],
    ids=["dropout", "rrelu", "data-dependent branch"],
)
def test_where_vmap_cannot_run_each_sample_has_a_backward_of_the_batch(make: Any) -> None:
    report = verify(make().double(), doubles(4, 3))
    assert report.ok and report.reference == "one backward pass a sample", str(report)
    assert report.fallback and "No torch.func.vmap: it cannot run this model" in str(report)


class Branch(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.tanh() if bool(input.sum() > 0) else input.sin()


class TimesRows(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * len(input)


def test_where_vmap_computes_something_else_it_is_not_believed() -> None:
    report = verify(nn.Sequential(nn.Linear(3, 4), TimesRows()).double(), doubles(4, 3))
    assert report.ok and report.reference == "one backward pass a sample"
    assert "something else than on the batch" in report.fallback


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["tensor first", "number first"])
def test_outputs_may_be_nested_and_none_is_left_out(order: tuple[int, int]) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), GroupForgotten(1, 4, 1)

        def forward(self, input: Tensor) -> dict[str, Any]:
            parts = [(self.a(input), input.argmax(1)), {"b": self.b(input[:, None, None])}]
            return {"steps": 3, "parts": [parts[i] for i in order]}

    report = verify(Nested().double(), doubles(4, 3))
    assert list(report.mismatches) == ["b.weight"] and by_name(report)["a.weight"].error is not None


@dataclass
class Answer:
    hidden: Tensor
    rows: int
    pooled: Tensor


@pytest.mark.parametrize("kind", [dict, Answer])
def test_outputs_may_be_computed_from_each_other(kind: Any) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.pooler = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, *, values: Tensor, mask: Tensor) -> Any:
            hidden = self.encoder(values) * mask
            return kind(hidden=hidden, rows=len(hidden), pooled=self.pooler(hidden.tanh()))

    inputs = {"values": doubles(4, 3), "mask": torch.randint(2, (4, 1))}
    report = verify(Pooled().double(), inputs)
    assert report.ok and report.reference == "torch.func.vmap" and len(report.parameters) == 4


def test_where_the_model_computes_in_less_than_its_parameters_no_more_is_asked_for() -> None:
    class Half(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input.float().exp().double()

    report = verify(nn.Sequential(nn.Linear(3, 4), Half(), nn.Linear(4, 2)).double(), doubles(4, 3))
    assert report.ok and (report.dtype, report.coarsest) == (torch.double, torch.float32)
    assert report.tolerance == 1e-4 and "computes in float32 between its float64 parameters" in str(report)
    inner = verify(nn.Sequential(nn.Linear(3, 4), Half()).double(), doubles(4, 3), tolerance=1e-7)
    assert inner.tolerance == 1e-7


def test_inputs_are_positional_or_by_name_and_may_lack_a_batch_axis() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor, positions: Tensor, scale: float = 1.0) -> Tensor:
            return scale * self.linear(self.embedding(ids)) * positions

    model, ids, positions = Positions().double(), torch.randint(9, (3, 5)), doubles(5, 4)
    for inputs in (
        (ids, positions, 2.0),
        [ids, positions],
        {"positions": positions, "ids": ids, "scale": 0.5},
    ):
        report = verify(model, inputs)
        assert report.ok and report.reference == "torch.func.vmap"
    assert verify(model, (ids[:, :3], positions[:3])).ok, "as many positions as samples"


def test_samples_lie_where_extend_says() -> None:
    model = gradbatch.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), batch_dim=1).double()
    report = verify(model, doubles(7, 5, 3))
    assert report.ok and report.samples == 5 and report.reference == "torch.func.vmap"


def test_a_loss_may_use_targets_of_the_whole_batch() -> None:
    target = torch.tensor([0, 3, 1, 4])
    report = verify(
        network(), doubles(4, 4, 8, 8), loss=lambda output: F.cross_entropy(output, target, reduction="none")
    )
    assert report.ok and report.reference == "torch.func.vmap"


def test_a_loss_may_use_the_model_beyond_its_output() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    report = verify(model, doubles(4, 3), loss=lambda output: model[0](output).square().sum(1))
    assert report.ok and report.reference == "one backward pass a sample"


@pytest.mark.parametrize("samples", [0, 1])
def test_an_empty_batch_and_a_single_sample(samples: int) -> None:
    report = verify(network(), doubles(samples, 4, 8, 8))
    assert report.ok and report.samples == samples


def test_a_sample_that_is_not_finite_agrees_with_itself() -> None:
    inputs = doubles(4, 4, 8, 8)
    inputs[1, 0, 0, 0] = float("nan")
    assert verify(network(), inputs).ok


def test_only_wanted_and_trainable_parameters_are_checked() -> None:
    model = network()
    model[5].bias.requires_grad_(False)
    report = verify(model, doubles(2, 4, 8, 8), parameters=["3.*", "5.weight"])
    assert report.ok and list(by_name(report)) == ["3.weight", "3.bias", "5.weight"]


def test_tied_layers_are_one_parameter_with_two_uses_under_the_first_name_and_found_by_every_name() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second).double()
    for patterns in (None, "0.weight", "2.weight"):
        report = verify(model, doubles(3, 4), parameters=patterns)
        row = by_name(report)["0.weight"]
        assert report.ok and (row.rule, len(row.uses)) == ("linear x2", 2)


class Restless(nn.Module):
    """Changes its buffers, one in place and one by assignment, its mode and a weight (by ``max_norm``)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, max_norm=0.1)
        self.dropout, self.norm = nn.Dropout(), nn.BatchNorm1d(4, affine=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4, dtype=torch.double))
        self.linear = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(self.embedding(ids))
        self.last = h.detach().mean(0)
        self.norm(h.detach())
        self.norm.eval()
        output: Tensor = self.linear(h)
        return output


@pytest.mark.parametrize("extended", [False, True])
def test_the_model_is_left_as_it_was(extended: bool) -> None:
    model = Restless().double()
    if extended:
        gradbatch.extend(model)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    model.linear.register_forward_hook(lambda *_: None)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    hooks = {path: list(module._forward_hooks.values()) for path, module in model.named_modules()}
    attributes = {path: sorted(module.__dict__) for path, module in model.named_modules()}
    random = torch.get_rng_state()

    verify(model, torch.randint(9, (5,), generator=torch.Generator()))

    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == tensors.keys() and all(after[name] is tensor for name, tensor in tensors.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert all(module.training for module in model.modules())
    assert {path: list(module._forward_hooks.values()) for path, module in model.named_modules()} == hooks
    assert {path: sorted(module.__dict__) for path, module in model.named_modules()} == attributes
    assert (recorder_of(model) is not None) == extended
    assert model.linear.bias.grad is None
    assert torch.equal(model.linear.weight.grad, torch.ones_like(model.linear.weight))
    assert torch.equal(torch.get_rng_state(), random)


def test_the_model_is_left_as_it_was_when_it_fails() -> None:
    model = network()
    with pytest.raises(RuntimeError, match="to have 4 channels"):
        verify(model, doubles(2, 3, 8, 8))
    assert all(recorder_of(module) is None for module in model.modules())


def test_on_another_device_a_copy_is_checked(device: torch.device) -> None:
    model = network()
    report = verify(model, doubles(2, 4, 8, 8), device=device)
    assert report.ok and report.device.type == device.type
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_gradients_are_not_needed_around_it() -> None:
    with torch.no_grad():
        assert verify(network(), doubles(2, 4, 8, 8)).ok


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (3, doubles(2, 3), {}, r"takes a torch\.nn\.Module, not a int"),
        (nn.Linear(3, 2).double(), "abc", {}, "inputs is a str; pass a tensor"),
        (nn.Linear(3, 2).double(), doubles(2, 3), {"parameters": "w"}, "'w' matches none of weight"),
        (nn.Linear(3, 2).double().requires_grad_(False), doubles(2, 3), {}, "all 2 are frozen"),
        (nn.Sequential(nn.LazyLinear(2)), doubles(2, 3), {}, r"0\.weight is not initialized yet"),
        (nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)).double(), doubles(2, 3), {}, "what is a sample"),
        (nn.Linear(3, 2).double(), doubles(2, 3), {"loss": Tensor.mean}, r"returns shape \(\)"),
        (nn.Linear(3, 2).double(), doubles(2, 3), {"loss": lambda _: torch.ones(2)}, "do not depend"),
    ],
    ids=["no module", "inputs", "pattern", "frozen", "lazy", "rows", "scalar loss", "loss without graph"],
)
def test_what_cannot_be_checked_is_told(model: Any, inputs: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify(model, inputs, **options)


def test_errors_do_not_vanish_beside_a_large_layer_nor_does_rounding_count() -> None:
    model = nn.Sequential(GroupForgotten(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 2)).double()
    with torch.no_grad():
        model[2].weight *= 1e-6  # so the gradients of the first layer are a millionth of the second's
    assert list(verify(model, doubles(3, 4, 4, 4)).mismatches) == ["0.weight"]
