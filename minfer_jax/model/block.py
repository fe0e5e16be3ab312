"""One transformer block, driven by the configuration and by which weights are there."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minfer_jax.model import kv_state as kv
from minfer_jax.model import rope
from minfer_jax.model.attention import attend
from minfer_jax.model.config import LayerSpec, ModelConfig
from minfer_jax.model.layers import gated_mlp, linear, rms_norm, stacked
from minfer_jax.model.params import LayerParams


def block(
    x: Float[Array, "B T D"],
    p: LayerParams,
    k_cache: Float[Array, "L B K S H"],
    v_cache: Float[Array, "L B K S H"],
    *,
    layer: Int[Array, ""],
    positions: Int[Array, "B T"],
    slots: Int[Array, "B T"],
    held: Int[Array, "B S"],
    rows: Int[Array, "B R"] | None,
    freq: Float[Array, " pairs"] | None,
    spec: LayerSpec,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B R D"], Array, Array]:
    """Pre-norm attention and gated MLP, each added to the residual x.

    Args:
        x: residual stream, float32.
        p: weights of the block.
        k_cache, v_cache: the caches of all layers of this one's kind.
        layer: index of this layer in them.
        positions: of x's rows, -1 for padding.
        slots: where to write each row's key and value.
        held: the position that each slot holds once x's rows are written.
        rows: rows of x to go on with after the keys and values are stored, or None for all (R = T).
        freq: RoPE frequencies, or None for no rotation.
        spec: what is particular to this layer.
        cfg: the model.

    Returns:
        (residual of the chosen rows, k_cache, v_cache).
    """
    dtype = jnp.dtype(cfg.dtype)
    h = rms_norm(x, p.attn_norm, cfg.norm_eps)
    q, k, v = _split_heads(stacked(h, p.qkv, dtype), cfg)
    if p.k_norm is not None:
        k = rms_norm(k, p.k_norm, cfg.norm_eps)
    if freq is not None:
        k = _rotate(k, positions, freq, spec, cfg)
    k_cache = kv.write(k_cache, k, layer, slots)
    v_cache = kv.write(v_cache, v, layer, slots)

    if rows is not None and rows.shape[1] == 0:
        return x[:, :0], k_cache, v_cache
    if rows is not None:
        x = jnp.take_along_axis(x, rows[:, :, None], axis=1)
        q = jnp.take_along_axis(q, rows[:, :, None, None], axis=1)
        positions = jnp.take_along_axis(positions, rows, axis=1)
    if p.q_norm is not None:
        q = rms_norm(q, p.q_norm, cfg.norm_eps)
    if freq is not None:
        q = _rotate(q, positions, freq, spec, cfg)
    temperature, floor = cfg.attention_temperature
    if temperature:
        steps = (jnp.maximum(positions, 0) // floor).astype(jnp.float32)
        q = q * (1.0 + temperature * jnp.log1p(steps))[:, :, None, None]
    # One row is bound by memory, not arithmetic: it can have float32 for nothing.
    factor = "float32" if q.shape[1] == 1 else cfg.dtype
    window = cfg.window if spec.sliding else 0
    a = attend(q, k_cache, v_cache, layer, positions, held, window, cfg.attention_scale, factor)
    a = linear(a.reshape(*a.shape[:2], -1), p.attn_output, dtype)
    if p.post_attn_norm is not None:
        a = rms_norm(a, p.post_attn_norm, cfg.norm_eps)
    x = x + a

    h = rms_norm(x, p.ffn_norm, cfg.norm_eps)
    m = gated_mlp(h, p.gate_up, p.ffn_down, activation=cfg.activation, dtype=dtype)
    if p.post_ffn_norm is not None:
        m = rms_norm(m, p.post_ffn_norm, cfg.norm_eps)
    return x + m, k_cache, v_cache


def _split_heads(qkv: Float[Array, "B T qkv"], cfg: ModelConfig) -> tuple[Array, Array, Array]:
    """q [B, T, N, H], k and v [B, T, K, H] out of their concatenation."""
    heads = qkv.reshape(*qkv.shape[:2], -1, cfg.head_dim)
    n, k = cfg.n_head, cfg.n_head_kv
    return heads[:, :, :n], heads[:, :, n : n + k], heads[:, :, n + k :]


def _rotate(x: Array, positions: Array, freq: Array, spec: LayerSpec, cfg: ModelConfig) -> Array:
    assert spec.rope is not None  # else there would be no frequencies
    return rope.rotate(
        x,
        positions,
        freq,
        interleaved=cfg.rope_interleaved,
        magnitude=cfg.ropes[spec.rope].magnitude,
    )
