"""Noise has the distribution that accounting assumes, comes once, and in secure mode leaves no low bits."""

import math
import os

import pytest
import torch

from gradbatch import privacy
from gradbatch.errors import UsageError
from gradbatch.privacy.randomness import system_normal, system_uniform

# The operating system's numbers differ from run to run. So each bound on a statistic is passed by a correct sampler but
# once in a billion runs: 6.1 standard deviations, or the quantile of Kolmogorov's distribution.
DEVIATIONS, KOLMOGOROV = 6.1, 3.28
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def seeded(device, seed=0):
    return torch.Generator(device).manual_seed(seed)


def modes(device):
    return [
        privacy.GaussianNoise(seeded(device)),
        privacy.GaussianNoise(),
        privacy.GaussianNoise(secure=True),
    ]


def assert_normal(numbers, std):
    """Mean, variance, third and fourth moment, and the whole distribution function."""
    z, n = (numbers.double().cpu() / std).flatten(), numbers.numel()
    for moment, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(z.pow(moment).mean() - expected) < DEVIATIONS * math.sqrt(variance / n), moment
    cdf = torch.special.ndtr(z.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum((cdf - steps[:-1]).abs().max(), (cdf - steps[1:]).abs().max())
    assert distance * math.sqrt(n) < KOLMOGOROV


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["generator", "seeded by the system", "secure"])
@pytest.mark.parametrize("std", [1.0, 3e-4, 1e5])
def test_noise_is_gaussian(mode, std, device):
    noise = modes(device)[mode]
    assert_normal(noise.draw((300, 1000), std, device=device), std)
    gradient = torch.zeros(1000, 300, device=device)
    noise.add_to([gradient], std)
    assert_normal(gradient, std)


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["generator", "seeded by the system", "secure"])
def test_noise_is_independent_between_elements_tensors_and_calls(mode, device):
    noise = modes(device)[mode]
    first, second = torch.zeros(200_000, device=device), torch.zeros(200_000, device=device)
    noise.add_to([first, second], 1.0)
    third = noise.draw((200_000,), 1.0, device=device)
    bound = DEVIATIONS / math.sqrt(200_000)
    for one, other in [(first, second), (first, third), (second, third)]:
        assert abs((one * other).mean()) < bound
    for apart in (1, 2, 3, 100_000, 1 << 17):
        assert abs((first[apart:] * first[:-apart]).sum() / 200_000) < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("secure", [False, True])
def test_a_sum_keeps_dtype_shape_strides_and_identity(dtype, secure, device):
    gradient = torch.arange(12, dtype=dtype, device=device).view(3, 4).t()
    before, version = gradient.clone(), gradient._version
    privacy.GaussianNoise(secure=secure).add_to([gradient], 0.5)
    assert gradient.dtype == dtype and gradient.stride() == (1, 4) and gradient._version > version
    difference = (gradient - before).double()
    assert 0 < difference.abs().max() < 5 and difference.unique().numel() > 6


def test_noise_in_half_precision_is_drawn_in_float32_and_rounded_once(device):
    # In bfloat16, 256 has neighbours 2 apart: noise that was rounded before it is added falls on ties.
    gradient = torch.full((10_000,), 256.0, dtype=torch.bfloat16, device=device)
    privacy.GaussianNoise(seeded(device)).add_to([gradient], 3.0)
    noise = privacy.GaussianNoise(seeded(device)).draw((10_000,), 3.0, device=device)
    torch.testing.assert_close(gradient, (256.0 + noise).to(torch.bfloat16), rtol=0, atol=0)


def test_the_parts_of_complex_numbers_get_noise_each(device):
    gradient = torch.zeros(200_000, dtype=torch.complex64, device=device)
    privacy.GaussianNoise(seeded(device)).add_to([gradient], 2.0)
    assert_normal(gradient.real, 2.0)
    assert_normal(gradient.imag, 2.0)


def test_each_tensor_has_its_standard_deviation_and_zero_leaves_it_alone(device):
    gradients = [
        torch.zeros(50_000, device=device),
        torch.ones(3, device=device),
        torch.zeros(50_000, device=device),
    ]
    version = gradients[1]._version
    privacy.GaussianNoise(seeded(device)).add_to(gradients, [1.0, 0.0, 10.0])
    assert_normal(gradients[0], 1.0)
    assert_normal(gradients[2], 10.0)
    assert gradients[1].tolist() == [1, 1, 1] and gradients[1]._version == version


def test_a_generator_makes_noise_repeatable_and_others_differ(device):
    def drawn(noise):
        gradients = [torch.zeros(5, device=device), torch.zeros(2, 2, dtype=torch.float64, device=device)]
        noise.add_to(gradients, 1.0)
        return torch.cat([gradient.double().flatten() for gradient in gradients])

    same = [drawn(privacy.GaussianNoise(seeded(device))) for _ in range(2)]
    torch.testing.assert_close(*same, rtol=0, atol=0)
    torch.manual_seed(0)
    others = [drawn(noise) for noise in modes(device)[1:] + modes(device)[1:]]
    torch.manual_seed(0)  # noise does not follow the seed of the script
    others.append(drawn(privacy.GaussianNoise()))
    for index, one in enumerate([same[0], *others]):
        assert all((one - other).abs().max() > 1e-6 for other in [same[0], *others][:index])


@pytest.mark.parametrize("given", [True, False])
def test_a_state_goes_on_with_the_same_noise(given, device):
    noise = privacy.GaussianNoise(seeded(device, 7) if given else None)
    noise.draw((3,), 1.0, device=device)
    state = noise.state_dict()
    after = noise.draw((3,), 1.0, device=device)
    resumed = privacy.GaussianNoise(seeded(device, 8) if given else None)
    resumed.load_state_dict(state)
    torch.testing.assert_close(resumed.draw((3,), 1.0, device=device), after, rtol=0, atol=0)


def test_a_state_of_another_mode_is_refused():
    secure = privacy.GaussianNoise(secure=True)
    secure.load_state_dict(secure.state_dict())
    with pytest.raises(UsageError, match="secure=True, this noise has False"):
        privacy.GaussianNoise().load_state_dict(secure.state_dict())
    fresh = privacy.GaussianNoise().state_dict()
    with pytest.raises(UsageError, match=r"generators on \[\], this noise has one on cpu"):
        privacy.GaussianNoise(seeded("cpu")).load_state_dict(fresh)


@pytest.mark.parametrize("std", [1.0, 0.3, 1.999, 2.0, 1e-6, 77.0])
def test_secure_sums_are_multiples_of_a_grid_that_float64_resolves_and_the_noise_does_not_show(std, device):
    sums = torch.rand(20_000, dtype=torch.float64, device=device) * 10 * std
    noised = sums.clone()
    privacy.GaussianNoise(secure=True).add_to([noised], std)
    grid = 2.0 ** (math.floor(math.log2(std)) - 20)
    assert grid <= std * 2**-20 < 2 * grid
    multiples = noised / grid
    assert torch.equal(multiples, multiples.round())
    assert (multiples % 2).mean() == pytest.approx(0.5, abs=0.05)  # and of no coarser one
    assert_normal(noised - sums, std)


def test_what_comes_before_the_grid_is_not_seen_after_it(monkeypatch, device):
    """Two sums that differ by less than the grid resolves give the same result from the same bits of the system."""
    state = torch.Generator()

    def repeatable(count):
        return bytes(torch.randint(256, (count,), dtype=torch.uint8, generator=state).tolist())

    monkeypatch.setattr(os, "urandom", repeatable)
    results = []
    for offset in (0.0, 2.0**-45):
        state.manual_seed(0)
        gradient = torch.full((1000,), 0.25 + offset, dtype=torch.float64, device=device)
        privacy.GaussianNoise(secure=True).add_to([gradient], 1.0)
        results.append(gradient)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_numbers_of_the_system_are_uniform_and_reach_both_ends(monkeypatch):
    uniform = system_uniform(300_000)
    steps = torch.arange(300_000, dtype=torch.float64) / 300_000
    assert (uniform.sort().values - steps).abs().max() * math.sqrt(300_000) < KOLMOGOROV
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    assert system_uniform(2).tolist() == [0, 0]
    assert system_normal(2).tolist() == pytest.approx([8.29, 8.29], abs=0.01)
    monkeypatch.setattr(os, "urandom", lambda count: b"\xff" * count)
    assert system_uniform(1).item() == 1 - 2.0**-53
    assert system_normal(1).item() == pytest.approx(-(2.0**-54) * math.sqrt(2 * math.pi), rel=1e-6)


@pytest.mark.parametrize("secure", [False, True])
def test_nothing_to_draw_for_is_no_error(secure, device):
    noise = privacy.GaussianNoise(secure=secure)
    noise.add_to([], 1.0)
    empty, scalar = torch.zeros(0, 3, device=device), torch.zeros((), device=device)
    noise.add_to([empty, scalar], 1.0)
    assert scalar != 0
    assert noise.draw((0,), 1.0).shape == (0,) and noise.draw((), 1.0).shape == ()
    assert noise.draw((2,), 0.0).tolist() == [0, 0]


def test_gradients_that_require_grad_take_noise_and_record_nothing(device):
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    privacy.GaussianNoise().add_to([parameter], 1.0)
    assert parameter.is_leaf and parameter.abs().sum() > 0


@pytest.mark.parametrize("std", [-1.0, math.inf, math.nan, "1", None])
def test_a_standard_deviation_is_finite_and_not_negative(std):
    gradient = torch.zeros(2)
    for call in (
        lambda noise: noise.draw((2,), std),
        lambda noise: noise.add_to([gradient, gradient], [1.0, std]),
    ):
        with pytest.raises(UsageError, match="standard deviation of the noise is"):
            call(privacy.GaussianNoise())
    assert gradient.tolist() == [0, 0]


def test_what_takes_no_noise_is_refused_before_anything_is_changed():
    gradient, noise = torch.zeros(2), privacy.GaussianNoise()
    with pytest.raises(UsageError, match=r"dtype torch.int64 and shape \[3\]"):
        noise.add_to([gradient, torch.zeros(3, dtype=torch.int64)], 1.0)
    with pytest.raises(UsageError, match="noise falls on its zeros too"):
        noise.add_to([gradient, torch.zeros(2, 2).to_sparse()], 1.0)
    with pytest.raises(UsageError, match="1 standard deviations for 2 tensors"):
        noise.add_to([gradient, gradient], [1.0])
    with pytest.raises(UsageError, match=r"dtype torch\.int32"):
        noise.draw((2,), 1.0, dtype=torch.int32)
    with pytest.raises(UsageError, match="either a generator or secure=True"):
        privacy.GaussianNoise(torch.Generator(), secure=True)
    assert gradient.tolist() == [0, 0]
