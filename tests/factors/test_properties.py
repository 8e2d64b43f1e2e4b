"""Laws that hold for every structure, by hypothesis over sizes and structures."""

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradbatch.factors import Concat, Dense, OuterProduct, PerSampleGrad, RowScatter, Sum
from gradbatch.factors.cancellation import capped_sum, term_norms
from gradbatch.plans.contractions import Planner
from gradbatch.plans.convolutions import Patches, Window

sizes = st.integers(1, 4)
# An example is dear here: it evaluates most operations, some of them block by block.
fewer = settings(max_examples=max(1, settings.default.max_examples // 2))


@st.composite
def gradients(draw: st.DrawFn) -> PerSampleGrad:
    """Of any structure, also sums and micro-batches of them, with any budget and plan."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    n, groups, outputs, channels, kernel = (
        draw(st.integers(0, 5)),
        draw(sizes),
        draw(sizes),
        draw(sizes),
        draw(sizes),
    )
    shape = (groups * outputs, channels * kernel)

    def structure(samples: int) -> PerSampleGrad:
        kind = draw(st.sampled_from(["dense", "outer", "grouped", "patches", "scatter"]))
        positions = draw(st.integers(0, 4))
        if kind == "dense":
            return Dense(random(samples, *shape))
        if kind == "scatter":
            ids = torch.randint(-1, shape[0], (samples, positions))
            return RowScatter(ids, random(samples, positions, shape[1]), shape)
        if kind == "outer":
            left, right = random(samples, 1, shape[0], positions), random(samples, 1, shape[1], positions)
            return OuterProduct(left, right, shape)
        left = random(samples, groups, outputs, positions)
        if kind == "grouped":
            return OuterProduct(left, random(samples, groups, shape[1], positions), shape)
        stride = draw(sizes)
        source = random(samples, groups * channels, stride * positions + kernel)
        lazy = Patches(source, Window((kernel,), (stride,), (0,), (1,)), groups, (positions,))
        return OuterProduct(left, lazy, shape)

    def together(samples: int) -> PerSampleGrad:
        terms = [structure(samples) for _ in range(draw(st.integers(1, 3)))]
        return terms[0] if len(terms) == 1 else Sum(terms)

    cut = draw(st.integers(0, n))
    grad = Concat([together(cut), together(n - cut)]) if draw(st.booleans()) else together(n)
    plan = draw(st.sampled_from(["ghost", "dense"]))
    force = {"squared_norm": plan, "gram": plan, "inner": plan}
    return grad.with_planner(Planner(draw(st.sampled_from([400, 2**28])), force))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@fewer
@given(gradients(), st.data())
def test_permuting_samples_permutes_results(grad: PerSampleGrad, data: st.DataObject) -> None:
    index = torch.tensor(data.draw(st.permutations(range(grad.num_samples))), dtype=torch.int64)
    permuted = grad.select(index)
    close(permuted.squared_norm(), grad.squared_norm()[index])
    close(permuted.gram(grad), grad.gram()[index])
    close(permuted.sum(), grad.sum())
    close(permuted.select(index.argsort()).dense(), grad.dense())


@fewer
@given(gradients(), st.data())
def test_splitting_into_micro_batches_changes_nothing(grad: PerSampleGrad, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, grad.num_samples))
    index = torch.arange(grad.num_samples)
    halves = Concat([grad.select(index < cut), grad.select(index >= cut)])
    close(halves.dense(), grad.dense())
    close(halves.sum(), grad.sum())
    close(halves.gram(), grad.gram())
    close(halves.sum_of_squares(), grad.sum_of_squares())
    close(halves.inner(grad), halves.squared_norm())
    close((halves + grad).squared_norm(), 4 * grad.squared_norm())


@fewer
@given(gradients())
def test_norms_sums_and_products_agree(grad: PerSampleGrad) -> None:
    norms, gram = grad.squared_norm(), grad.gram()
    assert (norms >= 0).all()
    assert torch.equal(gram, gram.mT)
    close(gram.diagonal(), norms)
    close(grad.inner(grad), norms)
    close(grad.weighted_sum(torch.ones(grad.num_samples)), grad.sum())
    close(gram.sum(), grad.sum().square().sum())
    close(grad.dot(grad.sum()), gram.sum(1))
    close(grad.project(grad.dense()), gram)
    close(grad.sum_of_squares().sum(), norms.sum())
    close((grad + grad).squared_norm(), 4 * norms)


@fewer
@given(gradients(), st.integers(1, 3))
def test_regrouping_adds_samples_and_keeps_the_sum(grad: PerSampleGrad, k: int) -> None:
    repeated = grad.select(torch.arange(grad.num_samples).repeat_interleave(k))
    regrouped = repeated.regroup(k)
    close(regrouped.dense(), k * grad.dense())
    close(regrouped.squared_norm(), k**2 * grad.squared_norm())
    close(regrouped.gram(), k**2 * grad.gram())
    close(regrouped.sum(), repeated.sum())


@fewer
@given(gradients(), st.sampled_from([0.0, 0.25, 1.0, 3.0]))
def test_a_capped_sum_is_the_weighted_one_of_gradients_that_are_cut_to_their_norms(
    grad: PerSampleGrad, cap: float
) -> None:
    norms, weights = grad.squared_norm().sqrt(), random(grad.num_samples)
    close(capped_sum(grad, weights, cap * norms), min(cap, 1.0) * grad.weighted_sum(weights))


@fewer
@given(gradients())
def test_terms_are_together_at_least_as_long_as_their_sum(grad: PerSampleGrad) -> None:
    norms = grad.squared_norm().sqrt()
    assert (terms_of(grad) >= norms * (1 - 1e-12)).all()
    double = Sum([grad, grad.select(torch.arange(grad.num_samples))])
    assert (terms_of(double) >= 2 * norms * (1 - 1e-12)).all()


def terms_of(grad: PerSampleGrad) -> torch.Tensor:
    terms = term_norms(grad)
    return grad.squared_norm().sqrt() if terms is None else terms


@fewer
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), sizes, sizes)
def test_positions_that_cancel_keep_their_terms(
    n: int, groups: int, positions: int, kernel: int, stride: int
) -> None:
    torch.manual_seed(n)
    left, source = random(n, groups, 3, positions), random(n, 2 * groups, stride * positions + kernel)
    patches = Patches(source, Window((kernel,), (stride,), (0,), (1,)), groups, (positions,))
    right = patches.unfold()
    # A position adds one term, whose groups lie in different places of the gradient.
    terms = (left.norm(dim=2) * right.norm(dim=2)).square().sum(1).sqrt().sum(1) * (1 - 1e-12)
    for operand in (right, patches):
        grad = OuterProduct(left, operand, (3 * groups, right.shape[2]))
        assert (terms_of(grad) >= terms).all()
    ids, values = torch.zeros(n, positions, dtype=torch.int64), random(n, positions, 4)
    assert torch.equal(terms_of(RowScatter(ids, values, (2, 4))), values.norm(dim=2).sum(1))


def test_what_is_not_finite_adds_nothing_to_a_capped_sum() -> None:
    values = torch.tensor([[3.0, 4.0], [torch.nan, 0.0], [torch.inf, 1.0], [1e30, 0.0]])
    capped = capped_sum(Dense(values), torch.ones(4), torch.tensor([2.5, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(capped, torch.tensor([1.5, 2.0]))
