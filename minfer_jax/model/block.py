"""One transformer block, driven by the configuration and by which weights are there."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax.model import kv_state as kv
from minfer_jax.model import rope
from minfer_jax.model.attention import Scoring, attend, plain_attention
from minfer_jax.model.config import LayerSpec, ModelConfig
from minfer_jax.model.layers import added, side_by_side, steered
from minfer_jax.model.mlp import mlp
from minfer_jax.model.params import LayerParams
from minfer_jax.model.tap import Values, normed
from minfer_jax.quant import kernels
from minfer_jax.quant.cache import Cache
from minfer_jax.quant.native import calls
from minfer_jax.quant.prologue import Norm, RmsNorm, applied


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a block stands: its layer, and the rows that it works on.

    Attributes:
        spec: what is particular to this layer.
        layer: its index in the caches of its kind.
        positions: int32 [B, T] of the rows, -1 for padding.
        slots: int32 [B, T], where each row's key and value go.
        held: int32 [B, S], the position that each slot holds once they are there.
        rope: index of the rotation in ModelConfig.ropes; None for none.
        freq: float32 [pairs], its frequencies.
        tap: gets each value by its name (`model.names`), or None: then values that a kernel can
            pass by never exist.
    """

    spec: LayerSpec
    layer: Array
    positions: Int[Array, "B T"]
    slots: Int[Array, "B T"]
    held: Int[Array, "B S"]
    rope: int | None
    freq: Float[Array, " pairs"] | None
    tap: Values | None = None


def store(
    x: Float[Array, "B T D"],
    p: LayerParams,
    k_cache: Cache,
    v_cache: Cache,
    place: Place,
    cfg: ModelConfig,
) -> tuple[tuple[Array, Array | None], Cache, Cache]:
    """The first half of a block: project, and put keys and values into the cache.

    Args:
        x: residual stream, float32.
        p: weights of the block.
        k_cache, v_cache: the caches of all layers of this one's kind.
        place: which layer, which rows.
        cfg: the model.

    Returns:
        ((queries [B, T, N, H], neither normed nor rotated, and attention's gate [B, T, N H] or
        None), k_cache, v_cache).
    """
    x, norm = normed(place.tap, "attn_norm", x, p.attn_norm)
    qkv, gate = _split_gate(side_by_side(x, p.qkv, cfg.arithmetic, norm), p, cfg)
    q, k, v = _split_heads(qkv, cfg)
    k = _norm_and_rotate(k, p.k_norm, place.positions, place, cfg)
    if place.tap is not None:
        k, v = place.tap("k", k), place.tap("v", v)
    k_cache = kv.write(k_cache, k, place.layer, place.slots)
    return (q, gate), k_cache, kv.write(v_cache, v, place.layer, place.slots)


def mix(
    x: Float[Array, "B T D"],
    q_gate: tuple[Float[Array, "B T N H"], Float[Array, "B T NH"] | None],
    p: LayerParams,
    k_cache: Cache,
    v_cache: Cache,
    place: Place,
    cfg: ModelConfig,
    rows: Int[Array, "B R"] | None = None,
) -> Float[Array, "B R D"]:
    """The second half: attention and the MLP, each added to the residual x.

    Args:
        x: residual stream, float32.
        q_gate: from `store`.
        p: weights of the block.
        k_cache, v_cache: caches from `store`.
        place: which layer, which rows.
        cfg: the model.
        rows: rows of x to go on with, or None for all (R = T).

    Returns:
        Residual of the chosen rows.
    """
    positions = place.positions
    q, gate = q_gate
    if rows is not None:
        x = jnp.take_along_axis(x, rows[:, :, None], axis=1)
        q = jnp.take_along_axis(q, rows[:, :, None, None], axis=1)
        if gate is not None:
            gate = jnp.take_along_axis(gate, rows[:, :, None], axis=1)
        positions = jnp.take_along_axis(positions, rows, axis=1)
    q = _norm_and_rotate(q, p.q_norm, positions, place, cfg)
    if (factor := _temperature(positions, cfg)) is not None:
        q = q * factor[:, :, None, None]
    scoring = Scoring(
        window=_window(place, cfg),
        scale=cfg.attention_scale,
        softcap=cfg.attention_softcap,
        # One row is bound by memory, not arithmetic: it can have float32 for nothing.
        dtype="float32" if q.shape[1] == 1 else cfg.arithmetic.many,
        kernels=cfg.arithmetic.kernels,
    )
    if place.tap is not None:
        q = place.tap("q", q)
    if place.tap is not None and place.tap.wants("scores", "weights"):
        k, v = jax.tree.map(partial(_of_layer, layer=place.layer), (k_cache, v_cache))
        a = plain_attention(q, k, v, positions, place.held, p.sinks, scoring, place.tap)
    else:
        a = attend(q, k_cache, v_cache, place.layer, positions, place.held, p.sinks, scoring)
    return _finish(x, a, gate, positions, p, cfg, place.tap)


def can_step(p: LayerParams, cfg: ModelConfig) -> bool:
    """Whether `step` can do a block: it has heads and norms that the kernel knows."""
    if not kernels.use_native(cfg.arithmetic.kernels):
        return False
    if not calls.supports_heads(cfg.head_dim, cfg.value_dim):
        return False
    norms = [norm for norm in (p.q_norm, p.k_norm) if norm is not None]
    return all(isinstance(n, RmsNorm) and n.weight.shape[1:] == (cfg.head_dim,) for n in norms)


def step(
    x: Float[Array, "B T D"],
    p: LayerParams,
    k_cache: Cache,
    v_cache: Cache,
    place: Place,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B T D"], Cache, Cache]:
    """A whole block for a few positions, `store` and `mix` in one: (residual, k_cache, v_cache).

    With as many rows as `quant.matmul.NATIVE_ROWS`, or less, each gets the numbers it would alone.
    """
    qkv, gate = _split_gate(side_by_side(x, p.qkv, cfg.arithmetic, p.attn_norm), p, cfg)
    angles = None
    if place.freq is not None and place.rope is not None:
        angles = rope.angles(place.positions, place.freq, cfg.ropes[place.rope].magnitude)
    a, k_cache, v_cache = calls.attention_step(
        qkv,
        k_cache,
        v_cache,
        place.layer,
        place.positions,
        place.held,
        place.slots,
        p.sinks,
        n_head=cfg.n_head,
        angles=angles,
        interleaved=cfg.rope_interleaved,
        q_norm=None if p.q_norm is None else p.q_norm.own(),
        k_norm=None if p.k_norm is None else p.k_norm.own(),
        q_factor=_temperature(place.positions, cfg),
        eps=cfg.norm_eps,
        window=_window(place, cfg),
        scale=cfg.attention_scale,
        softcap=cfg.attention_softcap,
    )
    return _finish(x, a, gate, place.positions, p, cfg, None), k_cache, v_cache


def _finish(
    x: Float[Array, "B R D"],
    a: Float[Array, "B R N H"],
    gate: Float[Array, "B R NH"] | None,
    positions: Int[Array, "B R"],
    p: LayerParams,
    cfg: ModelConfig,
    tap: Values | None,
) -> Float[Array, "B R D"]:
    """What follows attention: its gate and output projection, and the MLP, each added to x."""
    heads = a.shape
    a = a.reshape(*a.shape[:2], -1)
    if gate is not None:
        a = a * jax.nn.sigmoid(gate)
    if tap is not None:
        a = tap("attn_heads", a.reshape(heads)).reshape(a.shape)
    y = added(
        a,
        p.attn_output,
        cfg.arithmetic,
        None,
        post=p.post_attn_norm,
        times=cfg.residual_scale,
        plus=x,
        tap=tap,
        names=("attn_out", "attn_post_norm"),
    )
    if tap is not None:
        y = tap("attn_residual", y)
    if p.ffn_norm is None and p.attn_norm is not None:  # side by side with attention
        source, norm = normed(tap, "attn_norm", x, p.attn_norm)
    else:
        source, norm = normed(tap, "ffn_norm", y, p.ffn_norm)
    y = mlp(source, positions, norm, p.mlp, cfg, post=p.post_ffn_norm, plus=y, tap=tap)
    y = steered(y, p.steering)
    return y if tap is None else tap("residual", y)


def _of_layer(plane: Array, layer: Array) -> Array:
    return lax.dynamic_index_in_dim(plane, layer, keepdims=False)


def _window(place: Place, cfg: ModelConfig) -> int:
    return cfg.window if place.spec.sliding else 0


def _temperature(positions: Int[Array, "B T"], cfg: ModelConfig) -> Float[Array, "B T"] | None:
    """The factor on queries that grows with the position, or None."""
    temperature, floor = cfg.attention_temperature
    if not temperature:
        return None
    steps = (jnp.maximum(positions, 0) // floor).astype(jnp.float32)
    return 1.0 + temperature * jnp.log1p(steps)


def _split_gate(
    outputs: Float[Array, "B T width"], p: LayerParams, cfg: ModelConfig
) -> tuple[Array, Array | None]:
    """q | k | v, and the gate that lies behind them where attention has one."""
    if not p.gated:
        return outputs, None
    width = outputs.shape[-1] - cfg.n_head * cfg.value_dim
    return outputs[..., :width], outputs[..., width:]


def _split_heads(qkv: Float[Array, "B T qkv"], cfg: ModelConfig) -> tuple[Array, Array, Array]:
    """q [B, T, N, H], k [B, T, K, H] and v [B, T, K, Hv] out of their concatenation."""
    queries, keys = cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim
    q, k, v = jnp.split(qkv, (queries, queries + keys), axis=-1)
    widths = (cfg.head_dim, cfg.head_dim, cfg.value_dim)
    q, k, v = (x.reshape(*x.shape[:2], -1, h) for x, h in zip((q, k, v), widths, strict=True))
    return q, k, v


def _norm_and_rotate(
    heads: Float[Array, "B T heads H"],
    norm: Norm | None,
    positions: Int[Array, "B T"],
    place: Place,
    cfg: ModelConfig,
) -> Float[Array, "B T heads H"]:
    """Norm and RoPE, where the layer has them."""
    if norm is not None and norm.weight.shape[-1] != heads.shape[3]:  # one over all heads
        heads = applied(heads.reshape(*heads.shape[:2], -1), norm).reshape(heads.shape)
    else:
        heads = applied(heads, norm)
    if place.freq is None or place.rope is None:
        return heads
    magnitude = cfg.ropes[place.rope].magnitude
    interleaved = cfg.rope_interleaved
    return rope.rotate(heads, positions, place.freq, interleaved=interleaved, magnitude=magnitude)
