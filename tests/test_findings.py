"""Every line of what goes wrong elsewhere: here it is right, or refused by an error of ours that names the layer.

Grouped as the list of failures is: convolutions, embeddings, sharing, norms, python, numbers. The capture's own tests
(``tests/capture``) go deeper; these are the cases themselves, one test a promise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchDotGrad, BatchGrad, BatchL2Grad, CoupledSamples, Variance
from tests.capture.reference import (
    assert_refused,
    assert_right_both_ways,
    draw,
    expected,
    sum_of_squares,
    wired,
)


def assert_layer_is_right(layer: nn.Module, *inputs: Tensor) -> None:
    """Right with something behind the layer, in front of it, and with a strided gradient."""
    model = wired(
        lambda self, *x: torch.sin(self.layer(*x)).transpose(0, -1).contiguous().transpose(0, -1), layer=layer
    )
    assert_right_both_ways(model, lambda: sum_of_squares(model(*inputs)))


def assert_model_is_right(forward: Callable[..., Any], *inputs: Tensor, **layers: nn.Module) -> None:
    model = wired(forward, **layers)
    assert_right_both_ways(model, lambda: sum_of_squares(model(*inputs)))


class TestConvolutions:
    CASES: ClassVar = {
        "groups": (nn.Conv2d(4, 6, 3, groups=2), (3, 4, 5, 6)),
        "many groups": (nn.Conv2d(6, 12, 2, groups=3, bias=False), (3, 6, 4, 4)),
        "depthwise": (nn.Conv2d(4, 4, 3, groups=4), (3, 4, 5, 5)),
        "depthwise with multiplier": (nn.Conv2d(3, 6, 3, groups=3), (3, 3, 5, 5)),
        "depthwise 1d": (nn.Conv1d(3, 6, 3, groups=3, padding=1), (3, 3, 7)),
        "same": (nn.Conv2d(2, 3, 3, padding="same"), (3, 2, 5, 4)),
        "same, even kernel": (nn.Conv2d(2, 3, (2, 4), padding="same"), (3, 2, 5, 6)),
        "same, dilated": (nn.Conv1d(2, 3, 4, padding="same", dilation=2), (3, 2, 9)),
        "valid": (nn.Conv2d(2, 3, 3, padding="valid"), (3, 2, 5, 4)),
        "circular": (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (3, 2, 5, 4)),
        "reflect": (nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), (3, 2, 5, 4)),
        "replicate": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), (3, 2, 5)),
        "circular, same": (nn.Conv2d(2, 2, (2, 3), padding="same", padding_mode="circular"), (3, 2, 5, 4)),
        "dilation, remainder": (nn.Conv2d(2, 3, 2, stride=3, dilation=2, padding=1), (3, 2, 8, 9)),
        "stride with remainder": (nn.Conv1d(2, 4, 3, stride=4, groups=2), (3, 2, 10)),
        "three dimensions": (nn.Conv3d(2, 4, (2, 1, 3), stride=(1, 2, 1), groups=2), (3, 2, 4, 3, 5)),
        "transposed": (nn.ConvTranspose2d(2, 3, 3), (3, 2, 3, 4)),
        "transposed, output padding": (nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), (3, 2, 3, 4)),
        "transposed, groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 3, 3)),
        "transposed, dilation": (nn.ConvTranspose1d(2, 3, 3, 3, dilation=2, output_padding=2), (3, 2, 4)),
        "transposed, padded": (
            nn.ConvTranspose1d(4, 4, 2, dilation=3, output_padding=2, groups=4),
            (3, 4, 4),
        ),
        "transposed 3d": (nn.ConvTranspose3d(2, 2, 2, stride=2, groups=2, output_padding=1), (2, 2, 2, 3, 2)),
    }

    @pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
    @pytest.mark.parametrize("case", CASES)
    def test_is_right_with_norms(self, case: str) -> None:
        layer, shape = self.CASES[case]
        assert_layer_is_right(layer, draw(*shape))

    def test_channels_last_and_permuted_inputs_are_right(self) -> None:
        layer, x = nn.Conv2d(4, 4, 3, groups=2), draw(3, 4, 5, 5)
        assert_layer_is_right(layer, x.to(memory_format=torch.channels_last))
        assert_layer_is_right(layer, draw(5, 3, 5, 4).permute(1, 3, 0, 2))


class TestEmbeddings:
    IDS = torch.tensor([[0, 1, 1, 5], [2, 2, 2, 2], [0, 3, 5, 4]])

    @pytest.mark.parametrize(
        "options", [{"padding_idx": 2}, {"padding_idx": -1}, {"sparse": True}, {"max_norm": 0.5}, {}]
    )
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
    def test_options_of_embedding_are_right(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        assert_layer_is_right(nn.Embedding(6, 3, **options), self.IDS.to(dtype))

    def test_frequencies_are_counted_in_the_samples_own_ids(self) -> None:
        layer = gradbatch.extend(nn.Embedding(6, 3, scale_grad_by_freq=True).double())
        found = gradbatch.per_sample_grads(layer, sum_of_squares(layer(self.IDS)))["weight"]
        for n, ids in enumerate(self.IDS):
            (alone,) = torch.autograd.grad(layer(ids.unsqueeze(0)).square().sum(), layer.weight)
            torch.testing.assert_close(found[n], alone)

    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    @pytest.mark.parametrize("padding_idx", [None, 2])
    def test_bags_with_duplicates_and_padding_are_right(self, mode: str, padding_idx: int | None) -> None:
        assert_layer_is_right(nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding_idx), self.IDS)

    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    @pytest.mark.parametrize("last", [False, True])
    def test_bags_by_offsets_are_right_also_empty_ones(self, mode: str, last: bool) -> None:
        offsets = torch.tensor([0, 2, 2, 7, 12] if last else [0, 2, 2, 7])
        layer = nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=last)
        model = wired(lambda self, *arguments: torch.sin(self.layer(*arguments)), layer=layer)
        losses = lambda: sum_of_squares(model(self.IDS.flatten(), offsets))  # noqa: E731
        found = gradbatch.per_sample_grads(model, losses())["layer.weight"]
        torch.testing.assert_close(found, expected(model, losses)["layer.weight"])

    def test_bags_with_weights_are_right(self) -> None:
        assert_layer_is_right(nn.EmbeddingBag(6, 3, mode="sum"), self.IDS, None, draw(3, 4))

    @pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
    def test_ids_survive_mixed_precision(self, kind: type[nn.Module]) -> None:
        # 1001 is no bfloat16 number: rounded, it would be another row.
        model = wired(lambda self, ids: self.table(ids), table=kind(1024, 2)).bfloat16()
        ids = torch.tensor([[1001, 1002, 1003], [1001, 1001, 5]])
        with torch.autocast("cpu", torch.bfloat16):
            found = gradbatch.per_sample_grads(model, model(ids).float().flatten(1).sum(1))["table.weight"]
        rows = [set(grad.flatten(1).any(1).nonzero().flatten().tolist()) for grad in found]
        assert rows == [{1001, 1002, 1003}, {1001, 5}]


class TestSharing:
    def test_a_module_called_twice_is_right_with_cross_terms(self) -> None:
        twice = lambda self, x: self.layer(torch.tanh(self.layer(x)))  # noqa: E731
        assert_model_is_right(twice, draw(4, 3), layer=nn.Linear(3, 3))
        assert_model_is_right(twice, draw(3, 2, 7, 6), layer=nn.Conv2d(2, 2, 3, groups=2))

    @pytest.mark.parametrize("used", [0, 1])
    def test_one_of_two_outputs_unused_is_right(self, used: int) -> None:
        both = lambda self, x: (self.a(x), self.b(self.a(x)))[used]  # noqa: E731
        assert_model_is_right(both, draw(4, 3), a=nn.Linear(3, 3), b=nn.Linear(3, 2))

    def test_tied_modules_are_right(self) -> None:
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight, other.bias = one.weight, one.bias
        assert_model_is_right(lambda self, x: self.b(torch.tanh(self.a(x))), draw(4, 3), a=one, b=other)

    def test_a_functional_head_on_the_embedding_is_right_with_cross_terms(self) -> None:
        forward = lambda self, ids: F.linear(self.table(ids).mean(1), self.table.weight)  # noqa: E731
        assert_model_is_right(forward, TestEmbeddings.IDS, table=nn.Embedding(6, 3))

    def test_a_head_tied_to_the_embedding_is_right_with_cross_terms(self) -> None:
        table, head = nn.Embedding(6, 3), nn.Linear(3, 6)
        head.weight = table.weight
        forward = lambda self, ids: self.head(torch.tanh(self.table(ids)))  # noqa: E731
        assert_model_is_right(forward, TestEmbeddings.IDS, table=table, head=head)

    def test_two_forwards_then_the_backwards_in_forward_order_are_right(self) -> None:
        model, x, z = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2)), draw(4, 3), draw(2, 3)
        with gradbatch.compute(model, BatchGrad(), loss_reduction="mean") as results:
            first, second = sum_of_squares(model(x)).mean(), sum_of_squares(model(z)).mean()
            first.backward()
            second.backward()
        for name, gradient in results[BatchGrad].items():
            right = [expected(model, lambda v=v: sum_of_squares(model(v)))[name] for v in (x, z)]
            torch.testing.assert_close(gradient, torch.cat(right))


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class TestNorms:
    @pytest.mark.parametrize(
        ("layer", "shape"),
        [
            (nn.LayerNorm(4, bias=False), (3, 5, 4)),
            (nn.LayerNorm((5, 4)), (3, 2, 5, 4)),
            (nn.RMSNorm(4), (3, 5, 4)),
            (nn.RMSNorm((5, 4), eps=1e-3), (3, 2, 5, 4)),
            (nn.GroupNorm(2, 4), (3, 4, 5)),
            (nn.GroupNorm(2, 4), (3, 4)),
            (nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
            (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 3, 2)),
            (nn.InstanceNorm3d(4, affine=True), (3, 4, 2, 3, 2)),
            (nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(), (3, 4, 3, 2)),
            (nn.BatchNorm1d(4).eval(), (3, 4)),
            (nn.BatchNorm1d(4).eval(), (3, 4, 5)),
            (nn.BatchNorm2d(4).eval(), (3, 4, 3, 2)),
            (nn.BatchNorm3d(4).eval(), (3, 4, 2, 3, 2)),
        ],
        ids=str,
    )
    def test_is_right(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        assert_layer_is_right(layer, draw(*shape))

    def test_a_subclass_with_its_own_forward_is_right_and_not_taken_for_its_base(self) -> None:
        assert_model_is_right(lambda self, x: self.norm(x), draw(3, 4), norm=Doubled(4))

    @pytest.mark.parametrize("kind", ["affine", "not affine", "frozen", "without statistics", "sync"])
    def test_batch_norm_that_couples_samples_is_refused_by_name(self, kind: str) -> None:
        norm = nn.SyncBatchNorm(3) if kind == "sync" else nn.BatchNorm1d(3, affine=kind != "not affine")
        norm.requires_grad_(kind != "frozen")
        if kind == "without statistics":
            norm = nn.BatchNorm1d(3, track_running_stats=False).eval()
        x = draw(4, 3)
        model = wired(lambda self, x: self.norm(self.before(x)).exp(), before=nn.Linear(3, 3), norm=norm)
        with pytest.raises(CoupledSamples, match=r"norm \(\w*BatchNorm\w*\)"):
            gradbatch.per_sample_grads(model, x.sum(1).requires_grad_() * 1.0)
        if kind != "sync":
            assert_refused(model, lambda: sum_of_squares(model(x)), CoupledSamples, r"norm \(BatchNorm1d\)")


@dataclass
class Out:
    logits: Tensor
    kept: Tensor | None = None


class Named(NamedTuple):
    logits: Tensor
    kept: Tensor


class TestPython:
    def test_a_keyword_call_is_right(self) -> None:
        assert_model_is_right(lambda self, x: self.layer(input=x), draw(4, 3), layer=nn.Linear(3, 2))

    @pytest.mark.parametrize("name", ["output", "input", "weight_", "metadata", "module", "args", "grad"])
    def test_any_name_of_a_submodule_is_right(self, name: str) -> None:
        assert_model_is_right(lambda self, x: getattr(self, name)(x), draw(4, 3), **{name: nn.Linear(3, 2)})

    @pytest.mark.parametrize(
        ("wrap", "pick"),
        [
            (lambda y, h: (y, h), lambda out: out[0]),
            (lambda y, h: [h, y], lambda out: out[1]),
            (lambda y, h: {"hidden": [h, (h,)], "logits": y}, lambda out: out["logits"]),
            (lambda y, h: Out(y, h), lambda out: out.logits),
            (lambda y, h: Out(y), lambda out: out.logits),
            (lambda y, h: Named(y, h), lambda out: out.logits),
            (lambda y, h: (y, None, 3, "text"), lambda out: out[0]),
        ],
        ids=["tuple", "list", "dict", "dataclass", "dataclass_none", "namedtuple", "mixed"],
    )
    def test_outputs_in_containers_are_right(self, wrap, pick) -> None:
        model = wired(
            lambda self, x: wrap(self.b(h := torch.tanh(self.a(x))), h), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
        )
        x = draw(4, 3)
        assert_right_both_ways(model, lambda: sum_of_squares(pick(model(x))))

    @pytest.mark.parametrize("given", [False, True])
    def test_an_optional_second_input_is_right(self, given: bool) -> None:
        def forward(self: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layer(x) if mask is None else self.layer(x) * mask

        model, x = wired(forward, layer=nn.Linear(3, 2)), draw(4, 3)
        mask = draw(4, 2) if given else None
        assert_right_both_ways(model, lambda: sum_of_squares(model(x, mask=mask)))

    def test_a_loss_written_as_a_lambda_or_handed_over_in_a_tuple_is_right(self) -> None:
        model, x = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2)), draw(4, 3)
        both = lambda: ((losses := sum_of_squares(model(x))).mean(), losses)  # noqa: E731
        assert_right_both_ways(model, lambda: both()[1])

    def test_token_means_with_ignored_labels_are_right_by_their_own_normalisation(self) -> None:
        ids = TestEmbeddings.IDS
        model = wired(lambda self, ids: self.b(self.a(ids)), a=nn.Embedding(6, 4), b=nn.Linear(4, 6))
        labels = torch.tensor([[1, -100, -100, 2], [-100] * 4, [0, 3, -100, 1]])

        def losses() -> Tensor:
            tokens = F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none", ignore_index=-100)
            return tokens.sum(1) / (labels != -100).sum()

        assert_right_both_ways(model, losses)


def grouped() -> nn.Module:
    return wired(
        lambda self, x: self.b(torch.relu(self.a(x))), a=nn.Conv1d(2, 4, 2, groups=2), b=nn.Linear(4, 2)
    )


class TestNumbers:
    def test_a_variance_is_never_negative(self) -> None:
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2)).float()
        x = 1e4 + 1e-3 * draw(64, 3, dtype=torch.float32)
        found = gradbatch.backward(model, 1e4 * model(x).sum(1), Variance(), Variance(unbiased=True))
        assert all((value >= 0).all() for result in found.values() for value in result.values())

    @pytest.mark.parametrize("positions", [1, 3, 60])
    def test_norms_of_gradients_that_cancel_are_right_and_their_roots_exist(self, positions: int) -> None:
        # Every position appears again with the opposite sign, and the little that is left is what counts.
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 3))
        x = draw(4, positions, 3)
        signs = torch.cat([torch.ones(positions), -torch.ones(positions)]).double().view(-1, 1)
        doubled = torch.cat([x, x + 1e-5 * draw(4, positions, 3)], 1)
        losses = lambda: (model(doubled) * signs).flatten(1).sum(1)  # noqa: E731
        right = expected(model, losses)["layer.weight"].flatten(1)
        found = gradbatch.backward(model, losses(), BatchL2Grad(), BatchDotGrad())
        squares, gram = found[BatchL2Grad]["layer.weight"], found[BatchDotGrad]["layer.weight"]
        torch.testing.assert_close(squares, right.square().sum(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(gram, right @ right.T, rtol=1e-6, atol=1e-18)
        assert found[BatchL2Grad].total().sqrt().isfinite().all()

    def test_roots_of_gram_diagonals_exist_in_float32(self) -> None:
        model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 3)).float()
        x = draw(4, 30, 3, dtype=torch.float32)
        signs = torch.tensor([1.0, -1.0]).repeat(15).view(-1, 1)
        x[:, 1::2] = x[:, ::2]
        found = gradbatch.backward(model, (model(x) * signs).flatten(1).sum(1), BatchL2Grad(), BatchDotGrad())
        assert found[BatchL2Grad].total().sqrt().isfinite().all()
        assert found[BatchDotGrad].total().diagonal().sqrt().isfinite().all()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_non_finite_sample_does_not_poison_the_batch(self, value: float) -> None:
        model, x = grouped(), draw(4, 2, 5)
        right = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
        x[1] = value
        found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
        for name, gradient in right.items():
            torch.testing.assert_close(found[name][[0, 2, 3]], gradient[[0, 2, 3]])

    @pytest.mark.parametrize("samples", [0, 1])
    def test_a_batch_of_none_and_of_one_are_right(self, samples: int) -> None:
        model, x = grouped(), draw(samples, 2, 5)
        right = expected(model, lambda: sum_of_squares(model(x)))
        found = gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
        for name, gradient in right.items():
            torch.testing.assert_close(found[name], gradient)
