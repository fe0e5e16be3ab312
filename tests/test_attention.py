"""Attention in blocks against the plain form, and the plain form against its definition."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.model.attention import BLOCK, TILE, attend, mask, plain_attention

HEAD = 16
SCALE = 1.0 / math.sqrt(HEAD)

blocked = jax.jit(attend, static_argnums=(6, 7, 8))
plain = jax.jit(plain_attention, static_argnums=(5, 6))


def random(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def slots(newest: int, n_slots: int) -> np.ndarray:
    """What the slots hold once positions 0 to `newest` were written, each to slot p % S."""
    held = np.full(n_slots, -1, np.int32)
    for p in range(max(0, newest + 1 - n_slots), newest + 1):
        held[p % n_slots] = p
    return held


def batch_of(*rows: np.ndarray) -> jax.Array:
    return jnp.asarray(np.stack(rows), jnp.int32)


def both(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: int,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: int,
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """(`attend`, `plain_attention`) of one layer of k and v."""
    at = jnp.int32(layer)
    found = blocked(q, k, v, at, q_positions, k_positions, window, SCALE, dtype)
    expected = plain(q, k[layer], v[layer], q_positions, k_positions, window, SCALE)
    assert found.dtype == jnp.float32
    return np.asarray(found), np.asarray(expected)


def test_plain_form_is_the_definition():
    q, k, v = random(0, 1, 3, 4, HEAD), random(1, 1, 2, 6, HEAD), random(2, 1, 2, 6, HEAD)
    qp, kp, window = [3, 5, -1], [3, 4, 5, -1, 1, 2], 3
    found = plain_attention(q, k, v, batch_of(np.array(qp)), batch_of(np.array(kp)), window, SCALE)
    expected = np.zeros((3, 4, HEAD))
    for t, p in enumerate(qp):
        seen = [s for s, o in enumerate(kp) if 0 <= o <= p and p - o < window]
        for head in range(4):
            if seen:  # 4 heads share 2 kv heads: 0 and 1 the first
                kh, vh = (np.asarray(a[0, head // 2], np.float64) for a in (k, v))
                scores = SCALE * kh[seen] @ np.asarray(q[0, t, head], np.float64)
                weights = np.exp(scores - scores.max())
                expected[t, head] = (weights / weights.sum()) @ vh[seen]
    np.testing.assert_allclose(np.asarray(found[0]), expected, rtol=0, atol=1e-6)


def test_mask_of_a_window():
    seen = mask(batch_of(np.array([4, -1])), batch_of(np.array([-1, 1, 2, 3, 4, 5])), 3)
    assert np.asarray(seen[0]).astype(int).tolist() == [[0, 0, 1, 1, 1, 0], [0] * 6]
    everything = mask(batch_of(np.array([4])), batch_of(np.array([-1, 1, 2, 3, 4, 5])), 0)
    assert np.asarray(everything[0, 0]).astype(int).tolist() == [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("t", "n_slots", "heads", "heads_kv", "window"),
    [
        (1, 7, 4, 2, 0),
        (1, 600, 4, 1, 0),
        (1, 600, 3, 3, 40),
        (5, BLOCK, 4, 4, 0),
        (5, 300, 6, 2, 8),
        (TILE, 300, 2, 1, 0),
        (TILE + 1, 300, 2, 1, 100),
        (TILE + 1, 2 * BLOCK + 1, 4, 2, 0),
        (300, 2 * BLOCK, 2, 2, 0),
        (300, 600, 2, 1, 30),
    ],
)
def test_blocks_equal_the_plain_form(t: int, n_slots: int, heads: int, heads_kv: int, window: int):
    q = random(0, 2, t, heads, HEAD)
    k, v = random(1, 2, 2, heads_kv, n_slots, HEAD), random(2, 2, 2, heads_kv, n_slots, HEAD)
    # One sequence fills its slots; the other is shorter, ends in padding, and leaves slots empty.
    short = max(t - 3, 1)
    full = np.arange(n_slots - t, n_slots)
    early = np.concatenate([np.arange(short), np.full(t - short, -1)])
    q_positions = batch_of(full, early)
    k_positions = batch_of(slots(n_slots - 1, n_slots), slots(short - 1, n_slots))
    found, expected = both(q, k, v, 1, q_positions, k_positions, window)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    assert not found[1, short:].any()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), window=st.sampled_from([0, 5, 300]))
def test_any_positions(data: st.DataObject, window: int):
    t, n_slots = 6, 2 * BLOCK + 8
    rows, held = [], []
    for _ in range(2):
        real = data.draw(st.integers(0, t))
        highest = 10_000 if window else n_slots - 1  # only a ring is ever written twice
        newest = data.draw(st.integers(max(real - 1, 0), highest)) if real else -1
        rows.append(np.r_[np.arange(newest + 1 - real, newest + 1), np.full(t - real, -1)])
        held.append(slots(newest, n_slots))
    q = random(0, 2, t, 4, HEAD)
    k, v = random(1, 1, 2, 2, n_slots, HEAD), random(2, 1, 2, 2, n_slots, HEAD)
    found, expected = both(q, k, v, 0, batch_of(*rows), batch_of(*held), window)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("newest", [299, 300, 555, 10_000])
@pytest.mark.parametrize("t", [1, 20])
def test_a_ring_of_several_blocks(newest: int, t: int):
    window, n_slots = 270, 300
    q = random(0, 1, t, 2, HEAD)
    k, v = random(1, 1, 1, 1, n_slots, HEAD), random(2, 1, 1, 1, n_slots, HEAD)
    q_positions = batch_of(np.arange(newest + 1 - t, newest + 1))
    found, expected = both(q, k, v, 0, q_positions, batch_of(slots(newest, n_slots)), window)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_what_an_earlier_run_left_changes_nothing():
    q, k, v = random(0, 1, 2, 2, HEAD), random(1, 1, 1, 1, 600, HEAD), random(2, 1, 1, 1, 600, HEAD)
    q_positions, k_positions = batch_of(np.array([1, 2])), batch_of(slots(2, 600))
    found, _ = both(q, k, v, 0, q_positions, k_positions, 0)
    left = [a.at[:, :, :, 3:].set(-1e30) for a in (k, v)]
    again, _ = both(q, left[0], left[1], 0, q_positions, k_positions, 0)
    np.testing.assert_array_equal(again, found)


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = random(0, 1, 3, 2, HEAD), random(1, 1, 1, 1, 300, HEAD), random(2, 1, 1, 1, 300, HEAD)
    nothing = np.full(300, -1)
    for q_positions in ([-1, -1, -1], [0, 1, 2]):
        found, expected = both(q, k, v, 0, batch_of(np.array(q_positions)), batch_of(nothing), 0)
        assert not found.any()
        assert not expected.any()


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_rounded_factors(dtype: str, bound: float):
    q = random(0, 1, 5, 4, HEAD)
    k, v = random(1, 1, 1, 2, 300, HEAD), random(2, 1, 1, 2, 300, HEAD)
    cached = k.astype(dtype), v.astype(dtype)
    q_positions, k_positions = batch_of(np.arange(290, 295)), batch_of(slots(294, 300))
    found, _ = both(q, *cached, 0, q_positions, k_positions, 0, dtype)
    exact, _ = both(q, k, v, 0, q_positions, k_positions, 0)
    error = np.abs(found - exact).max()
    assert 0 < error < bound


@pytest.mark.parametrize("window", [0, 6])
def test_gradients_equal_those_of_the_plain_form(window: int):
    q = random(0, 1, 5, 4, HEAD)
    k, v = random(1, 2, 1, 2, 300, HEAD), random(2, 2, 1, 2, 300, HEAD)
    q_positions = batch_of(np.array([7, 8, 9, -1, -1]))
    k_positions = batch_of(slots(9, 300))
    c = random(3, 1, 5, 4, HEAD)

    def loss_blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attend(q, k, v, jnp.int32(1), q_positions, k_positions, window, SCALE, "float32")
        return jnp.sum(out * c)

    def loss_plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(plain_attention(q, k[1], v[1], q_positions, k_positions, window, SCALE) * c)

    found = jax.jit(jax.grad(loss_blocked, argnums=(0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(loss_plain, argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(found, expected, strict=True):
        assert np.abs(np.asarray(b)).max() > 1e-3
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-6)
        assert np.isfinite(np.asarray(a)).all()
