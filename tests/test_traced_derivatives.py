"""Values laid open: derivatives through packed weights, and many prompts or patches at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.names import matching
from minfer_jax.model.params import Params
from minfer_jax.model.patches import Add, Replace
from minfer_jax.model.traced import forward_traced, gradients
from minfer_jax.quant import xla
from minfer_jax.sampling import SamplingParams, init_state, sample
from tests.helpers.laid_open import (
    OTHERS,
    POSITIONS,
    TOKENS,
    T,
    assert_close,
    fresh,
    model,
    patched,
    traced,
)
from tests.helpers.tiny_models import load, tiny_model

# Derivatives, through packed weights.

DIFFERENTIATED = (
    *("embd", "blk.0.attn_norm", "blk.1.q", "blk.1.k", "blk.0.v", "blk.1.scores", "blk.0.weights"),
    *("blk.0.attn_heads", "blk.1.attn_out", "blk.0.attn_residual", "blk.1.gate", "blk.0.up"),
    *("blk.1.ffn_act", "blk.0.down", "blk.0.residual", "blk.1.residual", "output_norm", "logits"),
)
# Mixed as Q4_K_M is: two groups of layers.
PACKED = {
    "weight_type": "Q4_K",
    "types": {"blk.1.ffn_down": "Q6_K"},
    **{"width": 256, "n_ff": 256, "n_head": 2, "n_head_kv": 1, "n_layer": 2, "n_vocab": 96},
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Params]:
    cfg, params = load(tmp_path_factory.mktemp("packed"), tiny_model("llama", **PACKED))
    assert len(params.groups) == 2
    return cfg, params


def loss_of(logits: jax.Array) -> jax.Array:
    chosen = jax.nn.log_softmax(logits[0, :-1])
    return -jnp.take_along_axis(chosen, jnp.asarray(TOKENS[0, 1:, None]), -1).mean()


def slope(function: Callable[[Any], jax.Array], at: Any, direction: Any, step: float) -> float:
    """The derivative along a direction, by differences of fourth order."""

    def moved(by: float) -> float:
        return float(function(jax.tree.map(lambda a, d: a + jnp.float32(by) * d, at, direction)))

    near, far = moved(step) - moved(-step), moved(2 * step) - moved(-2 * step)
    return (8 * near - far) / (12 * step)


def test_gradients_are_those_of_finite_differences(packed: tuple[ModelConfig, Params]):
    cfg, params = packed

    @jax.jit
    def found_for(params: Params) -> tuple:
        return gradients(
            loss_of, params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names=DIFFERENTIATED
        )

    @jax.jit
    def loss(deltas: dict[str, jax.Array]) -> jax.Array:
        patches = {name: Add(delta) for name, delta in deltas.items()}
        logits, _, _ = forward_traced(
            params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, patches=patches
        )
        return loss_of(logits)

    value, values, slopes = found_for(params)
    assert list(values) == list(slopes) == matching(DIFFERENTIATED, list(values))
    zeros = {name: jnp.zeros_like(values[name]) for name in values}
    assert float(value) == pytest.approx(float(loss(zeros)), rel=1e-5)
    rng = np.random.default_rng(0)
    for name in values:
        own = np.asarray(slopes[name])
        assert np.isfinite(own).all(), name
        # Along the gradient itself, and across it somewhat: so the difference is well above noise.
        size = np.linalg.norm(own)
        noise = rng.standard_normal(own.shape).astype(np.float32)
        direction = own / size + 0.3 * noise / np.linalg.norm(noise)
        moved = {**{k: jnp.zeros_like(v) for k, v in zeros.items()}, name: jnp.asarray(direction)}
        step = 0.02 * min(1.0, 1.0 / float(size))
        expected = slope(loss, zeros, moved, step)
        assert float(np.vdot(own, direction)) == pytest.approx(expected, rel=2e-2), name


def test_derivatives_of_patches_and_of_a_soft_prompt(packed: tuple[ModelConfig, Params]):
    cfg, params = packed
    rng = np.random.default_rng(1)
    soft = xla.rows(params.token_embd, jnp.arange(3, dtype=jnp.int32))[None]
    at = {"soft": soft, "vector": jnp.zeros(cfg.n_embd)}

    @jax.jit
    def loss(of: dict[str, jax.Array]) -> jax.Array:
        logits, _, _ = forward_traced(
            params,
            *(TOKENS, POSITIONS, fresh(cfg)),
            cfg=cfg,
            embeddings=of["soft"],
            patches={"blk.0.residual": lambda x: x + of["vector"][None, None]},
        )
        return loss_of(logits)

    found = jax.jit(jax.grad(loss))(at)
    for name, own_slope in found.items():
        noise = rng.standard_normal(own_slope.shape)
        direction = np.asarray(own_slope / jnp.linalg.norm(own_slope) + 0.05 * noise, np.float32)
        moved = {**{k: jnp.zeros_like(v) for k, v in at.items()}, name: jnp.asarray(direction)}
        expected = slope(loss, at, moved, 0.005)
        assert float(jnp.vdot(own_slope, direction)) == pytest.approx(expected, rel=2e-2), name


# Many at once.


def test_vmap_over_prompts():
    cfg, params = model("gemma3")
    names = ("blk.*.attn_out", "blk.1.scores", "embd")
    both = jnp.asarray(np.stack([TOKENS, OTHERS]))

    def one(ids: jax.Array) -> tuple:
        logits, _, found = forward_traced(
            params, ids, POSITIONS, fresh(cfg), cfg=cfg, names=names, differentiable=False
        )
        return logits, found

    logits, found = jax.jit(jax.vmap(one))(both)
    for i, ids in enumerate((TOKENS, OTHERS)):
        expected, single = traced("gemma3", names, ids)
        assert_close(logits[i, 0], expected)
        assert list(found) == list(single)
        for name in single:
            assert_close(found[name][i], single[name])


def test_vmap_over_patches():
    cfg, params = model("llama")
    rows = jnp.eye(T, dtype=bool)[:, None, :, None]  # each position by itself

    def one(where: jax.Array) -> tuple:
        patch = {"blk.1.residual": Replace(0.0, where)}
        logits, _, found = forward_traced(
            params, TOKENS, POSITIONS, fresh(cfg), cfg=cfg, names="blk.2.up", patches=patch
        )
        return logits, found["blk.2.up"]

    logits, up = jax.jit(jax.vmap(one))(rows)
    for position in (0, 5):
        patch = {"blk.1.residual": Replace(0.0, rows[position])}
        expected, found = patched("llama", patch, "blk.2.up")
        assert_close(logits[position, 0], expected)
        assert_close(up[position], found["blk.2.up"])


def test_vmap_over_sampling_keys():
    logits = jnp.asarray(traced("llama")[0][-1:])
    chosen = [SamplingParams(temperature=1.5, top_k=20, seed=seed) for seed in range(6)]
    states = [init_state(c, []) for c in chosen]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    args = chosen[0].arrays()
    one = jax.jit(lambda state: sample(logits, state, args))
    tokens, _ = jax.jit(jax.vmap(one))(stacked)
    expected = [int(one(state)[0][0]) for state in states]
    assert tokens[:, 0].tolist() == expected
    assert len(set(expected)) > 1
