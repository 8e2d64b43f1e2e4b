"""Couplings made to be missed: as faint, as regular and as well hidden under something loud as can be."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbatch
from gradbatch import CoupledSamples
from gradbatch.capture import owners
from gradbatch.capture.layouts import OwnerMap, Site
from gradbatch.capture.owners import Ownership
from gradbatch.rules import SampleLayout
from tests.capture.reference import assert_refused, draw, wired


def find_owners(gradients: Callable[[Tensor], list[list[Tensor]]], *arguments: Any) -> Ownership:
    """Find them in gradients that a function gives all at once."""

    def differentiate(weights: Tensor, take: owners.Take) -> None:
        for number, outputs in enumerate(gradients(weights)):
            take(number, list(outputs))

    return owners.find_owners(differentiate, *arguments)


def coupled(samples: int, couplings: Tensor, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """A linear layer, and losses ``y_n² + Σ_m couplings[n, m] y_m``: off the diagonal, they couple."""
    model = wired(lambda self, x: self.layer(x)[:, 0], layer=nn.Linear(3, 1)).to(dtype)
    output = model(draw(samples, 3, dtype=dtype))
    return model, output.square() + couplings.to(dtype) @ output


@pytest.mark.parametrize(
    "coefficients", [(2, -3, 1), (1, -2, 1), (1, 1, 1), (1, -1, 0), (4, -4, 1), (1, 0, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_contributions_that_cancel_in_the_sum_are_noticed(coefficients, dtype: torch.dtype) -> None:
    for owner, *others in itertools.permutations(range(4), 4):
        couplings = torch.zeros(4, 4)
        couplings[others, owner] = torch.tensor(coefficients, dtype=torch.float32)
        model, losses = coupled(4, couplings, dtype)
        with pytest.raises(CoupledSamples, match="layer"):
            gradbatch.per_sample_grads(model, losses)


@pytest.mark.parametrize("samples", [3, 5, 8, 16, 32, 48, 64, 100])
def test_two_equal_contributions_to_a_third_sample_are_noticed(samples: int) -> None:
    order = torch.randperm(samples)
    for first, second, owner in zip(order, order.roll(1), order.roll(2), strict=True):
        couplings = torch.zeros(samples, samples)
        couplings[[first, second], owner] = 1.0
        model, losses = coupled(samples, couplings)
        with pytest.raises(CoupledSamples):
            gradbatch.per_sample_grads(model, losses)


def test_every_pair_of_equal_contributions_is_noticed() -> None:
    # All of them, on the level of ownership: a gradient of 20 elements, one a sample, one of which two others add to.
    samples = 20
    own = draw(samples)
    missed = []
    for owner in range(samples):
        for first, second in itertools.combinations([n for n in range(samples) if n != owner], 2):

            def gradients(weights: Tensor, owner=owner, first=first, second=second) -> list[list[Tensor]]:
                result = own * weights
                result[owner] += weights[first] + weights[second]
                return [[result.unsqueeze(1)]]

            found = find_owners(gradients, [Site([1])], samples, own, {torch.float64})
            if found.owners[0] is not None:
                missed.append((owner, first, second))
    assert not missed


@pytest.mark.parametrize(
    ("dtype", "faintest"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("samples", [2, 3, 10, 40])
def test_faint_couplings_are_noticed(samples: int, dtype: torch.dtype, faintest: float) -> None:
    for strength in (1.0, 1e-2, faintest):
        for owner, other in ((0, samples - 1), (samples - 1, 0)):
            couplings = torch.zeros(samples, samples, dtype=torch.float64)
            couplings[other, owner] = strength
            model, losses = coupled(samples, couplings, dtype)
            with pytest.raises(CoupledSamples):
                gradbatch.per_sample_grads(model, losses)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("samples", [2, 3, 8])
@pytest.mark.parametrize("loud", [1e3, 1e8, 1e12])
def test_a_coupling_of_one_feature_under_a_loud_one_is_noticed(
    loud: float, samples: int, dtype: torch.dtype
) -> None:
    model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 2)).to(dtype)
    x = draw(samples, 3, dtype=dtype)
    assert_refused(
        model,
        lambda: loud * (y := model(x))[:, 0] + y[:, 1].mean(),
        CoupledSamples,
        "layer",
        ways=("backward",),
    )


@pytest.mark.parametrize("way", ["contrastive", "normalised", "pairs", "ranked", "centred"])
def test_losses_that_compare_samples_are_refused(way: str) -> None:
    model = wired(lambda self, x: self.layer(x), layer=nn.Linear(3, 4))
    output = model(draw(4, 3))
    similar = output @ output.T
    losses = {
        "contrastive": lambda: nn.functional.cross_entropy(similar, torch.arange(4), reduction="none"),
        "normalised": lambda: (norms := output.square().sum(1)) / norms.sum(),
        "pairs": lambda: similar.diagonal(1, 0, 1).repeat(2)[:4],
        "ranked": lambda: torch.relu(output[:, 0] - output[:, 0].roll(1) + 5.0),
        "centred": lambda: (output - output.mean(0)).square().sum(1),
    }[way]()
    with pytest.raises(CoupledSamples, match=r"layer \(Linear\)"):
        gradbatch.per_sample_grads(model, losses)


@pytest.mark.parametrize("samples", [2, 3, 5, 40])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_regular_layouts_are_found_and_no_other(samples: int, rows: int) -> None:
    for axis in (0, 1, 2):
        shape = [3, samples, 2]
        shape[axis] = samples * rows
        for stride in {1, rows}:
            layout = SampleLayout(samples, axis, stride)
            owner = layout.owner(shape[axis]).view(-1, *(1,) * (2 - axis))
            gradient = draw(*shape)
            found = find_owners(
                lambda weights, g=gradient, o=owner: [[g * weights[o]]],
                [Site([3])],
                samples,
                gradient,
                {torch.float64},
            )
            (chosen,) = found.owners
            assert isinstance(chosen, SampleLayout)
            assert torch.equal(chosen.sample_first(gradient), layout.sample_first(gradient))
            torch.testing.assert_close(found.gradients[0][0], gradient, rtol=0, atol=0)


def element_owners(found: SampleLayout | OwnerMap | None, shape: torch.Size) -> Tensor:
    """The sample that each element of a gradient is said to belong to."""
    if isinstance(found, OwnerMap):
        return found.owner.expand(shape)
    assert found is not None and found.axis is not None
    return found.owner(shape[found.axis]).view(-1, *(1,) * (len(shape) - found.axis - 1)).expand(shape)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("elements", [False, True])
@pytest.mark.parametrize("samples", [2, 3, 6])
def test_irregular_owners_are_found_and_never_given_a_regular_layout(
    samples: int, elements: bool, silent: bool
) -> None:
    for number in range(30):
        generator = torch.Generator().manual_seed(number)
        gradient = draw(2 * samples, 3)
        shape = gradient.shape if elements else (len(gradient), 1)
        owner = torch.randint(0, samples, shape, generator=generator).expand(gradient.shape)
        if silent:
            gradient[torch.randint(0, 2, gradient.shape, generator=generator).bool()] = 0.0
        found = find_owners(
            lambda weights, g=gradient, o=owner: [[g * weights[o]]],
            [Site([2 if elements else 1], elements=elements)],
            samples,
            gradient,
            {torch.float64},
        )
        (chosen,) = found.owners
        if not gradient.any():
            continue
        told = element_owners(chosen, gradient.shape)
        assert torch.equal(told[gradient != 0], owner[gradient != 0])
        if isinstance(chosen, OwnerMap):
            assert bool((chosen.owner[(gradient == 0).all(1)] == -1).all())
        torch.testing.assert_close(found.gradients[0][0], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("elements", [False, True])
@pytest.mark.parametrize("samples", [2, 3, 6])
def test_an_element_that_two_samples_share_belongs_to_nobody(samples: int, elements: bool) -> None:
    for number in range(30):
        generator = torch.Generator().manual_seed(number)
        gradient, other = draw(2 * samples, 3), draw(2 * samples, 3)
        owner = torch.randint(
            0, samples, gradient.shape if elements else (len(gradient), 1), generator=generator
        )
        row, column = int(torch.randint(0, 2 * samples, (), generator=generator)), number % 3
        second = (owner[row, column if elements else 0] + 1) % samples

        def gradients(
            weights: Tensor, g=gradient, o=owner, at=(row, column), s=second, h=other
        ) -> list[list[Tensor]]:
            result = g * weights[o]
            result[at] += h[at] * weights[s]
            return [[result]]

        site = Site([2 if elements else 1], elements=elements)
        found = find_owners(gradients, [site], samples, gradient, {torch.float64})
        assert found.owners == [None]


def test_of_the_tagged_passes_nothing_is_kept_that_is_regular() -> None:
    own, alive = draw(100, 3), list[int]()
    given: list[list[weakref.ref[Tensor]]] = []

    def gradients(weights: Tensor) -> list[list[Tensor]]:
        alive.append(sum(one() is not None for outputs in given for one in outputs))
        found = [[own * weights.unsqueeze(1)], [own.sum(1) * weights]]
        given.append([weakref.ref(outputs[0]) for outputs in found])
        return found

    sites = [Site([1]), Site([1])]
    found = find_owners(gradients, sites, 100, own, {torch.float64})
    assert found.owners == [SampleLayout(100), SampleLayout(100)]
    # One pass without tags, and two for each of the two digits of a number below 100.
    assert alive == [0, 2, 2, 2, 2]


def test_what_is_regular_in_the_first_passes_alone_is_measured_again_and_whole() -> None:
    own, passes = draw(100, 3), list[Tensor]()

    def gradients(weights: Tensor) -> list[list[Tensor]]:
        passes.append(weights)
        result = own * weights.unsqueeze(1)
        # A coupling that the last digit alone shows: zero as long as these two have the same one.
        result[0] += 1e-6 * (weights[1] / weights[0] - weights[3] / weights[2]) * own[1]
        return [[result]]

    found = find_owners(gradients, [Site([1])], 100, own, {torch.float64})
    assert found.owners == [None]
    assert len(passes) > 5
