"""One transformer block, driven by the configuration and by which weights are there."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minfer_jax.model import kv_state as kv
from minfer_jax.model import rope
from minfer_jax.model.attention import attend
from minfer_jax.model.config import LayerSpec, ModelConfig
from minfer_jax.model.layers import gated_mlp, linear, side_by_side
from minfer_jax.model.params import LayerParams
from minfer_jax.quant.prologue import RmsNorm, rms_norm


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a block stands: its layer, and the rows that it works on.

    Attributes:
        spec: what is particular to this layer.
        layer: its index in the caches of its kind.
        positions: int32 [B, T] of the rows, -1 for padding.
        slots: int32 [B, T], where each row's key and value go.
        held: int32 [B, S], the position that each slot holds once they are there.
        freq: float32 [pairs], RoPE frequencies; None for no rotation.
    """

    spec: LayerSpec
    layer: Array
    positions: Int[Array, "B T"]
    slots: Int[Array, "B T"]
    held: Int[Array, "B S"]
    freq: Float[Array, " pairs"] | None


def store(
    x: Float[Array, "B T D"],
    p: LayerParams,
    k_cache: Float[Array, "L B K S H"],
    v_cache: Float[Array, "L B K S H"],
    place: Place,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B T N H"], Array, Array]:
    """The first half of a block: project, and put keys and values into the cache.

    Args:
        x: residual stream, float32.
        p: weights of the block.
        k_cache, v_cache: the caches of all layers of this one's kind.
        place: which layer, which rows.
        cfg: the model.

    Returns:
        (queries, neither normed nor rotated; k_cache; v_cache).
    """
    norm = RmsNorm(p.attn_norm, cfg.norm_eps)
    q, k, v = _split_heads(side_by_side(x, p.qkv, cfg.rounding, norm), cfg)
    k = _norm_and_rotate(k, p.k_norm, place.positions, place, cfg)
    k_cache = kv.write(k_cache, k, place.layer, place.slots)
    return q, k_cache, kv.write(v_cache, v, place.layer, place.slots)


def mix(
    x: Float[Array, "B T D"],
    q: Float[Array, "B T N H"],
    p: LayerParams,
    k_cache: Float[Array, "L B K S H"],
    v_cache: Float[Array, "L B K S H"],
    place: Place,
    cfg: ModelConfig,
    rows: Int[Array, "B R"] | None = None,
) -> Float[Array, "B R D"]:
    """The second half: attention and the gated MLP, each added to the residual x.

    Args:
        x: residual stream, float32.
        q: queries from `store`.
        p: weights of the block.
        k_cache, v_cache: caches from `store`.
        place: which layer, which rows.
        cfg: the model.
        rows: rows of x to go on with, or None for all (R = T).

    Returns:
        Residual of the chosen rows.
    """
    positions = place.positions
    if rows is not None:
        x = jnp.take_along_axis(x, rows[:, :, None], axis=1)
        q = jnp.take_along_axis(q, rows[:, :, None, None], axis=1)
        positions = jnp.take_along_axis(positions, rows, axis=1)
    q = _norm_and_rotate(q, p.q_norm, positions, place, cfg)
    temperature, floor = cfg.attention_temperature
    if temperature:
        steps = (jnp.maximum(positions, 0) // floor).astype(jnp.float32)
        q = q * (1.0 + temperature * jnp.log1p(steps))[:, :, None, None]
    a = attend(
        q,
        k_cache,
        v_cache,
        place.layer,
        positions,
        place.held,
        cfg.window if place.spec.sliding else 0,
        cfg.attention_scale,
        # One row is bound by memory, not arithmetic: it can have float32 for nothing.
        "float32" if q.shape[1] == 1 else cfg.rounding.many,
    )
    a = a.reshape(*a.shape[:2], -1)
    x = _add(
        x, p.post_attn_norm, cfg, lambda plus: linear(a, p.attn_output, cfg.rounding, plus=plus)
    )

    def mlp(plus: Array | None) -> Array:
        return gated_mlp(
            x,
            RmsNorm(p.ffn_norm, cfg.norm_eps),
            p.gate_up,
            p.ffn_down,
            activation=cfg.activation,
            rounding=cfg.rounding,
            plus=plus,
        )

    return _add(x, p.post_ffn_norm, cfg, mlp)


def _add(
    x: Float[Array, "B R D"],
    post_norm: Array | None,
    cfg: ModelConfig,
    sublayer: Callable[[Array | None], Array],
) -> Float[Array, "B R D"]:
    """x and what a sub-layer gives, which adds its argument itself; normed first where it must."""
    if post_norm is None:
        return sublayer(x)
    return x + rms_norm(sublayer(None), post_norm, cfg.norm_eps)


def _split_heads(qkv: Float[Array, "B T qkv"], cfg: ModelConfig) -> tuple[Array, Array, Array]:
    """q [B, T, N, H], k and v [B, T, K, H] out of their concatenation."""
    heads = qkv.reshape(*qkv.shape[:2], -1, cfg.head_dim)
    n, k = cfg.n_head, cfg.n_head_kv
    return heads[:, :, :n], heads[:, :, n : n + k], heads[:, :, n + k :]


def _norm_if(x: Array, weight: Array | None, cfg: ModelConfig) -> Array:
    return x if weight is None else rms_norm(x, weight, cfg.norm_eps)


def _norm_and_rotate(
    heads: Float[Array, "B T heads H"],
    norm: Float[Array, " H"] | None,
    positions: Int[Array, "B T"],
    place: Place,
    cfg: ModelConfig,
) -> Float[Array, "B T heads H"]:
    """Per-head norm and RoPE, where the layer has them."""
    heads = _norm_if(heads, norm, cfg)
    if place.freq is None or place.spec.rope is None:
        return heads
    magnitude = cfg.ropes[place.spec.rope].magnitude
    interleaved = cfg.rope_interleaved
    return rope.rotate(heads, positions, place.freq, interleaved=interleaved, magnitude=magnitude)
