"""What goes wrong elsewhere in recurrent layers and attention: one test a phrase of the list of failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.capture.reference import assert_right_both_ways, draw, sum_of_squares, wired
from tests.findings.whole_models import assert_model_is_right

every_kind = pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])


def states(output: Any) -> Tensor:
    """The last hidden states of a recurrent layer, samples first."""
    hidden = output[1]
    return (hidden[0] if isinstance(hidden, tuple) else hidden).transpose(0, 1)


class TestRecurrent:
    @every_kind
    def test_a_nonzero_initial_state_is_right(self, kind: type[nn.Module]) -> None:
        def forward(self: nn.Module, x: Tensor, h: Tensor) -> Tensor:
            h = h.transpose(0, 1).contiguous()
            return self.rnn(x, (h, torch.sin(h)) if kind is nn.LSTM else h)[0]

        assert_model_is_right(forward, draw(3, 5, 3), draw(3, 1, 4), rnn=kind(3, 4, batch_first=True))

    @every_kind
    def test_an_initial_state_that_is_a_parameter_is_right(self, kind: type[nn.Module]) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            h = self.start.weight.unsqueeze(1).expand(1, len(x), 4).contiguous()
            return self.rnn(x, (h, torch.sin(h)) if kind is nn.LSTM else h)[0]

        rnn = kind(3, 4, batch_first=True)
        assert_model_is_right(forward, draw(3, 5, 3), rnn=rnn, start=nn.Embedding(1, 4))

    @every_kind
    @pytest.mark.parametrize("layers", [1, 2])
    def test_what_is_read_through_the_last_state_only_is_right(
        self, kind: type[nn.Module], layers: int
    ) -> None:
        rnn = kind(3, 4, layers, batch_first=True)
        assert_model_is_right(lambda self, x: states(self.rnn(x)), draw(3, 5, 3), rnn=rnn)

    def test_what_is_read_through_the_memory_only_is_right(self) -> None:
        forward = lambda self, x: self.rnn(x)[1][1].transpose(0, 1)  # noqa: E731
        assert_model_is_right(forward, draw(3, 5, 3), rnn=nn.LSTM(3, 4, batch_first=True))

    @every_kind
    @pytest.mark.parametrize("lengths", [[5, 3, 1], [2, 5, 4]])
    @pytest.mark.parametrize("read", ["output", "state"])
    def test_packed_sequences_are_right(self, kind: type[nn.Module], lengths: list[int], read: str) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            output = self.rnn(packed)
            return states(output) if read == "state" else pad_packed_sequence(output[0], batch_first=True)[0]

        assert_model_is_right(forward, draw(3, 5, 3), rnn=kind(3, 4, batch_first=True))

    @every_kind
    @pytest.mark.parametrize(
        "options",
        [
            {"num_layers": 3},
            {"bidirectional": True},
            {"num_layers": 2, "bidirectional": True},
            {"bias": False},
        ],
        ids=str,
    )
    def test_several_layers_and_directions_are_right(
        self, kind: type[nn.Module], options: dict[str, Any]
    ) -> None:
        rnn = kind(3, 2, batch_first=True, **options)
        assert_model_is_right(lambda self, x: self.rnn(x)[0], draw(3, 4, 3), rnn=rnn)

    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_projections_are_right(self, bidirectional: bool) -> None:
        rnn = nn.LSTM(3, 4, proj_size=2, batch_first=True, bidirectional=bidirectional)
        assert_model_is_right(lambda self, x: self.rnn(x)[0], draw(3, 4, 3), rnn=rnn)

    @every_kind
    @pytest.mark.parametrize("samples", [4, 3])
    def test_steps_on_the_first_axis_are_right(self, kind: type[nn.Module], samples: int) -> None:
        forward = lambda self, x: self.rnn(x.transpose(0, 1))[0].transpose(0, 1)  # noqa: E731
        assert_model_is_right(forward, draw(samples, 4, 3), rnn=kind(3, 2))

    @pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
    def test_cells_in_a_loop_are_right(self, kind: type[nn.Module]) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            state, outputs = None, []
            for step in x.unbind(1):
                state = self.cell(step, state)
                outputs.append(state[0] if isinstance(state, tuple) else state)
            return torch.stack(outputs, 1)

        assert_model_is_right(forward, draw(3, 4, 3), cell=kind(3, 2))


def kept_to(lengths: list[int], steps: int) -> Tensor:
    return torch.arange(steps) < torch.tensor(lengths).unsqueeze(1)


class TestAttention:
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("weights", [True, False])
    def test_projections_into_and_out_of_attention_are_right(self, batch_first: bool, weights: bool) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            x = x if batch_first else x.transpose(0, 1)
            y = self.own(x, torch.tanh(x), x, need_weights=weights)[0]
            return y if batch_first else y.transpose(0, 1)

        own = nn.MultiheadAttention(4, 2, bias=False, batch_first=batch_first)
        model, x = wired(forward, own=own), draw(3, 5, 4)
        assert {name for name, _ in model.named_parameters()} == {"own.in_proj_weight", "own.out_proj.weight"}
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_attention_weights_that_the_loss_reads_are_right(self) -> None:
        forward = lambda self, x: self.own(x, torch.tanh(x), x, average_attn_weights=False)[1]  # noqa: E731
        model, x = (
            wired(forward, own=nn.MultiheadAttention(4, 2, bias=False, batch_first=True)),
            draw(3, 5, 4),
        )
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    @pytest.mark.parametrize("mask", ["causal", "padding", "both", "added", "one for each head"])
    def test_masks_are_right(self, mask: str) -> None:
        causal = torch.ones(5, 5).triu(1).bool()
        padding = ~kept_to([5, 2, 4], 5)
        masks: dict[str, dict[str, Tensor]] = {
            "causal": {"attn_mask": causal},
            "padding": {"key_padding_mask": padding},
            "both": {"attn_mask": causal, "key_padding_mask": padding},
            "added": {"attn_mask": draw(5, 5)},
            "one for each head": {"attn_mask": draw(6, 5, 5)},
        }
        forward = lambda self, x: self.own(x, torch.tanh(x), x, **masks[mask])[0]  # noqa: E731
        assert_model_is_right(
            forward, draw(3, 5, 4), own=nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
        )

    @pytest.mark.parametrize("norm_first", [True, False])
    def test_encoder_layers_are_right(self, norm_first: bool) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            hidden = self.own(x, src_key_padding_mask=~kept_to([5, 2, 4], 5))
            return self.head(hidden)

        own = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, norm_first=norm_first, bias=False)
        assert_model_is_right(forward, draw(3, 5, 4), own=own, head=nn.Linear(4, 2))
