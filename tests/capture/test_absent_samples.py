"""Samples without a gradient hide how samples depend on each other: right or refused all the same.

The dead sample of a batch is right if its gradients are those of a batch of its own, as the others' are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradbatch
from gradbatch import BatchGrad, CoupledSamples
from gradbatch.capture import graph, paths
from gradbatch.capture.elements import NOBODY, SEVERAL, intersection, of_operand, traced, union
from gradbatch.capture.reach import Reach
from tests.capture.absent_models import APART, COUPLED, KILLS, C, Network, Positive, T, losses_of
from tests.capture.reference import WAYS, assert_refused, assert_results, draw
from tests.oracle import trainable
from tests.random_network_trial import Trial

# What moves samples about mostly has no rule.
pytestmark = pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")


def one_by_one(model: Network, kill: str, x: Tensor, which: Tensor, dead: Tensor) -> dict[str, Tensor]:
    """Each sample's gradients in a batch of its own."""
    parameters, found = trainable(model), []
    for n in range(len(x)):
        loss = losses_of(model, kill, x[n : n + 1], which[n : n + 1], dead[n : n + 1]).sum()
        found.append(
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        )
    columns = zip(*found, strict=True)
    return {name: torch.stack(column) for name, column in zip(parameters, columns, strict=True)}


def one_of(cases: Sequence[tuple[int, list[int]]], mix: str, kill: str) -> tuple[int, list[int]]:
    """A case for each pair, so that all come up."""
    return cases[(len(mix) + list(KILLS).index(kill)) % len(cases)]


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("mix", COUPLED)
def test_a_coupling_is_refused_even_if_all_but_some_are_dead(mix: str, kill: str) -> None:
    count, live = one_of([(2, [0]), (2, [1]), (3, [1]), (5, [0, 3])], mix, kill)
    model = gradbatch.extend(Network(COUPLED[mix], KILLS[kill]))
    x, which = draw(count, T, C), torch.arange(count)
    dead = ~torch.isin(which, torch.tensor(live))
    losses = lambda: losses_of(model, kill, x, which, dead)  # noqa: E731
    assert_refused(model, losses, CoupledSamples, "samples_coupled|eval")


def test_the_refusal_says_that_samples_are_missing() -> None:
    model = gradbatch.extend(Network(COUPLED["neighbour"], KILLS["relu"]))
    dead = torch.tensor([False, True])
    losses = losses_of(model, "relu", draw(2, T, C), torch.arange(2), dead)
    with pytest.raises(CoupledSamples, match=r"first \(Linear\).*\(some of which have none in this batch\)"):
        gradbatch.per_sample_grads(model, losses)


@pytest.mark.parametrize("mix", ["neighbour", "mean of the batch"])
def test_where_it_is_allowed_a_dead_sample_changes_nothing(mix: str) -> None:
    model = gradbatch.extend(Network(COUPLED[mix], KILLS["relu"]))
    x, which, dead = draw(2, T, C), torch.arange(2), torch.tensor([False, True])
    losses = losses_of(model, "relu", x, which, dead)
    found = gradbatch.backward(model, losses, BatchGrad(), samples_coupled="allow")[BatchGrad]
    (right,) = torch.autograd.grad(losses[0], model.first.weight)
    torch.testing.assert_close(found["first.weight"], torch.stack([right, torch.zeros_like(right)]))


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("mix", APART)
def test_a_model_that_keeps_samples_apart_is_right_whoever_is_dead(mix: str, kill: str) -> None:
    count, live = one_of([(1, []), (2, [0]), (2, [1]), (3, [1]), (5, [0, 3]), (4, [])], mix, kill)
    model = gradbatch.extend(Network(APART[mix], KILLS[kill]))
    x, which = draw(count, T, C), torch.arange(count)
    dead = ~torch.isin(which, torch.tensor(live, dtype=torch.long))
    right = one_by_one(model, kill, x, which, dead)
    for way in WAYS.values():
        found = way(model, lambda: losses_of(model, kill, x, which, dead))
        assert_results(found, right)


@pytest.mark.parametrize("mix", APART)
@pytest.mark.parametrize("remember", [True, False])
def test_others_may_be_dead_in_each_step(mix: str, remember: bool) -> None:
    model = gradbatch.extend(Network(APART[mix], KILLS["relu"]), remember=remember)
    which = torch.arange(3)
    for step in range(4):
        x, dead = draw(3, T, C), (which + step) % 4 < 2
        right = one_by_one(model, "relu", x, which, dead)
        found = gradbatch.per_sample_grads(model, losses_of(model, "relu", x, which, dead))
        for name, gradient in right.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


def test_with_several_losses_a_sample_too() -> None:
    for mixes, refused in ((APART, False), (COUPLED, True)):
        for mix in mixes.values():
            model = gradbatch.extend(Network(mix, KILLS["relu"]))
            x, which, dead = draw(3, T, C), torch.arange(3), torch.tensor([True, False, True])
            losses = losses_of(model, "relu", x, which, dead)
            run = lambda: gradbatch.backward(  # noqa: E731
                model,  # noqa: B023
                torch.cat([0.25 * losses, 0.75 * losses]),  # noqa: B023
                BatchGrad(),
                sample_ids=torch.arange(3).repeat(2),
            )
            if refused:
                with pytest.raises(CoupledSamples):
                    run()
                continue
            found = run()[BatchGrad]
            for name, gradient in one_by_one(model, "relu", x, which, dead).items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
def test_zeros_are_not_handed_to_a_sample_that_is_not_finite_elsewhere(way: str) -> None:
    # As many positions as samples: where one sample alone goes into a call, each position looks like another sample.
    model = gradbatch.extend(Network(lambda self, h: self.second(h), KILLS["relu"]))
    model.forward = lambda x: torch.stack([model.head(row)[:1] for row in x]).flatten(1)
    x = draw(3, 3, C)
    right = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), model.head.weight)[0] for n in range(3)]
    x[0, 1] = float("nan")  # a position of which nothing becomes
    found = WAYS[way](model, lambda: model(x).square().sum(1))[BatchGrad]["head.weight"]
    torch.testing.assert_close(found[1:], torch.stack(right[1:]))


def test_the_network_that_was_accepted_and_wrong() -> None:
    # Of two coupled samples one alone has a gradient in its second batch.
    trial = Trial(101499, coupled=True)
    for way in ("backward", "compute"):
        assert trial.outcome(way).startswith("refused: coupled")


# ---- maps of elements to samples


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("several", [False, True])
def test_samples_are_told_apart_by_the_sets_that_reach_an_element(samples: int, several: bool) -> None:
    for _ in range(20):
        owner = torch.randint(NOBODY, samples, (40,))
        if several:
            owner[torch.rand(40) < 0.1] = SEVERAL
        depends = torch.rand(30, 40) < 0.04
        found = traced({0: owner}, lambda masks: {0: (depends & masks[0]).any(1)})  # noqa: B023
        for element, line in zip(found[0].tolist(), depends, strict=True):
            reaching = set(owner[line].tolist()) - {NOBODY}
            assert element == (NOBODY if not reaching else reaching.pop() if len(reaching) == 1 else SEVERAL)


def test_maps_are_joined_as_sets_are() -> None:
    sets = {NOBODY: set(), 0: {0}, 1: {1}, SEVERAL: {0, 1}}
    number = {frozenset(samples): owner for owner, samples in sets.items()}
    for first, second in itertools.product(sets, repeat=2):
        one, other = torch.tensor([first]), torch.tensor([second])
        assert union(one, other).item() == number[frozenset(sets[first] | sets[second])]
        assert intersection(one, other).item() == number[frozenset(sets[first] & sets[second])]
    assert of_operand(torch.tensor([[0, NOBODY], [1, 1]]), (1, 2)).tolist() == [[SEVERAL, 1]]
    assert of_operand(torch.tensor([[0, NOBODY], [1, 1]]), (2, 1)).tolist() == [[0], [1]]


@pytest.mark.parametrize("function", [lambda h: h * torch.tensor([[1.0], [0.0]]), F.relu, Positive.apply])
def test_who_ends_at_a_node_is_followed_on_only_if_asked(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], requires_grad=True)
    losses = function(x).sum(1)
    walk = paths.walk([graph.node_of(losses)], [])
    leaf = next(node for node in walk.order() if graph.accumulated_variable(node) is x)
    roots = {(graph.node_of(losses), 0): torch.arange(2)}
    ends, goes_on = (
        Reach(walk, 2, by_value=True, revives=revives).owners(roots, [(leaf, 0)])[leaf, 0].tolist()
        for revives in (False, True)
    )
    assert ends == [[0, 0], [NOBODY, NOBODY]]
    assert goes_on == [[0, 0], [1, 1]]
