"""The types that keys and values are held in: rounding, sizes, writing, decoding with each."""

import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.model import kv_state as kv
from minfer_jax.model.attention import Scoring, attend
from minfer_jax.model.config import ModelConfig, ModelError
from minfer_jax.model.forward import forward
from minfer_jax.model.params import Linear, Params
from minfer_jax.quant import cache, native
from minfer_jax.quant.cache import Q8_0, Cache, Q8Cache
from minfer_jax.quant.native import calls
from minfer_jax.quant.qtensor import stack_blocks
from tests.conftest import KERNELS, XLA
from tests.helpers.tiny_models import load, tiny_model

GGML_Q8_0 = gguf.GGMLQuantizationType.Q8_0


def random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.cache
def model(arch: str = "gemma3", cache_type: str = Q8_0) -> tuple[ModelConfig, Params]:
    with tempfile.TemporaryDirectory() as folder:
        cfg, params = load(Path(folder), tiny_model(arch, head_dim=32))
    return dataclasses.replace(cfg, cache_dtype=cache_type), params


# Rounding.

rounded = jax.jit(cache.rounded)
NONE = cache.empty((cache.BLOCK,), Q8_0)


def assert_as_ggml(x: np.ndarray) -> None:
    """[rows, H] rounds to the bytes that gguf-py's own quantiser gives, and reads as they do."""
    blocks = gguf.quants.quantize(x, GGML_Q8_0).reshape(-1, 2 + cache.BLOCK)
    found = rounded(x, NONE)
    assert isinstance(found, Q8Cache)
    scales = np.asarray(found.scales).reshape(-1)
    np.testing.assert_array_equal(scales, blocks[:, :2].copy().view(np.float16)[:, 0])
    values = np.asarray(found.values).reshape(-1, cache.BLOCK)
    np.testing.assert_array_equal(values, blocks[:, 2:].view(np.int8))
    whole = gguf.quants.dequantize(blocks, GGML_Q8_0).reshape(x.shape)
    np.testing.assert_array_equal(np.asarray(cache.floats(found, "float32")), whole)


def test_q8_0_rounds_as_ggml_does():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, 64)) * np.exp(rng.uniform(-12, 5, (20_000, 1)))
    x[0] = 0
    x[1:1000] = rng.integers(-254, 255, (999, 64)) / 2  # halves
    x[1:1000, ::32] = 127
    assert_as_ggml(x.astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), exponent=st.integers(-30, 15), width=st.sampled_from([32, 96]))
def test_q8_0_of_any_size(seed: int, exponent: int, width: int):
    x = np.random.default_rng(seed).standard_normal((3, width)).astype(np.float32)
    assert_as_ggml(x * np.float32(2.0**exponent))


def test_what_is_not_a_number_stays_none():
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, np.inf
    whole = np.asarray(cache.floats(rounded(x, NONE), "float32"))
    assert not np.isfinite(whole[0, 3]) and not np.isfinite(whole[1, 40])
    np.testing.assert_allclose(whole[0, 32:], 1, rtol=1e-3)  # the other block is as it was


# Sizes.


def nbytes(state: kv.KVState, kind: int) -> int:
    leaves = jax.tree.leaves((state.k[kind], state.v[kind]))
    return sum(a.size * a.dtype.itemsize for a in leaves)


@pytest.mark.parametrize("cache_type", cache.TYPES)
@pytest.mark.parametrize("value_dim", [32, 64])
def test_bytes_by_kind(cache_type: str, value_dim: int):
    cfg = dataclasses.replace(model()[0], cache_dtype=cache_type, value_dim=value_dim)
    state = jax.eval_shape(lambda: kv.init(cfg, 50, batch=3, chunk=16))
    assert state.v[kv.FULL].shape == (1, 3, 1, 50, value_dim)
    found = [nbytes(state, kind) for kind in (kv.FULL, kv.SLIDING)]
    # One full layer of 50 slots, three sliding ones of 8 + 16.
    width = 32 + value_dim
    row = width + width // 32 * 2 if cache_type == Q8_0 else width * jnp.dtype(cache_type).itemsize
    assert kv.row_bytes(cfg) == row  # one head
    assert found == [3 * 50 * row, 3 * 3 * 24 * row]


def test_heads_that_q8_0_does_not_take():
    cfg = dataclasses.replace(model()[0], head_dim=80)
    with pytest.raises(ModelError, match=r"multiple of 32 .* have 80; choose f32, f16, bf16$"):
        kv.init(cfg, 16)


def test_a_type_that_there_is_not():
    cfg = dataclasses.replace(model()[0], cache_dtype="q4_0")
    with pytest.raises(ModelError, match=r"'q4_0', expected one of float32, .*, q8_0"):
        kv.init(cfg, 16)


def test_q8_0_has_no_derivative():
    cfg, params = model()
    ids = jnp.zeros((1, 2), jnp.int32)
    run = functools.partial(forward, cfg=cfg, differentiable=True)
    with pytest.raises(ValueError, match="q8_0 cache has no derivative"):
        jax.eval_shape(run, params, ids, ids, kv.init(cfg, 16))


# Writing.


@pytest.mark.parametrize("cache_type", cache.TYPES)
def test_rows_are_written_to_their_slots(cache_type: str):
    empty = cache.empty((2, 2, 3, 9, 64), cache_type)
    for t in (1, 4):
        new = random(t, 2, t, 3, 64)
        slots = jnp.asarray([[8, 2, 9, 9][:t], [9, 0, 1, 7][:t]], jnp.int32)  # 9 is nowhere
        found = jax.jit(kv.write)(empty, new, jnp.uint32(1), slots)
        rows = np.asarray(cache.floats(rounded(new, empty), "float32"))
        expected = np.zeros((2, 2, 3, 9, 64), np.float32)
        for b, i in np.argwhere(np.asarray(slots) < 9):
            expected[1, b, :, slots[b, i]] = rows[b, i]
        np.testing.assert_array_equal(np.asarray(cache.floats(found, "float32")), expected)


# Decoding.


@pytest.mark.parametrize("cache_type", cache.TYPES)
def test_a_long_decode_in_steps(kernels: str, cache_type: str):
    """The kernel writes the very bytes that `write` does, and reads them as `attend` does."""
    n, heads_kv, h, h_v, n_slots = 4, 2, 64, 32, 300
    how = Scoring(window=250, scale=0.125, softcap=4.0)
    sinks = random(9, n)
    queries, keys = n * h, (n + heads_kv) * h

    @jax.jit
    def by_step(caches: tuple[Cache, Cache], qkv: jax.Array, at: jax.Array, held: jax.Array):
        out, k, v = calls.attention_step(
            *(qkv, *caches, jnp.uint32(1), at, held, at % n_slots, sinks),
            **dict.fromkeys(("angles", "q_norm", "k_norm", "q_factor")),
            **{"n_head": n, "interleaved": False, "eps": 1e-5},
            **{"window": how.window, "scale": how.scale, "softcap": how.softcap},
        )
        return (k, v), out

    @jax.jit
    def by_parts(caches: tuple[Cache, Cache], qkv: jax.Array, at: jax.Array, held: jax.Array):
        q, k, v = jnp.split(qkv, (queries, keys), axis=-1)
        new = k.reshape(1, 1, heads_kv, h), v.reshape(1, 1, heads_kv, h_v)
        k, v = (
            kv.write(c, x, jnp.uint32(1), at % n_slots) for c, x in zip(caches, new, strict=True)
        )
        out = attend(q.reshape(1, 1, n, h), k, v, jnp.uint32(1), at, held, sinks, how)
        return (k, v), out

    def decode(step: Callable) -> tuple[tuple[Cache, ...], np.ndarray]:
        shape = (2, 1, heads_kv, n_slots)
        caches = tuple(cache.empty((*shape, width), cache_type) for width in (h, h_v))
        held, out = np.full((1, n_slots), -1, np.int32), []
        for p in range(n_slots + 60):  # over the end of the ring
            held[0, p % n_slots] = p
            qkv = random(p, 1, 1, keys + heads_kv * h_v) * 2.0 ** (p % 9 - 6)
            caches, row = step(caches, qkv, jnp.full((1, 1), p, jnp.int32), jnp.asarray(held))
            out.append(np.asarray(row[0, 0]))
        return caches, np.stack(out)

    found, rows = decode(by_step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, native.OFF)
        expected, expected_rows = decode(by_parts)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_allclose(rows, expected_rows, rtol=0, atol=2e-5)


def logits(cache_type: str, sizes: list[int]) -> np.ndarray:
    """Float32 [T, V] of a sequence in calls of so many tokens."""
    cfg, params = model("gemma3", cache_type)
    run = jax.jit(functools.partial(forward), static_argnames=("cfg", "n_out"))
    state, out, at = kv.init(cfg, 200, chunk=sizes[0]), [], 0
    for n in sizes:
        positions = jnp.arange(at, at + n, dtype=jnp.int32)[None]
        ids = (11 * positions * positions + 5 * positions + 2) % 96
        rows, state = run(params, ids, positions, state, cfg=cfg, n_out=n)
        out.append(np.asarray(rows[0]))
        at += n
    return np.concatenate(out)


@pytest.mark.skipif(not native.available(), reason="there are no kernels")
@pytest.mark.parametrize("cache_type", ["float16", Q8_0])
def test_a_long_decode_of_a_model(cache_type: str, monkeypatch: pytest.MonkeyPatch):
    """A value between two of the cache's may go to either, where sums are taken in another order.

    Then single logits differ by the cache's own step; most differ by far less.
    """
    found = logits(cache_type, [16] + [1] * 140)
    monkeypatch.setenv(native.VARIABLE, native.OFF)
    expected, exact = logits(cache_type, [156]), logits("float32", [156])
    error, apart = (np.abs(a - expected) for a in (exact, found))
    assert apart.max() < error.max()
    assert apart.mean() < error.mean() / 4


# The state is never copied.


@pytest.mark.parametrize("implementation", (XLA, *KERNELS[:1]), indirect=True)
@pytest.mark.parametrize("cache_type", ["float16", Q8_0])
@pytest.mark.parametrize("t", [1, 16])
def test_the_state_is_updated_in_place(implementation: str, cache_type: str, t: int):
    cfg, params = model("gemma3", cache_type)
    state = jax.eval_shape(lambda: kv.init(cfg, 1 << 16, chunk=16))
    ids = jax.ShapeDtypeStruct((1, t), jnp.int32)
    run = jax.jit(functools.partial(forward), static_argnames="cfg", donate_argnums=3)
    compiled = run.lower(params, ids, ids, state, cfg=cfg).compile()
    text = compiled.as_text() or ""
    for plane in jax.tree.leaves((state.k, state.v)):
        shape = ",".join(map(str, plane.shape))
        assert shape in text
        assert not re.findall(rf"= \w+\[{shape}\]\S* copy\(", text)
    used = compiled.memory_analysis()
    assert used is not None
    full = nbytes(state, kv.FULL)
    assert used.temp_size_in_bytes < full / 2
    assert used.alias_size_in_bytes >= full + nbytes(state, kv.SLIDING)


# Values of another size than keys, through a whole model.


@pytest.mark.parametrize("implementation", (XLA, *KERNELS[:1]), indirect=True)
def test_a_model_whose_values_are_of_another_size(implementation: str):
    cfg, params = model("llama", "float32")
    cfg = dataclasses.replace(cfg, value_dim=16, attention_softcap=3.0)

    def dense(seed: int, n: int, k: int) -> Linear:
        layers = [np.asarray(random(seed + i, n, k)) / k**0.5 for i in range(cfg.n_layer)]
        raws = [[layer.astype(np.float32).view(np.uint8)] for layer in layers]
        return Linear(weight=stack_blocks(raws, 0))

    (group,) = params.groups
    n, heads_kv = cfg.n_head, cfg.n_head_kv
    qkv = dense(0, (n + heads_kv) * 32 + heads_kv * 16, cfg.n_embd)
    group = dataclasses.replace(group, qkv=(qkv,), attn_output=dense(9, cfg.n_embd, n * 16))
    params = dataclasses.replace(params, groups=(group,))
    run = jax.jit(functools.partial(forward), static_argnames=("cfg", "n_out"))
    ids = jnp.arange(12, dtype=jnp.int32)[None]
    whole, _ = run(params, ids, ids, kv.init(cfg, 12), cfg=cfg, n_out=12)
    state, rows = kv.init(cfg, 12), []
    for p in range(12):
        one = ids[:, p : p + 1]
        row, state = run(params, one, one, state, cfg=cfg, n_out=1)
        rows.append(np.asarray(row[0, 0]))
    assert state.v[kv.FULL].shape == (cfg.n_layer, 1, heads_kv, 12, 16)
    assert np.asarray(whole).std() > 0.5
    np.testing.assert_allclose(np.stack(rows), np.asarray(whole[0]), rtol=0, atol=2e-4)
