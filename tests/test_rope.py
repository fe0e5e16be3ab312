"""Rotary position embedding: frequencies by hand, rotation as multiplication of complex numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.model.rope import RopeSpec, Yarn, frequencies, rotate


def test_plain_frequencies():
    found = frequencies(RopeSpec(base=10000.0, dims=8))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [1.0, 0.1, 0.01, 0.001], rtol=1e-7)


def test_linear_scaling_divides_all_of_them():
    found = frequencies(RopeSpec(base=10000.0, dims=8, freq_scale=1 / 4))
    np.testing.assert_allclose(found, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-7)


def test_factors_divide_each():
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    found = frequencies(RopeSpec(base=10000.0, dims=8), factors)
    np.testing.assert_allclose(found, [1.0, 0.05, 0.0025, 0.000125], rtol=1e-7)
    both = frequencies(RopeSpec(base=10000.0, dims=8, freq_scale=0.5), factors)
    np.testing.assert_allclose(both, found / 2, rtol=1e-7)


def yarn_by_hand(
    base: float, dims: int, factor: float, fast: float, slow: float, n_ctx: int
) -> list[float]:
    """Section 3.2 of the paper (Peng et al. 2023), with the ramp between whole pairs as in ggml."""

    def pair_that_turns(times: float) -> float:
        # The pair i whose wavelength 2 pi base^(2 i / dims) fits `times` times into the context.
        return dims / 2 * math.log(n_ctx / (2 * math.pi * times)) / math.log(base)

    low = max(math.floor(pair_that_turns(fast)), 0)
    high = min(math.ceil(pair_that_turns(slow)), dims - 1)
    out = []
    for i in range(dims // 2):
        theta = base ** (-2 * i / dims)
        if i <= low:
            interpolated = 0.0
        elif i >= high:
            interpolated = 1.0
        else:
            interpolated = (i - low) / (high - low)
        out.append(theta / factor * interpolated + theta * (1 - interpolated))
    return out


@pytest.mark.parametrize(
    ("base", "dims", "factor", "fast", "slow", "n_ctx"),
    [
        (1e4, 64, 4.0, 32.0, 1.0, 4096),
        (1e6, 128, 16.0, 32.0, 1.0, 16384),  # Ministral 3
        (1e6, 128, 4.0, 32.0, 1.0, 32768),  # Qwen 2.5
        (1e4, 16, 4.0, 4.0, 0.25, 64),
        (1e4, 16, 8.0, 32.0, 1.0, 16),  # even the fastest pair is interpolated in part
    ],
)
def test_yarn_frequencies(
    base: float, dims: int, factor: float, fast: float, slow: float, n_ctx: int
):
    yarn = Yarn(beta_fast=fast, beta_slow=slow, n_ctx_orig=n_ctx)
    found = frequencies(RopeSpec(base=base, dims=dims, freq_scale=1 / factor, yarn=yarn))
    expected = yarn_by_hand(base, dims, factor, fast, slow, n_ctx)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    plain = frequencies(RopeSpec(base=base, dims=dims))
    assert found[-1] == pytest.approx(plain[-1] / factor)
    assert np.all(found <= plain) and np.all(found >= plain / factor * (1 - 1e-6))


def test_yarn_where_nothing_is_interpolated():
    # Every pair turns more than beta_fast times, so the ramp has no width.
    yarn = Yarn(n_ctx_orig=10**9)
    found = frequencies(RopeSpec(base=10.0, dims=8, freq_scale=0.25, yarn=yarn))
    np.testing.assert_array_equal(found, frequencies(RopeSpec(base=10.0, dims=8)))


def rotated(x: np.ndarray, positions: np.ndarray, freq: np.ndarray, interleaved: bool):
    """In float64: each pair is a complex number, times e^(i angle)."""
    dims = 2 * len(freq)
    turn = np.exp(1j * positions[:, :, None, None] * freq.astype(np.float64))
    part = x[..., :dims].astype(np.float64)
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part[..., : dims // 2], part[..., dims // 2 :]
    z = (a + 1j * b) * turn
    out = x.astype(np.float64).copy()
    if interleaved:
        out[..., 0:dims:2], out[..., 1:dims:2] = z.real, z.imag
    else:
        out[..., : dims // 2], out[..., dims // 2 : dims] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dims", [16, 10, 2])
def test_rotation_of_all_or_the_first_dimensions(interleaved: bool, dims: int):
    x = np.random.default_rng(0).standard_normal((2, 4, 3, 16)).astype(np.float32)
    positions = np.array([[0, 1, 257, 4095], [7, 8, 9, -1]], np.int32)
    freq = frequencies(RopeSpec(base=10000.0, dims=dims))
    found = rotate(
        jnp.asarray(x),
        jnp.asarray(positions),
        jnp.asarray(freq),
        interleaved=interleaved,
        magnitude=1.0,
    )
    assert found.dtype == jnp.float32
    expected = rotated(x, positions, freq, interleaved)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=2e-3)  # of angle 4095
    near = positions < 1000
    np.testing.assert_allclose(np.asarray(found)[near], expected[near], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(found)[0, 0], x[0, 0])  # position 0
    np.testing.assert_array_equal(np.asarray(found)[..., dims:], x[..., dims:])


def test_magnitude_is_for_rotated_dimensions_only():
    x = jnp.ones((1, 1, 1, 8), jnp.float32)
    freq = jnp.asarray(frequencies(RopeSpec(base=10000.0, dims=4)))
    zero = jnp.zeros((1, 1), jnp.int32)
    found = rotate(x, zero, freq, interleaved=False, magnitude=1.5)
    np.testing.assert_allclose(np.asarray(found)[0, 0, 0], [1.5] * 4 + [1.0] * 4)


@settings(deadline=None)
@given(shift=st.integers(0, 2000), distance=st.integers(0, 100), interleaved=st.booleans())
def test_products_depend_on_the_distance_alone(shift: int, distance: int, interleaved: bool):
    x = np.random.default_rng(1).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    freq = jnp.asarray(frequencies(RopeSpec(base=10000.0, dims=16)))

    def at(part: int, position: int) -> np.ndarray:
        found = rotate(
            jnp.asarray(x[part]),
            jnp.full((1, 1), position, jnp.int32),
            freq,
            interleaved=interleaved,
            magnitude=1.0,
        )
        return np.asarray(found, np.float64)

    here, there = (np.sum(at(0, s + distance) * at(1, s)) for s in (0, shift))
    assert here == pytest.approx(there, abs=5e-3)
