"""A rule sees the layer as it was in the call, and results belong to the user alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, Dense, StaleCapture, UnsupportedLayer
from gradbatch.rules import registry
from tests.capture.reference import assert_right_both_ways, draw, sum_of_squares, wired


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, input: Tensor) -> Tensor:
        return input + self.shift


@pytest.fixture
def taught_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))

    @gradbatch.layer_rule(Shift)
    def shift(call: gradbatch.Call):
        yield "shift", Dense(call.grad_output)


def test_one_weight_at_several_dilations_is_right() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for dilation in (1, 2, 3):
            self.conv.dilation = self.conv.padding = (dilation, dilation)
            total = total + self.conv(x).relu()
        return total

    model, x = wired(forward, conv=nn.Conv2d(2, 3, 3)), draw(4, 2, 6, 6)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_settings_changed_after_the_forward_do_not_matter() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.norm.eps = 1e-5
        result = self.norm(self.first(x))
        self.norm.eps = 10.0
        return result

    model, x = wired(forward, first=nn.Linear(3, 4), norm=nn.LayerNorm(4)), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_method_that_forward_calls_and_that_was_replaced_on_the_instance_is_right() -> None:
    model, x = wired(lambda self, x: self.conv(x), conv=nn.Conv2d(2, 3, 3)), draw(4, 2, 6, 6)
    conv = model.conv
    conv._conv_forward = lambda input, weight, bias: F.conv2d(input, 2 * weight, bias)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_method_that_forward_calls_and_that_was_replaced_on_the_class_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = wired(lambda self, x: self.conv(x), conv=nn.Conv2d(2, 3, 3)), draw(4, 2, 6, 6)
    patched = lambda self, input, weight, bias: F.conv2d(input, 2 * weight, bias)  # noqa: E731
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", patched)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_an_attribute_that_hides_a_parameter_is_right() -> None:
    model, x = wired(lambda self, x: self.lin(x), lin=nn.Linear(3, 2)), draw(4, 3)

    def hide(module: nn.Module, _: object) -> None:
        object.__setattr__(module, "weight", module._parameters["weight"].tanh())

    model.lin.register_forward_pre_hook(hide)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_weight_computed_from_the_bias_is_right() -> None:
    model, x = wired(lambda self, x: self.lin(x), lin=nn.Linear(3, 3)), draw(4, 3)
    del model.lin.weight

    def compute(module: nn.Module, _: object) -> None:
        module.weight = torch.outer(module.bias, module.bias)

    model.lin.register_forward_pre_hook(compute)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_results_of_two_layers_share_no_memory(taught_shift: None) -> None:
    model = gradbatch.extend(nn.Sequential(Shift(), Shift()).double())
    results = gradbatch.backward(model, sum_of_squares(model(draw(4, 3))), BatchGrad())[BatchGrad]
    right = results["1.shift"].clone()
    results["0.shift"].zero_()
    torch.testing.assert_close(results["1.shift"], right)


def test_a_captured_gradient_that_is_also_an_inputs_grad_is_not_changed_unnoticed(taught_shift: None) -> None:
    model, x = gradbatch.extend(nn.Sequential(Shift()).double()), draw(4, 3).requires_grad_()
    context = gradbatch.compute(model, BatchGrad(), loss_reduction="sum")
    context.__enter__()
    sum_of_squares(model(x)).sum().backward()
    x.grad.zero_()
    with pytest.raises(StaleCapture, match="0"):
        context.__exit__(None, None, None)


def test_a_side_channel_to_the_loss_on_elements_that_the_outputs_do_not_depend_on_is_refused() -> None:
    kept = {}

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.lin(x.transpose(0, 1))
        kept["aux"] = hidden.square().sum((0, 2))
        return torch.stack([hidden[i, i] for i in range(len(x))])

    model, x = wired(forward, lin=nn.Linear(2, 3)), draw(4, 4, 2)
    context = gradbatch.compute(model, BatchGrad(), loss_reduction="sum")
    context.__enter__()
    (sum_of_squares(model(x)) + kept["aux"]).sum().backward()
    with pytest.raises(gradbatch.CoupledSamples, match="lin"):
        context.__exit__(None, None, None)


def test_a_quiet_layer_beside_a_loud_one_keeps_its_digits_in_half_precision() -> None:
    model = gradbatch.extend(nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})).half()
    x = draw(4, 3).half()
    losses = (model["b"](x) * 30000 + model["a"](x) * 1e-5).sum(1)
    found = gradbatch.per_sample_grads(model, losses)
    for name, parameter in model.named_parameters():
        for n in range(4):
            right = torch.autograd.grad(losses[n], parameter, retain_graph=True)[0]
            torch.testing.assert_close(found[name][n], right.float(), rtol=1e-2, atol=1e-6)


def test_a_last_offset_that_leaves_ids_over_is_refused() -> None:
    bag = gradbatch.extend(nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=True).double())
    losses = sum_of_squares(bag(torch.arange(10) % 5, torch.tensor([0, 3, 3, 7, 9])))
    with pytest.raises(UnsupportedLayer, match="last offset is 9"):
        gradbatch.per_sample_grads(bag, losses)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


def test_one_sample_behind_a_backward_that_clamps_is_right_however_loud_its_loss() -> None:
    model, x = gradbatch.extend(nn.Linear(3, 2).double()), draw(1, 3)
    losses = Clamped.apply(model(x)).sum(1) * 1e15
    right = torch.autograd.grad(losses.sum(), model.weight, retain_graph=True)[0]
    torch.testing.assert_close(gradbatch.per_sample_grads(model, losses)["weight"][0], right)


def test_attached_results_are_cleared_even_if_the_next_context_fails() -> None:
    model, x = gradbatch.extend(nn.Linear(3, 2).double()), draw(4, 3)
    gradbatch.backward(model, model(x).sum(1), BatchGrad(), attach=True)
    assert hasattr(model.weight, "grad_batch")
    with pytest.raises(KeyError), gradbatch.compute(model, BatchGrad(), loss_reduction="sum"):
        raise KeyError
    assert not hasattr(model.weight, "grad_batch")


class ByName(Shift):
    def forward(self, input: Tensor, /, *, scale: Tensor | None = None, gain: float = 2.0) -> Tensor:
        return super().forward(input) * (1.0 if scale is None else scale) * gain


class AnyNumber(Shift):
    def forward(self, input: Tensor, *scale: Tensor, **gain: float) -> Tensor:
        return super().forward(input) * (scale[0] if scale else 1.0) * gain.get("gain", 2.0)


@pytest.mark.parametrize("kind", [ByName, AnyNumber])
def test_arguments_come_by_name_and_with_defaults(monkeypatch: pytest.MonkeyPatch, kind: type[Shift]) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    seen = []

    @gradbatch.layer_rule(kind, feature_axes=1)
    def rule(call: gradbatch.Call):
        seen.append(list(call.arguments))
        scale, gain = call.arguments["scale"], call.arguments["gain"]
        if kind is AnyNumber:
            scale, gain = next(iter(scale), None), gain.get("gain", 2.0)
        yield "shift", Dense(call.grad_output * gain * (1.0 if scale is None else call.sample_first(scale)))

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        second = self.own(x, scale=x.exp()) if kind is ByName else self.own(x, x.exp())
        return torch.tanh(self.own(x, gain=3.0)) + second

    model, x = wired(forward, own=kind()), draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
    assert seen and all(names == ["input", "scale", "gain"] for names in seen)


def test_results_share_no_memory_with_gradients_that_hooks_have_seen() -> None:
    seen: list[Tensor] = []

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
            self.p, self.q, self.r = (nn.Parameter(torch.randn(s)) for s in ((5,), (1, 5), (1, 1, 5)))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.lin(x)) + self.p
            for step in (
                lambda h: h + self.q,
                lambda h: h.unsqueeze(1) + self.r.squeeze(1),
                lambda h: h + self.p.view(1, 1, 5).expand(1, 1, 5),
            ):
                hidden.register_hook(seen.append)
                hidden = step(hidden)
            hidden.register_hook(seen.append)
            return hidden[:, 0]

    model = gradbatch.extend(Shifts())
    for _ in range(3):
        losses = sum_of_squares(model(torch.randn(4, 5)))
        results = gradbatch.backward(model, losses, BatchGrad())[BatchGrad]
        own = [values.untyped_storage().data_ptr() for values in results.values()]
        others = {gradient.untyped_storage().data_ptr() for gradient in seen}
        assert seen and len(set(own)) == len(own) and others.isdisjoint(own)
