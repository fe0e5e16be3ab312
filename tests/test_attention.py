"""Attention, as each implementation has it, against the plain form; that against its definition."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer_jax.model.attention import BLOCK, TILE, Scoring, attend, mask, plain_attention
from minfer_jax.quant import cache, native

HEAD = 32
SCALE = 1.0 / math.sqrt(HEAD)


@functools.partial(jax.jit, static_argnums=(0, 8))
def compiled(kernels: bool, *args) -> jax.Array:
    del kernels
    return attend(*args)


def attended(*args) -> jax.Array:
    """`attend`, compiled once for plain XLA and once for the kernels, whichever set is chosen."""
    return compiled(native.isa() is not None, *args)


plain = jax.jit(plain_attention, static_argnums=6)


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
    k: cache.Cache,
    v: cache.Cache,
    layer: int,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: int,
    dtype: str = "float32",
    sinks: jax.Array | None = None,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(`attend`, `plain_attention`) of one layer of k and v."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    how = Scoring(window=window, scale=scale, softcap=softcap, dtype=dtype)
    found = attended(q, k, v, jnp.uint32(layer), q_positions, k_positions, sinks, how)
    k, v = jax.tree.map(lambda plane: plane[layer], (k, v))
    expected = plain(q, k, v, q_positions, k_positions, sinks, how)
    assert found.dtype == jnp.float32
    return np.asarray(found), np.asarray(expected)


@pytest.mark.parametrize(("softcap", "sunk"), [(0.0, False), (1.5, False), (1.5, True)])
def test_plain_form_is_the_definition(softcap: float, sunk: bool):
    q, k, v = random(0, 1, 3, 4, HEAD), random(1, 1, 2, 6, HEAD), random(2, 1, 2, 6, 8)
    sinks = random(3, 4) if sunk else None
    qp, kp, window = [3, 5, -1], [3, 4, 5, -1, 1, 2], 3
    how = Scoring(window=window, scale=SCALE, softcap=softcap)
    at, held = batch_of(np.array(qp)), batch_of(np.array(kp))
    found = plain_attention(q, k, v, at, held, sinks, how)
    expected = np.zeros((3, 4, 8))
    for t, p in enumerate(qp):
        seen = [s for s, o in enumerate(kp) if 0 <= o <= p and p - o < window]
        for head in range(4):
            if seen:  # 4 heads share 2 kv heads: 0 and 1 the first
                kh, vh = (np.asarray(a[0, head // 2], np.float64) for a in (k, v))
                scores = SCALE * kh[seen] @ np.asarray(q[0, t, head], np.float64)
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores)
                sink = 0.0 if sinks is None else np.exp(float(sinks[head]))
                expected[t, head] = (weights / (weights.sum() + sink)) @ vh[seen]
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
def test_attention_equals_the_plain_form(
    implementation: str, t: int, n_slots: int, heads: int, heads_kv: int, window: int
):
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


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), window=st.sampled_from([0, 5, 300]), t=st.sampled_from([1, 6]))
def test_any_positions(implementation: str, data: st.DataObject, window: int, t: int):
    n_slots = 2 * BLOCK + 8
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


# Heads of real models: size, queries of each kv head, kv heads; and odd ones.
HEADS = [
    pytest.param(64, 3, 3, id="smollm2-135m"),
    pytest.param(256, 4, 1, id="gemma3-270m"),
    pytest.param(64, 7, 2, id="qwen2.5-0.5b"),
    pytest.param(128, 2, 8, id="qwen3-0.6b"),
    pytest.param(96, 1, 2, id="96"),
    pytest.param(80, 4, 2, id="phi-2"),
    pytest.param(32, 5, 1, id="five-queries"),
    pytest.param(160, 8, 1, id="eight-queries"),
]


def cached(x: jax.Array, kind: str) -> cache.Cache:
    """Rows [..., H] in a type of cache."""
    return cache.rounded(x, cache.empty(x.shape[-1:], kind))


@pytest.mark.parametrize("kind", cache.TYPES)
@pytest.mark.parametrize(("h", "groups", "heads_kv"), HEADS)
def test_heads_and_caches(kernels: str, h: int, groups: int, heads_kv: int, kind: str):
    if kind == cache.Q8_0 and h % cache.BLOCK:
        pytest.skip("q8_0 does not take heads of this size")
    n_slots = 300
    k, v = (cached(random(i, 1, 2, heads_kv, n_slots, h), kind) for i in (1, 2))
    k_positions = batch_of(slots(1000, n_slots), slots(40, n_slots))
    for t in (1, 19):
        q = random(0, 2, t, groups * heads_kv, h)
        q_positions = batch_of(np.arange(1001 - t, 1001), np.arange(41 - t, 41))
        found, expected = both(q, k, v, 0, q_positions, k_positions, 270)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
        found, expected = both(q, k, v, 0, q_positions, k_positions, 270, "bfloat16")
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2)


# A cap, sinks, values of another size than keys.

VARIANTS = [  # H, Hv, heads, kv heads, cap, whether there are sinks, cache
    pytest.param(64, 64, 8, 1, 0.0, True, "float16", id="gpt-oss"),
    pytest.param(128, 128, 4, 2, 2.0, False, "float16", id="gemma2"),
    pytest.param(192, 128, 4, 4, 0.0, False, "bfloat16", id="deepseek"),
    pytest.param(96, 32, 6, 2, 1.0, True, "q8_0", id="all"),
    pytest.param(32, 80, 3, 1, 1.0, True, "float32", id="short-keys"),
    pytest.param(24, 40, 4, 2, 1.0, True, "float32", id="no-kernel"),
]


@pytest.mark.parametrize(("h", "h_v", "n", "heads_kv", "softcap", "sunk", "kind"), VARIANTS)
def test_variants_equal_the_plain_form(
    implementation: str,
    h: int,
    h_v: int,
    n: int,
    heads_kv: int,
    softcap: float,
    sunk: bool,
    kind: str,
):
    n_slots = BLOCK + 44
    k = cached(random(1, 2, 2, heads_kv, n_slots, h), kind)
    v = cached(random(2, 2, 2, heads_kv, n_slots, h_v), kind)
    sinks = 2 * random(3, n) if sunk else None
    held = batch_of(slots(n_slots + 20, n_slots), slots(40, n_slots))
    for t in (1, TILE + 3):
        q = 2 * random(0, 2, t, n, h)
        at = np.arange(n_slots + 21 - t, n_slots + 21), np.r_[np.arange(41)[-t:], [-1] * (t - 41)]
        found, expected = both(q, k, v, 1, batch_of(*at), held, 200, "float32", sinks, softcap)
        assert found.shape == (2, t, n, h_v)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert not found[1, 41:].any()


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    h=st.integers(1, 12),
    h_v=st.integers(1, 12),
    groups=st.integers(1, 9),
    heads_kv=st.integers(1, 3),
    t=st.sampled_from([1, 2, 9]),
    n_slots=st.integers(9, 140),
    softcap=st.sampled_from([0.0, 2.5]),
    sink=st.sampled_from([None, -np.inf, -50.0, 0.5, 50.0]),
)
def test_any_shape(
    kernels: str,
    h: int,
    h_v: int,
    groups: int,
    heads_kv: int,
    t: int,
    n_slots: int,
    softcap: float,
    sink: float | None,
):
    n = groups * heads_kv
    k, v = (random(i, 1, 1, heads_kv, n_slots, 16 * size) for i, size in ((1, h), (2, h_v)))
    sinks = None if sink is None else jnp.full(n, sink, jnp.float32)
    q, at = random(0, 1, t, n, 16 * h), batch_of(np.arange(n_slots - t, n_slots))
    held = batch_of(slots(n_slots - 1, n_slots))
    found, expected = both(q, k, v, 0, at, held, 0, "float32", sinks, softcap)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("t", [1, 5])
def test_a_cap_keeps_small_scores_and_bounds_large_ones(implementation: str, t: int):
    """tanh(x) is x near 0, whatever the cap; and 1 far from it."""
    k, v = random(1, 1, 1, 1, 300, HEAD), random(2, 1, 1, 1, 300, HEAD)
    at, held = batch_of(np.arange(290, 290 + t)), batch_of(slots(295, 300))
    q = random(0, 1, t, 2, HEAD)
    found, _ = both(q, k, v, 0, at, held, 0, softcap=1e5)
    free, _ = both(q, k, v, 0, at, held, 0)
    np.testing.assert_allclose(found, free, rtol=0, atol=2e-6)
    for size in (1.0, 30.0, 1e6):
        found, expected = both(size * q, k, v, 0, at, held, 0, softcap=3.0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("t", [1, 200])
def test_a_long_context(kernels: str, t: int):
    n_slots, newest = 2048, 1900
    k, v = random(1, 1, 1, 1, n_slots, 64), random(2, 1, 1, 1, n_slots, 64)
    q = 4 * random(0, 1, t, 3, 64)
    q_positions = batch_of(np.arange(newest + 1 - t, newest + 1))
    k_positions = batch_of(slots(newest, n_slots))
    for window in (0, 512):
        found, expected = both(q, k, v, 0, q_positions, k_positions, window)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("t", [1, 5])
def test_scores_of_any_size(implementation: str, t: int):
    """Far below the largest, weights vanish; a score of 1000 overflows nothing."""
    k, v = random(1, 1, 1, 1, 300, HEAD), random(2, 1, 1, 1, 300, HEAD)
    q_positions, k_positions = batch_of(np.arange(290, 290 + t)), batch_of(slots(295, 300))
    for size in (1e-20, 300.0, -300.0):
        q = size * random(0, 1, t, 2, HEAD)
        found, expected = both(q, k, v, 0, q_positions, k_positions, 0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("where", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("t", [1, 5])
def test_what_is_not_a_number_stays_none(implementation: str, t: int, where: str):
    q = random(0, 1, t, 2, HEAD)
    k, v = random(1, 1, 1, 2, 300, HEAD), random(2, 1, 1, 2, 300, HEAD)
    sinks = jnp.zeros(2, jnp.float32)
    at = {"q": (0, t - 1, 0, 3), "k": (0, 0, 0, 7, 3), "v": (0, 0, 0, 7, slice(None)), "sinks": 0}
    bad = {"q": q, "k": k, "v": v, "sinks": sinks}
    bad[where] = bad[where].at[at[where]].set(jnp.nan)
    q_positions, k_positions = batch_of(np.arange(290, 290 + t)), batch_of(slots(289 + t, 300))
    places = (0, q_positions, k_positions, 0, "float32")
    found, _ = both(bad["q"], bad["k"], bad["v"], *places, bad["sinks"], 5.0)
    good, _ = both(q, k, v, *places, sinks, 5.0)
    assert np.isnan(found[0, t - 1, 0]).all()  # the last query, of the first head
    np.testing.assert_array_equal(found[0, :, 1], good[0, :, 1])


@pytest.mark.parametrize("newest", [299, 300, 555, 10_000])
@pytest.mark.parametrize("t", [1, 20])
def test_a_ring_of_several_blocks(implementation: str, newest: int, t: int):
    window, n_slots = 270, 300
    q = random(0, 1, t, 2, HEAD)
    k, v = random(1, 1, 1, 1, n_slots, HEAD), random(2, 1, 1, 1, n_slots, HEAD)
    q_positions = batch_of(np.arange(newest + 1 - t, newest + 1))
    found, expected = both(q, k, v, 0, q_positions, batch_of(slots(newest, n_slots)), window)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_what_an_earlier_run_left_changes_nothing(implementation: str):
    q, k, v = random(0, 1, 2, 2, HEAD), random(1, 1, 1, 1, 600, HEAD), random(2, 1, 1, 1, 600, HEAD)
    q_positions, k_positions = batch_of(np.array([1, 2])), batch_of(slots(2, 600))
    found, _ = both(q, k, v, 0, q_positions, k_positions, 0)
    left = [a.at[:, :, :, 3:].set(-1e30) for a in (k, v)]
    again, _ = both(q, left[0], left[1], 0, q_positions, k_positions, 0)
    np.testing.assert_array_equal(again, found)


def test_a_row_that_sees_nothing_is_zero(implementation: str):
    q, k, v = random(0, 1, 3, 2, HEAD), random(1, 1, 1, 1, 300, HEAD), random(2, 1, 1, 1, 300, HEAD)
    nothing = np.full(300, -1)
    for sinks in (None, jnp.asarray([0.0, -jnp.inf], jnp.float32)):
        for at in ([-1, -1, -1], [0, 1, 2]):
            places = (0, batch_of(np.array(at)), batch_of(nothing), 0, "float32")
            found, expected = both(q, k, v, *places, sinks)
            assert not found.any()
            assert not expected.any()


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_rounded_factors(implementation: str, dtype: str, bound: float):
    q = random(0, 1, 5, 4, HEAD)
    k, v = random(1, 1, 1, 2, 300, HEAD), random(2, 1, 1, 2, 300, HEAD)
    narrow = k.astype(dtype), v.astype(dtype)
    q_positions, k_positions = batch_of(np.arange(290, 295)), batch_of(slots(294, 300))
    found, _ = both(q, *narrow, 0, q_positions, k_positions, 0, dtype)
    exact, _ = both(q, k, v, 0, q_positions, k_positions, 0)
    error = np.abs(found - exact).max()
    assert 0 < error < bound


@pytest.mark.parametrize(("window", "softcap", "sunk"), [(0, 0.0, False), (6, 1.5, True)])
def test_gradients_equal_those_of_the_plain_form(
    implementation: str, window: int, softcap: float, sunk: bool
):
    q = random(0, 1, 5, 4, HEAD)
    k, v = random(1, 2, 1, 2, 300, HEAD), random(2, 2, 1, 2, 300, 16)
    sinks = random(4, 4) if sunk else None
    q_positions = batch_of(np.array([7, 8, 9, -1, -1]))
    k_positions = batch_of(slots(9, 300))
    c = random(3, 1, 5, 4, 16)
    how = Scoring(window=window, scale=SCALE, softcap=softcap)

    def loss_blocked(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        out = attended(q, k, v, jnp.uint32(1), q_positions, k_positions, sinks, how)
        return jnp.sum(out * c)

    def loss_plain(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return jnp.sum(plain_attention(q, k[1], v[1], q_positions, k_positions, sinks, how) * c)

    found = jax.jit(jax.grad(loss_blocked, argnums=(0, 1, 2, 3)))(q, k, v, sinks)
    expected = jax.jit(jax.grad(loss_plain, argnums=(0, 1, 2, 3)))(q, k, v, sinks)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(b)).max() > 1e-3
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-6)
        assert np.isfinite(np.asarray(a)).all()
