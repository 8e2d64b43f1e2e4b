"""What goes wrong elsewhere in convolutions, embeddings and norms: one test a phrase of the list of failures."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradbatch
from gradbatch import BatchDotGrad, BatchL2Grad, CoupledSamples, SumGradSquared
from tests.capture.reference import assert_refused, draw, expected, sum_of_squares, wired
from tests.findings.whole_models import assert_layer_is_right, assert_model_is_right


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

    def test_a_table_in_float64_is_right(self) -> None:
        layer = gradbatch.extend(nn.Embedding(6, 3, dtype=torch.float64))
        assert (
            gradbatch.per_sample_grads(layer, sum_of_squares(layer(self.IDS)))["weight"].dtype
            == torch.float64
        )
        assert_layer_is_right(layer, self.IDS)

    @pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
    def test_nothing_is_done_once_for_each_word_of_the_vocabulary(self, kind: type[nn.Module]) -> None:
        calls = []
        for words in (10, 1000):
            model = wired(lambda self, ids: self.table(ids), table=kind(words, 3))
            losses = sum_of_squares(model(self.IDS))
            with Operations() as operations:
                gradbatch.backward(model, losses, BatchL2Grad(), BatchDotGrad(), SumGradSquared())
            calls.append(operations.count)
        assert calls[0] == calls[1]


class Operations(TorchDispatchMode):
    """Counts what torch carries out."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


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

    def test_batch_norm_in_eval_mode_is_right_where_torch_itself_is_wrong_for_a_batch_of_one(self) -> None:
        forward = lambda self, x: self.head(self.norm(x).flatten(2).transpose(1, 2))  # noqa: E731
        model = wired(forward, norm=nn.BatchNorm2d(3), head=nn.Linear(3, 2)).eval()
        x = draw(4, 3, 5, 4)
        right = expected(model, lambda: sum_of_squares(model(x)))
        for n in (1, 4):
            found = gradbatch.per_sample_grads(model, sum_of_squares(model(x[:n])))
            torch.testing.assert_close(found, {name: gradient[:n] for name, gradient in right.items()})

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
