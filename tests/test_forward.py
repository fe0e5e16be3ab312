"""The model as a function: cut, padded or batched, a sequence has the same logits."""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.params import Params
from minfer_jax.model.registry import ARCHS
from minfer_jax.quant.matmul import Arithmetic
from tests.helpers.tiny_models import load, run, tiny_model

N_CTX = 48
CHUNK = 16
TOKENS = np.array([(11 * i * i + 5 * i + 2) % 96 for i in range(40)], np.int32)
WINDOW = 8  # of gemma3, whose ring has then WINDOW + CHUNK slots
# Largest difference of two logits that are the same but for the order of sums; the logits have a
# standard deviation of 2 to 3. Measured: 6e-5.
CLOSE = 2e-4


# Whose sinks and caps the kernels should see: heads of a size that they take.
OPTIONS: dict[str, Any] = {"gemma2": {"head_dim": 32}, "gpt-oss": {"head_dim": 32}}


@functools.cache
def model(arch: str) -> tuple[ModelConfig, Params]:
    with tempfile.TemporaryDirectory() as folder:
        return load(Path(folder), tiny_model(arch, **OPTIONS.get(arch, {})))


@functools.cache
def whole(arch: str) -> np.ndarray:
    """Logits [T, V] of all tokens at once, every slot kept."""
    cfg, _ = model(arch)
    return feed(arch, [len(TOKENS)], kv.init(cfg, N_CTX, chunk=N_CTX))[0]


def ring(arch: str = "gemma3", chunk: int = CHUNK) -> KVState:
    """A state whose sliding layers keep no more than they need."""
    cfg, _ = model(arch)
    state = kv.init(cfg, N_CTX, chunk=chunk)
    assert state.positions[kv.SLIDING].shape == (1, cfg.window + chunk)
    return state


def row(values: Sequence[int] | np.ndarray, t: int, fill: int) -> np.ndarray:
    """[t] values, filled up."""
    return np.concatenate([values, np.full(t - len(values), fill)]).astype(np.int32)


def call(
    arch: str, ids: np.ndarray, positions: np.ndarray, state: KVState, n_out: int
) -> tuple[np.ndarray, KVState]:
    """(logits [B, n_out, V], new state) of one call with ids and positions [B, T]."""
    cfg, params = model(arch)
    logits, state = run(
        params, jnp.asarray(ids), jnp.asarray(positions), state, cfg=cfg, n_out=n_out
    )
    assert logits.dtype == jnp.float32
    return np.asarray(logits), state


def feed(
    arch: str,
    sizes: Sequence[int],
    state: KVState,
    *,
    start: int = 0,
    pad_to: int = 0,
    padding_token: int = 0,
) -> tuple[np.ndarray, KVState]:
    """Logits [sum of sizes, V] of tokens from `start` on, in pieces, each padded to `pad_to`."""
    out = []
    for size in sizes:
        t = max(size, pad_to)
        positions = np.arange(start, start + size)
        ids = row(TOKENS[positions], t, padding_token)
        logits, state = call(arch, ids[None], row(positions, t, -1)[None], state, t)
        out.append(logits[0, :size])
        start += size
    return np.concatenate(out), state


def assert_close(found: np.ndarray | jax.Array, expected: np.ndarray | jax.Array) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=CLOSE)


def assert_same(found: object, expected: object) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# However it is cut.


@pytest.mark.parametrize("arch", ARCHS)
def test_token_by_token(arch: str):
    cfg, _ = model(arch)
    state = kv.init(cfg, N_CTX, chunk=1)  # a ring of window + 1 slots, where there is a window
    found, state = feed(arch, [1] * len(TOKENS), state)
    assert_close(found, whole(arch))
    assert sorted(np.asarray(state.positions[kv.FULL])[0]) == [-1] * 8 + list(range(40))


@pytest.mark.parametrize(
    "n", [1, 7, 8, 9, CHUNK - 1, CHUNK, 2 * WINDOW + 1, WINDOW + CHUNK, WINDOW + CHUNK + 1, 39]
)
def test_prefill_then_decode(n: int):
    pieces = [CHUNK] * (n // CHUNK) + [n % CHUNK] * (n % CHUNK > 0)
    first, state = feed("gemma3", pieces, ring(), pad_to=CHUNK)
    rest, _ = feed("gemma3", [1] * (len(TOKENS) - n), state, start=n)
    assert_close(np.concatenate([first, rest]), whole("gemma3"))


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, CHUNK), min_size=1, max_size=12))
def test_any_chunks(sizes: list[int]):
    kept = [size for i, size in enumerate(sizes) if sum(sizes[: i + 1]) <= len(TOKENS)]
    found, state = feed("gemma3", kept, ring(), pad_to=CHUNK)
    n = sum(kept)
    assert_close(found, whole("gemma3")[:n])
    held = np.asarray(state.positions[kv.SLIDING])[0]
    slots = WINDOW + CHUNK
    assert sorted(held[held >= 0]) == list(range(max(0, n - slots), n))
    assert all(p % slots == slot for slot, p in enumerate(held) if p >= 0)


def test_chunks_without_padding():
    found, _ = feed("gemma3", [5] * 8, ring())
    assert_close(found, whole("gemma3"))


def test_a_run_from_an_earlier_position_forgets_what_came_after():
    # The engine goes back like this: later slots are marked empty, not cleared.
    _, state = feed("llama", [CHUNK], kv.init(model("llama")[0], N_CTX), pad_to=CHUNK)
    cut = [jnp.where(held < 9, held, -1) for held in state.positions]
    state = dataclasses.replace(state, positions=tuple(cut))
    found, _ = feed("llama", [CHUNK, CHUNK - 1], state, start=9, pad_to=CHUNK)
    assert_close(found, whole("llama")[9:])


# However it is padded, batched and interleaved.


def test_padding_is_written_nowhere_and_changes_nothing():
    some, state = feed("gemma3", [11], ring(), pad_to=CHUNK)
    others, other_state = feed("gemma3", [11], ring(), pad_to=CHUNK, padding_token=95)
    assert_same((others, other_state), (some, state))
    for kind, slots in ((kv.FULL, N_CTX), (kv.SLIDING, WINDOW + CHUNK)):
        expected = row(np.arange(11), slots, -1)
        np.testing.assert_array_equal(np.asarray(state.positions[kind])[0], expected)
        for cache in (state.k[kind], state.v[kind]):
            written = np.asarray(cache)
            assert not written[:, :, :, 11:].any()
            assert written[:, :, :, :11].any(axis=(-1, -3)).all()
    exact, exact_state = feed("gemma3", [11], ring())
    assert_close(some, exact)
    jax.tree.map(assert_close, state, exact_state)


@pytest.mark.parametrize("t", [1, CHUNK])
def test_a_call_of_nothing_but_padding(t: int):
    _, state = feed("gemma3", [CHUNK, 11], ring(), pad_to=CHUNK)  # the ring has no empty slot
    ids, positions = np.zeros((1, t), np.int32), np.full((1, t), -1, np.int32)
    logits, after = call("gemma3", ids, positions, state, t)
    assert np.isfinite(logits).all()
    assert_same(after, state)


def test_batch_rows_equal_singles():
    cfg, _ = model("gemma3")
    lengths = (CHUNK, 1, 9)
    ids = np.stack([row(TOKENS[i : i + n], CHUNK, 3) for i, n in enumerate(lengths)])
    positions = np.stack([row(np.arange(n), CHUNK, -1) for n in lengths])
    state = kv.init(cfg, N_CTX, batch=3, chunk=CHUNK)
    logits, state = call("gemma3", ids, positions, state, CHUNK)
    # One more token for the first and the last, each at its own position.
    ids_1, step = TOKENS[5:8, None], np.array([[lengths[0]], [-1], [lengths[2]]], np.int32)
    more, state = call("gemma3", ids_1, step, state, 1)
    for i, n in enumerate(lengths):
        own = slice(i, i + 1)
        single, own_state = call("gemma3", ids[own], positions[own], ring(), CHUNK)
        after, own_state = call("gemma3", ids_1[own], step[own], own_state, 1)
        assert_close(logits[i, :n], single[0, :n])
        if step[i, 0] >= 0:
            assert_close(more[i], after[0])
        caches = (*state.k, *state.v), (*own_state.k, *own_state.v)
        for found, expected in zip(*map(jax.tree.leaves, caches), strict=True):
            assert_close(found[:, i], expected[:, 0])
        for found, expected in zip(state.positions, own_state.positions, strict=True):
            np.testing.assert_array_equal(np.asarray(found[i]), np.asarray(expected[0]))


def test_two_states_do_not_disturb_each_other():
    alone, _ = feed("gemma3", [CHUNK] + [1] * 8, ring())
    first, state = feed("gemma3", [CHUNK], ring())
    _, other = feed("gemma3", [CHUNK], ring(), start=10)
    out = [first]
    for i in range(8):
        logits, state = feed("gemma3", [1], state, start=CHUNK + i)
        _, other = feed("gemma3", [1], other, start=26 + i)
        out.append(logits)
    np.testing.assert_array_equal(np.concatenate(out), alone)


# Which rows are wanted.


@pytest.mark.parametrize("n_out", [0, 1, 2])
def test_the_last_rows_alone(n_out: int):
    for n in (11, CHUNK, 1):
        ids, positions = row(TOKENS[:n], CHUNK, 0), row(np.arange(n), CHUNK, -1)
        logits, state = call("gemma3", ids[None], positions[None], ring(), n_out)
        wanted = np.maximum(np.arange(n - n_out, n), 0)  # of one row, twice the first
        assert_close(logits, whole("gemma3")[None, wanted])
        _, expected = feed("gemma3", [n], ring(), pad_to=CHUNK)
        jax.tree.map(assert_close, state, expected)


def test_the_differentiable_loop_gives_the_same():
    cfg, params = model("gemma3")
    n = 9
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    logits, state = run(
        params,
        jnp.asarray(TOKENS[None, :n]),
        positions,
        kv.init(cfg, N_CTX, chunk=CHUNK),
        cfg=cfg,
        n_out=2,
        differentiable=True,
    )
    assert_close(logits[0], whole("gemma3")[n - 2 : n])
    assert int(np.asarray(state.positions[kv.FULL]).max()) == n - 1


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_unrolled_layers_give_the_same(arch: str):
    cfg, params = model(arch)
    n = 9
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    logits, _ = run(
        params,
        jnp.asarray(TOKENS[None, :n]),
        positions,
        kv.init(cfg, N_CTX, chunk=CHUNK),
        cfg=dataclasses.replace(cfg, unrolled=True),
        n_out=n,
    )
    assert_close(logits[0], whole(arch)[:n])


def test_a_model_of_one_layer(tmp_path: Path):
    cfg, params = load(tmp_path, tiny_model("llama", n_layer=1))
    ids = jnp.asarray(TOKENS[None, :9])
    positions = jnp.arange(9, dtype=jnp.int32)[None]
    last, every = (
        run(params, ids, positions, kv.init(cfg, 9), cfg=cfg, n_out=n_out)[0] for n_out in (1, 9)
    )
    assert_close(every[:, -1:], last)


# What is refused.


def refused(n_out: int = 1, **shapes: tuple[int, int]) -> str:
    cfg, params = model("gemma3")
    arrays = {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(
            functools.partial(forward, cfg=cfg, n_out=n_out),
            params,
            arrays["ids"],
            arrays.get("positions", arrays["ids"]),
            ring(),
        )
    return str(caught.value)


def test_more_tokens_than_the_ring_can_take_are_refused():
    message = refused(ids=(1, CHUNK + 1))
    assert "T=17" in message and f"at most {CHUNK}" in message and "chunk=17" in message


def test_more_tokens_than_slots_are_refused():
    message = refused(ids=(1, N_CTX + 1))
    assert "T=49" in message and "48 slots" in message


@pytest.mark.parametrize("n_out", [-1, 6])
def test_rows_that_are_not_there_are_refused(n_out: int):
    message = refused(n_out, ids=(1, 5))
    assert f"n_out is {n_out}" in message and "T=5" in message


def test_positions_of_another_shape_are_refused():
    message = refused(ids=(1, 5), positions=(1, 4))
    assert "(1, 5)" in message and "(1, 4)" in message


# Gradients and precision.


def test_gradients_reach_every_weight(tmp_path: Path):
    n = 6
    cfg, params = load(tmp_path, tiny_model("gemma3", n_layer=3))
    ids, targets = jnp.asarray(TOKENS[None, :n]), jnp.asarray(TOKENS[1 : n + 1])
    positions = jnp.arange(n, dtype=jnp.int32)[None]

    @jax.jit
    @jax.value_and_grad
    def loss(params: Params) -> jax.Array:
        logits, _ = forward(
            params, ids, positions, kv.init(cfg, n, chunk=n), cfg=cfg, n_out=n, differentiable=True
        )
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), targets[:, None], -1)
        return -chosen.mean()

    gradient = loss(params)[1]
    rng = np.random.default_rng(0)
    for (path, leaf), slope in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(gradient), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert slope.shape == leaf.shape, name
        assert np.isfinite(np.asarray(slope)).all(), name
        assert np.abs(np.asarray(slope)).max() > 1e-6, name
    for part in ("output_norm", "token_embd", "groups"):
        whole_part = getattr(params, part)
        direction = jax.tree.map(
            lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), whole_part
        )
        ahead, back = (
            dataclasses.replace(
                params,
                **{part: jax.tree.map(lambda a, d, s=step: a + s * d, whole_part, direction)},
            )
            for step in (1e-3, -1e-3)
        )
        expected = float(loss(ahead)[0] - loss(back)[0]) / 2e-3
        slopes, along = jax.tree.leaves(getattr(gradient, part)), jax.tree.leaves(direction)
        found = sum(float(jnp.vdot(g, d)) for g, d in zip(slopes, along, strict=True))
        assert found == pytest.approx(expected, rel=2e-2, abs=2e-3), part


def divergence(exact: np.ndarray, rounded: np.ndarray) -> float:
    """Mean KL of two sets of logits, nats."""
    p, q = (np.asarray(jax.nn.log_softmax(jnp.asarray(a)), np.float64) for a in (exact, rounded))
    return float(np.mean(np.sum(np.exp(p) * (p - q), -1)))


# Measured: 8e-6 and 1.1e-3 (its attention has strong preferences, and random weights no margin).
@pytest.mark.parametrize(("arch", "bound"), [("gemma3", 5e-5), ("llama", 4e-3)])
def test_rounded_products_stay_close(arch: str, bound: float):
    cfg, params = model(arch)
    arithmetic = Arithmetic(few="int16", many="bfloat16")
    cfg = dataclasses.replace(cfg, precision="default", arithmetic=arithmetic)
    cfg = dataclasses.replace(cfg, cache_dtype="float16")
    n = len(TOKENS)
    state = kv.init(cfg, N_CTX, chunk=N_CTX)
    assert {cache.dtype for cache in jax.tree.leaves(state.k)} == {jnp.dtype(jnp.float16)}
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    logits, _ = run(params, jnp.asarray(TOKENS[None]), positions, state, cfg=cfg, n_out=n)
    assert logits.dtype == jnp.float32
    assert 1e-8 < divergence(whole(arch), np.asarray(logits[0])) < bound
