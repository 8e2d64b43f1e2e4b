"""What goes wrong elsewhere under torch's own machinery: one test a phrase of the list of failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradbatch
from gradbatch import BatchGrad
from tests.capture.reference import (
    WAYS,
    Losses,
    assert_results,
    assert_right_both_ways,
    draw,
    driven,
    expected,
    refusal_of,
    sum_of_squares,
    watched,
    wired,
)

torchs_own = pytest.mark.filterwarnings("ignore")


def assert_right_to(tolerance: float, model: nn.Module, losses: Losses) -> None:
    right = {name: gradient.float() for name, gradient in expected(model, losses).items()}
    for way in WAYS.values():
        found = {
            asked: result for asked, result in way(model, losses).items() if isinstance(asked, BatchGrad)
        }
        assert_results(found, right, tolerance)


class TestMachinery:
    @pytest.mark.parametrize("parameter", ["layer", "raw"])
    def test_checkpoints_without_reentry_are_right(self, parameter: str) -> None:
        def inner(self: nn.Module, h: Tensor) -> Tensor:
            return torch.tanh(self.b(h) if parameter == "layer" else F.linear(h, 2 * self.b.weight))

        forward = lambda self, x: self.c(checkpoint(inner, self, self.a(x), use_reentrant=False))  # noqa: E731
        model, x = wired(forward, **{name: nn.Linear(3, 3) for name in "abc"}), draw(4, 3)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_checkpoints_with_reentry_are_right(self) -> None:
        forward = lambda self, x: checkpoint(self.b, self.a(x), use_reentrant=True)  # noqa: E731
        plain = lambda self, x: self.b(self.a(x))  # noqa: E731
        layers, x = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}, draw(4, 3)
        model, same = wired(forward, **layers), wired(plain, **layers)
        right = expected(same, lambda: sum_of_squares(same(x)))
        for way in WAYS.values():
            assert_results(way(model, lambda: sum_of_squares(model(x))), right)

    @torchs_own
    @pytest.mark.parametrize("extended", ["before", "after the first call"])
    def test_a_compiled_model_is_right_or_refused_by_the_parameters_name(self, extended: str) -> None:
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), draw(4, 3)
        if extended == "before":
            gradbatch.extend(model)
        compiled = torch.compile(model, backend="aot_eager")
        compiled(x)
        gradbatch.extend(model)
        losses = lambda: sum_of_squares(compiled(x))  # noqa: E731
        right = expected(model, losses)
        for way in WAYS.values():
            refusal = refusal_of(lambda way=way: assert_results(way(model, losses), right))
            assert refusal is None or "0.weight" in refusal or "not called" in refusal

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_is_right_to_the_lower_precision(self, dtype: torch.dtype) -> None:
        layers = {
            "a": nn.Linear(3, 3),
            "norm": nn.LayerNorm(3),
            "b": nn.Conv1d(5, 2, 2),
            "c": nn.Embedding(6, 3),
        }
        forward = lambda self, x, ids: self.b(self.norm(self.a(x)) + self.a(self.c(ids)))  # noqa: E731
        model, x, ids = wired(forward, **layers).float(), draw(4, 5, 3).float(), torch.randint(6, (4, 5))

        def losses() -> Tensor:
            with torch.autocast("cpu", dtype):
                return sum_of_squares(model(x, ids).float())

        assert_right_to(3e-2 if dtype == torch.bfloat16 else 5e-3, model, losses)

    def test_parameters_in_bfloat16_are_right_and_their_gradients_in_float32(self) -> None:
        model = wired(lambda self, x: self.b(torch.tanh(self.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
        model, x = model.bfloat16(), draw(4, 3).bfloat16()
        losses = lambda: sum_of_squares(model(x).float())  # noqa: E731
        assert_right_to(3e-2, model, losses)
        assert {g.dtype for g in gradbatch.per_sample_grads(model, losses()).values()} == {torch.float32}

    def test_half_precision_with_a_scaled_loss_is_right_for_the_loss_that_is_scaled(self) -> None:
        model, x = wired(lambda self, x: self.a(x), a=nn.Linear(3, 2)).float(), draw(4, 3).float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def losses() -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return sum_of_squares(model(x).float())

        right = expected(model, losses)
        with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
            scaler.scale(losses().sum()).backward()
        assert_results(results, {name: 2.0**10 * g for name, g in right.items()}, 5e-3)
        scaler.step(optimizer)
        scaler.update()

    def test_frozen_parameters_have_no_result_and_leave_the_others_right(self) -> None:
        layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 2)}
        model, x = wired(lambda self, x: self.c(self.b(torch.tanh(self.a(x)))), **layers), draw(4, 3)
        model.a.requires_grad_(False)
        model.b.weight.requires_grad_(False)
        model.c.bias.requires_grad_(False)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))
        assert set(gradbatch.per_sample_grads(model, sum_of_squares(model(x)))) == {"b.bias", "c.weight"}

    @pytest.mark.parametrize("merged", [False, True])
    def test_low_rank_adapters_are_right(self, merged: bool) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            if merged:
                weight = self.base.weight + 0.5 * self.up.weight @ self.down.weight
                return F.linear(x, weight, self.base.bias)
            return self.base(x) + 0.5 * self.up(self.down(x))

        layers = {
            "base": nn.Linear(3, 4),
            "down": nn.Linear(3, 2, bias=False),
            "up": nn.Linear(2, 4, bias=False),
        }
        model, x = wired(forward, **layers), draw(4, 5, 3)
        model.base.requires_grad_(False)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    @torchs_own
    @pytest.mark.parametrize("remember", [True, False])
    @pytest.mark.parametrize(
        "change",
        [
            parametrizations.weight_norm,
            parametrizations.spectral_norm,
            parametrizations.orthogonal,
            nn.utils.weight_norm,
            nn.utils.spectral_norm,
        ],
        ids=["weight_norm", "spectral_norm", "orthogonal", "weight_norm by hook", "spectral_norm by hook"],
    )
    def test_parametrisations_are_right(
        self, change: Callable[[nn.Module], nn.Module], remember: bool
    ) -> None:
        # In eval mode, as spectral_norm changes its vectors in every other forward.
        model, x = wired(lambda self, x: self.a(x), a=change(nn.Linear(3, 4))).eval(), draw(5, 3)
        gradbatch.extend(model, remember=remember)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    @pytest.mark.parametrize("layer", ["taught", "without a rule"])
    def test_dropout_is_the_same_in_the_forward_and_in_what_is_computed_of_it(self, layer: str) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            h = self.a(x) if layer == "taught" else torch.einsum("nti,oi->nto", x, self.a.weight)
            return self.b(F.dropout(torch.tanh(h), 0.5))

        model, x = wired(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), draw(4, 5, 3)
        losses = sum_of_squares(model(x))
        assert_results(driven(model, lambda: losses), expected(model, lambda: losses))
        torch.manual_seed(7)
        found = watched(model, lambda: sum_of_squares(model(x)))
        torch.manual_seed(7)
        assert_results(found, expected(model, lambda: sum_of_squares(model(x))))

    def test_dropout_inside_of_layers_without_a_rule_is_right(self) -> None:
        own = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.5, batch_first=True, norm_first=True)
        own.self_attn.in_proj_bias.requires_grad_(False)  # that of the keys is zero, up to rounding
        model, x = wired(lambda self, x: self.a(x), a=own), draw(3, 5, 4)
        losses = sum_of_squares(model(x))
        assert_results(driven(model, lambda: losses), expected(model, lambda: losses))
        rnn = wired(lambda self, x: self.a(x)[0], a=nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5))
        losses = sum_of_squares(rnn(x))
        assert_results(driven(rnn, lambda: losses), expected(rnn, lambda: losses))
