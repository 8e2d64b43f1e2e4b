"""Where the samples lie is measured: sizes collide in all of these, and nothing may be guessed from them."""

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import CoupledSamples
from tests.capture.reference import assert_refused, assert_right_both_ways, draw, sum_of_squares, wired

SIZES = [(3, 3, 3), (3, 2, 4), (2, 2, 2), (1, 3, 1), (3, 1, 3), (4, 2, 4)]


@pytest.mark.parametrize(("samples", "positions", "channels"), SIZES)
class TestAnyAxis:
    def test_time_major_inner_layers(self, samples: int, positions: int, channels: int) -> None:
        model = wired(
            lambda self, x: self.second(torch.tanh(self.first(x.transpose(0, 1)))).transpose(0, 1),
            first=nn.Linear(channels, channels),
            second=nn.Linear(channels, 2),
        )
        x = draw(samples, positions, channels)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    @pytest.mark.parametrize("order", ["samples first", "positions first"])
    def test_rows_flattened_in_either_order(
        self, samples: int, positions: int, channels: int, order: str
    ) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            if order == "positions first":
                x = x.transpose(0, 1)
            rows = self.second(torch.tanh(self.first(x.reshape(samples * positions, channels))))
            x = rows.view(*x.shape[:2], -1)
            return x.transpose(0, 1) if order == "positions first" else x

        model = wired(forward, first=nn.Linear(channels, channels), second=nn.Linear(channels, 2))
        x = draw(samples, positions, channels)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_images_as_rows_of_samples_and_frames(self, samples: int, positions: int, channels: int) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            frames = self.conv(x.unsqueeze(-1).transpose(1, 2).flatten(0, 1).unsqueeze(1))
            return frames.view(samples, channels, -1)

        model = wired(forward, conv=nn.Conv2d(1, 2, (1, 1)))
        x = draw(samples, positions, channels)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_siamese_halves_have_two_rows_a_sample(self, samples: int, positions: int, channels: int) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            one, other = self.layer(torch.cat([x, x.flip(1)])).chunk(2)
            return (one - other * x).square()

        model = wired(forward, layer=nn.Linear(channels, channels))
        x = draw(samples, positions, channels)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_embeddings_of_transposed_ids(self, samples: int, positions: int, channels: int) -> None:
        model = wired(
            lambda self, ids: torch.tanh(self.table(ids.T)).transpose(0, 1), table=nn.Embedding(4, channels)
        )
        ids = torch.randint(0, 4, (samples, positions))
        assert_right_both_ways(model, lambda: sum_of_squares(model(ids)))

    def test_repeated_samples(self, samples: int, positions: int, channels: int) -> None:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            rows = self.layer(x[:, 0].repeat_interleave(positions, 0) * x.flatten(0, 1))
            return rows.view(samples, positions, -1)

        model = wired(forward, layer=nn.Linear(channels, channels))
        x = draw(samples, positions, channels)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))

    def test_a_dead_sample_does_not_hide_the_axis(self, samples: int, positions: int, channels: int) -> None:
        model = wired(
            lambda self, x: self.layer(x.transpose(0, 1)).transpose(0, 1), layer=nn.Linear(channels, 2)
        )
        x, alive = draw(samples, positions, channels), torch.arange(samples).double()
        if samples > 1:
            assert_right_both_ways(model, lambda: sum_of_squares(model(x)) * alive)

    def test_one_position_read_does_not_confuse_the_axes(
        self, samples: int, positions: int, channels: int
    ) -> None:
        model = wired(lambda self, x: self.layer(x.transpose(0, 1))[-1], layer=nn.Linear(channels, 2))
        x = draw(samples, positions, channels)
        assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def positional(samples: int, positions: int, ids: Tensor) -> tuple[nn.Module, Tensor]:
    model = wired(
        lambda self, x: self.head(torch.tanh(x + self.table(ids))),
        table=nn.Embedding(positions, 4),
        head=nn.Linear(4, 2),
    )
    return model, draw(samples, positions, 4)


@pytest.mark.parametrize("with_axis", [False, True], ids=["arange(T)", "[1, T]"])
@pytest.mark.parametrize(("samples", "positions"), [(3, 3), (3, 4), (4, 2), (2, 4), (2, 2)])
def test_a_positional_table_shared_by_all_samples_is_right(
    samples: int, positions: int, with_axis: bool
) -> None:
    ids = torch.arange(positions)
    model, x = positional(samples, positions, ids.unsqueeze(0) if with_axis else ids)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_positional_table_of_one_sample_is_right() -> None:
    model, x = positional(1, 3, torch.arange(3))
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_positions_expanded_to_the_batch_are_right() -> None:
    model, x = positional(3, 3, torch.arange(3).expand(3, 3))
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_positional_table_that_only_one_sample_is_alive_for_is_not_credited_to_others() -> None:
    model, x = positional(3, 3, torch.arange(3))
    weights = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)) * weights)


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h - h.mean(0),
        lambda h: h.cumsum(0),
        lambda h: h + h.flip(0),
        lambda h: torch.softmax(h, 0),
        lambda h: h @ h.T @ h,
        lambda h: torch.nn.functional.batch_norm(h, None, None, training=True),
        lambda h: h + 1e-9 * h.sum(),
        lambda h: h / h.norm(),
        lambda h: torch.cat([h[:1], h[1:] * h[:1]]),
    ],
    ids="centre cumsum flip softmax attention norm faint global_norm anchor".split(),  # noqa: SIM905
)
@pytest.mark.parametrize("samples", [4])
def test_samples_that_mix_are_refused_by_the_layer_where_they_do(mix, samples: int) -> None:
    model = wired(
        lambda self, x: self.after(mix(self.before(x))), before=nn.Linear(3, 4), after=nn.Linear(4, 2)
    )
    x = draw(samples, 3)
    assert_refused(model, lambda: sum_of_squares(model(x)), CoupledSamples, "before")


@pytest.mark.parametrize("parameters", [None, "second.*"])
@pytest.mark.parametrize("leaf", [False, True])
def test_samples_that_mix_are_refused_whatever_needs_a_gradient(leaf: bool, parameters: str | None) -> None:
    model = wired(
        lambda self, x: (h := self.second(torch.tanh(self.first(x)))) - h.mean(0),
        first=nn.Linear(3, 3),
        second=nn.Linear(3, 2),
    )
    x = draw(4, 3).requires_grad_(leaf)
    with pytest.raises(CoupledSamples, match="4 samples"):
        gradbatch.per_sample_grads(model, sum_of_squares(model(x)), parameters=parameters)


@pytest.mark.parametrize(
    "change",
    [lambda h: h.roll(1, 0), lambda h: h[torch.tensor([2, 0, 1, 3])], lambda h: h.sort(0).values],
    ids=["roll", "shuffle", "sort"],
)
@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
def test_rows_that_change_places_belong_to_the_sample_whose_loss_reads_them(change) -> None:
    model = wired(
        lambda self, x: self.after(change(self.before(x))), before=nn.Linear(3, 4), after=nn.Linear(4, 2)
    )
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [2, 3, 8, 40])
def test_mixing_is_noticed_in_every_precision_and_batch_size(dtype: torch.dtype, samples: int) -> None:
    model = wired(lambda self, x: (h := self.layer(x)) - 0.5 * h.mean(0), layer=nn.Linear(3, 4)).to(dtype)
    x = draw(samples, 3, dtype=dtype)
    for scale in (1e-3, 1.0):
        assert_refused(model, lambda s=scale: sum_of_squares(model(x).float()) * s, CoupledSamples, "layer")


def test_a_statistic_of_the_batch_that_is_detached_is_a_constant() -> None:
    model = wired(lambda self, x: (h := self.layer(x)) - h.mean(0).detach(), layer=nn.Linear(3, 4))
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
def test_samples_on_a_feature_axis_are_right() -> None:
    model = wired(lambda self, x: self.layer(x.T).T, layer=nn.Linear(4, 4))
    x = draw(4, 4)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_a_loop_over_samples_is_right() -> None:
    model = wired(lambda self, x: torch.cat([self.layer(part) for part in x.split(1)]), layer=nn.Linear(3, 2))
    x = draw(4, 3)
    assert_right_both_ways(model, lambda: sum_of_squares(model(x)))


def test_several_rows_a_loss_belong_to_one_sample() -> None:
    model, x = gradbatch.extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()), draw(6, 3)
    for shape in ((2, 3), (3, 2), (1, 6), (6, 1)):
        losses = model(x).square().sum(1).view(shape)
        for summed in (losses.sum(1), losses.sum(0)):
            found = gradbatch.per_sample_grads(model, summed)["0.weight"]
            rows = [torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0] for loss in summed]
            torch.testing.assert_close(found, torch.stack(rows))


def test_outputs_whose_rows_are_no_samples_do_not_keep_a_coupling_from_being_named() -> None:
    # Positions first, which the model was not extended for: its last states have another number of rows.
    model = gradbatch.extend(nn.LSTM(3, 2).double())
    for _ in range(2):
        with (
            pytest.raises(CoupledSamples, match="LSTM"),
            gradbatch.compute(model, gradbatch.BatchGrad(), loss_reduction="sum"),
        ):
            model(draw(2, 4, 3))


def test_what_leads_to_other_outputs_alone_has_no_gradient() -> None:
    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        rows = self.aside(self.shared(hidden).flatten(0, 1).tanh())  # one a position, which no loss is of
        return self.head(self.shared(hidden.mean(1)).tanh()), rows

    model = wired(
        forward, first=nn.Linear(3, 4), shared=nn.Linear(4, 4), head=nn.Linear(4, 2), aside=nn.Linear(4, 2)
    )
    for _ in range(3):  # measured, and remembered
        x = draw(5, 3, 3)
        assert_right_both_ways(model, lambda x=x: sum_of_squares(model(x)[0]))
