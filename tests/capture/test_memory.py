"""What a training loop relies on from step to step: right in every step, whatever the next batch is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import BatchGrad, CoupledSamples
from gradbatch.capture import checkpoints, graph, search
from gradbatch.capture.memory import STEPS, memory_of
from gradbatch.capture.propagation import Run, propagate
from gradbatch.rules import SampleLayout
from tests.capture.reference import assert_results, draw, expected, perceptron, sum_of_squares, wired


class Measurements:
    """Counts how often it is measured where the samples lie."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        find = search.find_owners

        def counted(*args: Any) -> Any:
            self.count += 1
            return find(*args)

        monkeypatch.setattr(search, "find_owners", counted)

    def of(self, run: Callable[[], Any]) -> int:
        before = self.count
        run()
        return self.count - before


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    return Measurements(monkeypatch)


def network() -> nn.Module:
    """Layers, a raw parameter, a table of positions, attention and a convolution."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) * self.first.bias + self.places(torch.arange(5))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.conv(torch.relu(hidden).mT).flatten(1)

    return wired(
        forward,
        first=nn.Linear(3, 4),
        norm=nn.LayerNorm(4),
        places=nn.Embedding(5, 4),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        conv=nn.Conv1d(4, 2, 2),
    )


def test_from_the_third_step_on_nothing_is_measured_and_all_is_right(measurements: Measurements) -> None:
    model, counts = network(), []
    for _ in range(5):
        x = draw(3, 5, 3)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        right = expected(model, losses)
        found: list[gradbatch.Results] = []
        counts.append(measurements.of(lambda: found.append(gradbatch.backward(model, losses(), BatchGrad()))))  # noqa: B023
        assert_results(found[0], right)
    assert min(counts[:2]) > 0 and counts[2:] == [0, 0, 0]


def test_the_same_by_compute(measurements: Measurements) -> None:
    model, counts = network(), []
    for _ in range(4):
        x = draw(3, 5, 3)
        right = expected(model, lambda: sum_of_squares(model(x)))  # noqa: B023
        before = measurements.count
        with gradbatch.compute(model, BatchGrad(), loss_reduction="mean") as results:
            sum_of_squares(model(x)).mean().backward()
        counts.append(measurements.count - before)
        assert_results(results, right)
    assert min(counts[:2]) > 0 and counts[2:] == [0, 0]


def flattened(self: nn.Module, x: Tensor) -> Tensor:
    """Positions as rows of one axis, a table that all samples share, and a weight that is computed."""
    hidden = self.first(x.flatten(0, 1)).unflatten(0, x.shape[:2]) + self.places(torch.arange(x.shape[1]))
    return self.last(torch.tanh(hidden).flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)


@pytest.mark.parametrize("way", ["backward", "compute"])
def test_batches_of_other_sizes_and_lengths_are_not_measured_anew(
    measurements: Measurements, way: str
) -> None:
    last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    model = wired(flattened, first=nn.Linear(3, 4), places=nn.Embedding(9, 4), last=last)
    for samples, length in [(3, 5), (4, 6), (2, 5), (6, 2), (2, 2), (5, 5), (7, 1)]:
        x = draw(samples, length, 3)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        right, before = expected(model, losses), measurements.count
        if way == "backward":
            results = gradbatch.backward(model, losses(), BatchGrad())
        else:
            with gradbatch.compute(model, BatchGrad(), loss_reduction="sum") as results:
                losses().sum().backward()
        assert_results(results, right)
        assert measurements.count == before or (samples, length) in [(3, 5), (4, 6)]


def test_another_graph_is_measured_anew(measurements: Measurements) -> None:
    model = perceptron()
    step = lambda *axes: gradbatch.per_sample_grads(model, sum_of_squares(model(draw(*axes, 3))))  # noqa: E731
    assert [measurements.of(lambda: step(4)) for _ in range(3)] == [1, 1, 0]
    assert [measurements.of(lambda: step(4, 2)) for _ in range(3)] == [1, 1, 0]
    assert measurements.of(lambda: step(4)) == 0


def test_now_and_then_all_is_measured_again(measurements: Measurements) -> None:
    model, x = perceptron(), draw(4, 3)
    for _ in range(2 * STEPS):
        gradbatch.per_sample_grads(model, sum_of_squares(model(x)))
    assert measurements.count == 4


@pytest.mark.parametrize("how", ["remember=False", "extended again", "retracted and extended"])
def test_there_is_a_way_to_measure_in_every_step(measurements: Measurements, how: str) -> None:
    model, x = perceptron(), draw(4, 3)
    for _ in range(4):
        if how == "retracted and extended":
            gradbatch.retract(model)
        gradbatch.extend(model, remember=how != "remember=False")
        assert measurements.of(lambda: gradbatch.per_sample_grads(model, sum_of_squares(model(x)))) == 1


# Each is regular in the first batches and not in the last: by the values of a tensor, which no structure shows.
def sorted_by_length(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    order = torch.argsort(lengths, descending=True, stable=True)
    inside = (torch.arange(5) < lengths[order, None])[..., None]
    return self.b((torch.tanh(self.a(x)[order]) * inside).sum(1))[torch.argsort(order)]


def pooled_graphs(self: nn.Module, x: Tensor, graphs: Tensor) -> Tensor:
    nodes = torch.tanh(self.a(x.flatten(0, 1)))
    return self.b(torch.zeros(4, 4, dtype=x.dtype).index_add(0, graphs, nodes))


def permuted(self: nn.Module, x: Tensor, order: Tensor) -> Tensor:
    return self.b(torch.tanh(self.a(x))[order]).sum(1)[order]


def summed(self: nn.Module, x: Tensor, axes: Sequence[int]) -> Tensor:
    return self.b(torch.tanh(self.a(x))).sum(tuple(axes)).unsqueeze(1)


CHANGES: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "sorted by length": (sorted_by_length, torch.tensor([5, 5, 5, 5]), torch.tensor([2, 5, 3, 4])),
    "graphs of equal size": (
        pooled_graphs,
        torch.arange(4).repeat_interleave(4),
        torch.tensor([0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3]),
    ),
    "a permutation": (permuted, torch.arange(4), torch.tensor([2, 0, 3, 1])),
    "another axis": (summed, (1, 2), (0, 2)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_batches_that_were_regular_by_chance_are_not_relied_on(kind: str) -> None:
    forward, usual, other = CHANGES[kind]
    steps = 4 if kind in ("graphs of equal size", "another axis") else 5
    model = wired(lambda self, x, how: forward(self, x, how), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    for how in [usual, usual, usual, other, usual, other]:
        x = draw(4, steps, 3)
        losses = lambda: sum_of_squares(model(x, how))  # noqa: E731, B023
        assert_results(gradbatch.backward(model, losses(), BatchGrad()), expected(model, losses))


def test_coupling_that_sets_in_later_is_noticed() -> None:
    """A weight that warms up: zero at first."""
    model = perceptron()
    for weight in (0.0, 0.0, 0.0, 0.5):
        hidden = model(draw(4, 3))
        losses = hidden.square().sum(1) + weight * (hidden * hidden.mean(0)).sum(1)
        if weight:
            with pytest.raises(CoupledSamples):
                gradbatch.per_sample_grads(model, losses)
        else:
            gradbatch.per_sample_grads(model, losses)


def test_a_mask_that_opens_later_is_noticed() -> None:
    model = perceptron()
    for mask in (torch.eye(4), torch.eye(4), torch.eye(4), torch.ones(4, 4)):
        hidden = model(draw(4, 3))
        mixed = (hidden @ hidden.T).masked_fill(mask == 0, -torch.inf).softmax(1) @ hidden
        if mask.all():
            with pytest.raises(CoupledSamples):
                gradbatch.per_sample_grads(model, sum_of_squares(mixed))
        else:
            gradbatch.per_sample_grads(model, sum_of_squares(mixed))


@pytest.mark.parametrize("samples", [2, 4])
def test_what_follows_from_the_operations_is_so(samples: int) -> None:
    """Of every node of a network that the propagation is certain of: a loss's weight reaches that sample's elements."""
    model, ones = network(), torch.ones(samples, dtype=torch.float64)
    losses, weights = sum_of_squares(model(draw(samples, 5, 3))), draw(samples)
    walk = checkpoints.walk([graph.node_of(losses)], list(model.parameters()))
    nodes = list(walk.order())
    certain = propagate(nodes, [graph.shapes(node) for node in nodes], {(0, 0): Run(1, 1)}, samples).certain
    assert len(certain) > 20
    for (at, number), run in certain.items():
        node = nodes[at]
        edge = torch.autograd.graph.GradientEdge(node, number)
        plain, weighted = (
            torch.autograd.grad(losses, [edge], w, retain_graph=True)[0].flatten() for w in (ones, weights)
        )
        owner = torch.arange(len(plain)) // run.inner % samples
        torch.testing.assert_close(weighted, plain * weights[owner], msg=str(node))


def test_runs_are_places_in_memory_order() -> None:
    for layout, shape in (
        (SampleLayout(2, 0, 1), (2, 3)),
        (SampleLayout(2, 0, 3), (6, 4)),
        (SampleLayout(3, 1, 2), (5, 12, 2)),
    ):
        run = Run.of(layout, shape)
        assert run is not None and run.axis(shape, layout.samples) == layout.axis
        owner = layout.owner(shape[layout.axis or 0])
        spread = owner.view(-1, *(1,) * (len(shape) - (layout.axis or 0) - 1)).expand(shape).flatten()
        assert torch.equal(torch.arange(len(spread)) // run.inner % layout.samples, spread)


def test_the_memory_goes_with_the_model() -> None:
    model = perceptron()
    gradbatch.per_sample_grads(model, sum_of_squares(model(draw(4, 3))))
    memory = memory_of(model)
    assert memory is memory_of(model)
    gradbatch.extend(model)
    assert memory_of(model) is not memory


def test_what_samples_shared_in_earlier_batches_may_be_their_own_later() -> None:
    def forward(self: nn.Module, x: Tensor, table: Tensor | None) -> Tensor:
        return torch.tanh(self.a(x) + (self.table if table is None else table) * self.a.bias).sum(1)

    model = wired(forward, a=nn.Linear(4, 4))
    model.register_buffer("table", draw(5, 4))
    for table in [None, None, None, draw(3, 5, 4), None, draw(3, 5, 4)]:
        x = draw(3, 5, 4)
        losses = lambda: sum_of_squares(model(x, table))  # noqa: E731, B023
        assert_results(gradbatch.backward(model, losses(), BatchGrad()), expected(model, losses))


@pytest.mark.parametrize("where", ["an input", "an output that is kept"])
@pytest.mark.parametrize("when", ["put on later", "acts later"])
def test_hooks_at_layers_that_mix_samples_later_are_noticed(when: str, where: str) -> None:
    acts, kept = False, []

    def hook(gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0) if acts else gradient

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        output = self.a(x)
        hidden = torch.tanh(output)
        if acts or when == "acts later":
            (hidden if where == "an input" else output).register_hook(hook)
            kept[:] = [output] if where == "an output that is kept" else []
        return self.b(hidden)

    model = wired(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    for _ in range(4):
        x = draw(3, 4)
        losses = lambda: sum_of_squares(model(x))  # noqa: E731, B023
        assert_results(gradbatch.backward(model, losses(), BatchGrad()), expected(model, losses))
    acts = True
    with pytest.raises(CoupledSamples):
        gradbatch.backward(model, sum_of_squares(model(draw(3, 4))), BatchGrad())


def test_hooks_that_only_look_do_not_make_every_step_be_measured(measurements: Measurements) -> None:
    seen: list[Sequence[Tensor | None]] = []

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        torch.autograd.graph.register_multi_grad_hook([hidden], seen.append)
        return self.b(hidden)

    model = wired(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    step = lambda: gradbatch.per_sample_grads(model, sum_of_squares(model(draw(3, 4))))  # noqa: E731
    assert [measurements.of(step) for _ in range(4)] == [1, 1, 0, 0]
    assert seen
