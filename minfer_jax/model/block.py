"""One transformer block, driven by the configuration and by which weights are there."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from minfer_jax.model import kv_state as kv
from minfer_jax.model import rope
from minfer_jax.model.attention import Scoring, attend
from minfer_jax.model.config import LayerSpec, ModelConfig
from minfer_jax.model.layers import gated_mlp, linear, side_by_side
from minfer_jax.model.params import LayerParams
from minfer_jax.quant import native
from minfer_jax.quant.cache import Cache
from minfer_jax.quant.native import calls
from minfer_jax.quant.prologue import RmsNorm, applied


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
    k_cache: Cache,
    v_cache: Cache,
    place: Place,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B T N H"], Cache, Cache]:
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
    q, k, v = _split_heads(side_by_side(x, p.qkv, cfg.rounding, p.attn_norm), cfg)
    k = _norm_and_rotate(k, p.k_norm, place.positions, place, cfg)
    k_cache = kv.write(k_cache, k, place.layer, place.slots)
    return q, k_cache, kv.write(v_cache, v, place.layer, place.slots)


def mix(
    x: Float[Array, "B T D"],
    q: Float[Array, "B T N H"],
    p: LayerParams,
    k_cache: Cache,
    v_cache: Cache,
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
    if (factor := _temperature(positions, cfg)) is not None:
        q = q * factor[:, :, None, None]
    a = attend(
        q,
        k_cache,
        v_cache,
        place.layer,
        positions,
        place.held,
        None,  # sinks
        Scoring(
            window=_window(place, cfg),
            scale=cfg.attention_scale,
            softcap=cfg.attention_softcap,
            # One row is bound by memory, not arithmetic: it can have float32 for nothing.
            dtype="float32" if q.shape[1] == 1 else cfg.rounding.many,
        ),
    )
    return _finish(x, a, p, cfg)


def can_step(cfg: ModelConfig, t: int) -> bool:
    """Whether `step` can do a block: one position, and there is a kernel for its heads."""
    return (
        t == 1 and native.isa() is not None and calls.supports_heads(cfg.head_dim, cfg.head_dim_v)
    )


def step(
    x: Float[Array, "B 1 D"],
    p: LayerParams,
    k_cache: Cache,
    v_cache: Cache,
    place: Place,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B 1 D"], Cache, Cache]:
    """A whole block for one position, `store` and `mix` in one: (residual, k_cache, v_cache)."""
    qkv = side_by_side(x, p.qkv, cfg.rounding, p.attn_norm)
    angles = None
    if place.freq is not None and place.spec.rope is not None:
        magnitude = cfg.ropes[place.spec.rope].magnitude
        cos, sin = rope.angles(place.positions, place.freq, magnitude)
        angles = cos[:, 0], sin[:, 0]
    factor = _temperature(place.positions, cfg)
    a, k_cache, v_cache = calls.attention_step(
        qkv,
        k_cache,
        v_cache,
        place.layer,
        place.positions,
        place.held,
        place.slots,
        None,  # sinks
        n_head=cfg.n_head,
        angles=angles,
        interleaved=cfg.rope_interleaved,
        q_norm=None if p.q_norm is None else p.q_norm.own(),
        k_norm=None if p.k_norm is None else p.k_norm.own(),
        q_factor=None if factor is None else factor[:, 0],
        eps=cfg.norm_eps,
        window=_window(place, cfg),
        scale=cfg.attention_scale,
        softcap=cfg.attention_softcap,
    )
    return _finish(x, a, p, cfg), k_cache, v_cache


def _finish(
    x: Float[Array, "B R D"], a: Float[Array, "B R N H"], p: LayerParams, cfg: ModelConfig
) -> Float[Array, "B R D"]:
    """What follows attention: its output projection and the gated MLP, each added to x."""
    a = a.reshape(*a.shape[:2], -1)
    x = linear(a, p.attn_output, cfg.rounding, post=p.post_attn_norm, plus=x)
    return gated_mlp(
        x,
        p.ffn_norm,
        p.gate_up,
        p.ffn_down,
        activation=cfg.activation,
        rounding=cfg.rounding,
        post=p.post_ffn_norm,
        plus=x,
    )


def _window(place: Place, cfg: ModelConfig) -> int:
    return cfg.window if place.spec.sliding else 0


def _temperature(positions: Int[Array, "B T"], cfg: ModelConfig) -> Float[Array, "B T"] | None:
    """The factor on queries that grows with the position, or None."""
    temperature, floor = cfg.attention_temperature
    if not temperature:
        return None
    steps = (jnp.maximum(positions, 0) // floor).astype(jnp.float32)
    return 1.0 + temperature * jnp.log1p(steps)


def _split_heads(qkv: Float[Array, "B T qkv"], cfg: ModelConfig) -> tuple[Array, Array, Array]:
    """q [B, T, N, H], k [B, T, K, H] and v [B, T, K, Hv] out of their concatenation."""
    queries, keys = cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim
    q, k, v = jnp.split(qkv, (queries, queries + keys), axis=-1)
    widths = (cfg.head_dim, cfg.head_dim, cfg.head_dim_v)
    q, k, v = (x.reshape(*x.shape[:2], -1, h) for x, h in zip((q, k, v), widths, strict=True))
    return q, k, v


def _norm_and_rotate(
    heads: Float[Array, "B T heads H"],
    norm: RmsNorm | None,
    positions: Int[Array, "B T"],
    place: Place,
    cfg: ModelConfig,
) -> Float[Array, "B T heads H"]:
    """Per-head norm and RoPE, where the layer has them."""
    heads = applied(heads, norm)
    if place.freq is None or place.spec.rope is None:
        return heads
    magnitude = cfg.ropes[place.spec.rope].magnitude
    interleaved = cfg.rope_interleaved
    return rope.rotate(heads, positions, place.freq, interleaved=interleaved, magnitude=magnitude)
