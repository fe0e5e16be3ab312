"""Causal grouped-query attention over the KV state.

In this file M = G * T are the query rows of one kv head, C the slots of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minfer_jax.quant import native
from minfer_jax.quant.native import calls

BLOCK = 256  # slots that one step looks at
TILE = 128  # query positions that share a loop over the blocks they can see
# The score of a masked slot: finite, so that a row which sees nothing gives 0 and no NaN.
_NEVER = -1e30


def mask(
    q_positions: Int[Array, "B T"], k_positions: Int[Array, "B C"], window: int
) -> Bool[Array, "B T C"]:
    """Which slots each query sees: 0 <= kp <= qp, and qp - kp < window unless window is 0."""
    qp, kp = q_positions[:, :, None], k_positions[:, None, :]
    seen = (kp >= 0) & (kp <= qp)
    return seen & (qp - kp < window) if window else seen


@functools.partial(jax.custom_jvp, nondiff_argnums=(6, 7, 8))
def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "L B K S H"],
    v: Float[Array, "L B K S H"],
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    window: int,
    scale: float,
    dtype: str,
) -> Float[Array, "B T N H"]:
    """softmax(scale * q k^T, over the slots that the mask leaves) v.

    In plain XLA it works through blocks of slots with a running softmax (Milakov & Gimelshein
    2018), from the first to the last block that any query can see: neither time nor memory grows
    with empty slots, and no shape depends on how many are filled. The kernel does the same.

    Args:
        q: queries, float32.
        k: keys of all layers of a kind, cache dtype.
        v: values, likewise.
        layer: which of them; an index, so that no layer is copied out of the stack.
        q_positions: -1 marks padding, whose output is 0.
        k_positions: the position that each slot holds, -1 if empty.
        window: positions that a query sees, itself included; 0 for all.
        scale: factor on the scores.
        dtype: what the factors of both products are rounded to; scores and sums are float32.

    Returns:
        float32 [B, T, N, H].
    """
    if native.isa() is not None and calls.supports_head(q.shape[3]):
        return calls.attention(
            q,
            k,
            v,
            layer,
            q_positions,
            k_positions,
            window=window,
            scale=scale,
            bfloat16=dtype == "bfloat16",
        )
    t = q.shape[1]
    if t <= TILE:
        return _attend_tile(q, k, v, layer, q_positions, k_positions, window, scale, dtype)
    pad = -t % TILE
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    q_positions = jnp.pad(q_positions, ((0, 0), (0, pad)), constant_values=-1)

    def tile(start: Array) -> Array:
        return _attend_tile(
            lax.dynamic_slice_in_dim(q, start, TILE, 1),
            k,
            v,
            layer,
            lax.dynamic_slice_in_dim(q_positions, start, TILE, 1),
            k_positions,
            window,
            scale,
            dtype,
        )

    tiles = lax.map(tile, jnp.arange(0, t + pad, TILE))  # tiles B TILE N H
    return jnp.moveaxis(tiles, 0, 1).reshape(q.shape)[:, :t]


def _attend_tile(q, k, v, layer, q_positions, k_positions, window, scale, dtype):
    b, t, n, h = q.shape
    heads_kv, n_slots = k.shape[2], k.shape[3]
    groups = n // heads_kv
    block = min(BLOCK, n_slots)
    q = q.reshape(b, t, heads_kv, groups, h).transpose(0, 2, 3, 1, 4)  # B K G T H
    q = (q * jnp.float32(scale)).reshape(b, heads_kv, groups * t, h).astype(dtype)  # B K M H

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry  # B K M 1, B K M 1, B K M H
        start = jnp.minimum(i * block, n_slots - block)  # the last block may overlap the one before
        k_block, v_block = (_block(cache, layer, start, block).astype(dtype) for cache in (k, v))
        held = lax.dynamic_slice_in_dim(k_positions, start, block, 1)
        fresh = (start + jnp.arange(block) >= i * block)[None]
        seen = mask(q_positions, jnp.where(fresh, held, -1), window)  # B T C
        seen = jnp.tile(seen[:, None], (1, 1, groups, 1))  # B 1 M C
        scores = _dot("bkmh,bkch->bkmc", q, k_block)
        scores = jnp.where(seen, scores, _NEVER)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(-1, keepdims=True)
        acc = acc * shrink + _dot("bkmc,bkch->bkmh", weights.astype(dtype), v_block)
        return new_top, total, acc

    rows = (b, heads_kv, groups * t)
    carry = (
        jnp.full((*rows, 1), _NEVER, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        jnp.zeros((*rows, h), jnp.float32),
    )
    first, last = _visible_blocks(q_positions, n_slots, block, window)
    _, total, acc = lax.fori_loop(first, last, step, carry)
    out = acc / jnp.maximum(total, 1e-30)
    return out.reshape(b, heads_kv, groups, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def _block(cache: Float[Array, "L B K S H"], layer: Array, start: Array, size: int) -> Array:
    """[B, K, size, H] of one layer, from slot `start` on."""
    zero = jnp.uint32(0)
    shape = (1, cache.shape[1], cache.shape[2], size, cache.shape[4])
    return lax.dynamic_slice(
        cache, (layer.astype(jnp.uint32), zero, zero, start.astype(jnp.uint32), zero), shape
    )[0]


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(
        spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _visible_blocks(
    q_positions: Int[Array, "B T"], n_slots: int, block: int, window: int
) -> tuple[Array, Array]:
    """First and one past the last block of slots that hold anything a query may see.

    Slots fill in order of position until the first wrap, so the newest query bounds them from
    above, and the window of the oldest from below; once a ring has wrapped, every block counts.
    """
    newest = q_positions.max()
    last = jnp.minimum(newest // block + 1, -(-n_slots // block))
    if not window:
        return jnp.int32(0), last
    oldest = jnp.where(q_positions < 0, newest, q_positions).min()
    first = jnp.maximum(oldest - (window - 1), 0) // block
    return jnp.where(newest < n_slots, first, 0), last


@attend.defjvp
def _attend_jvp(window: int, scale: float, dtype: str, primals, tangents):
    """A loop of data-dependent length has no reverse mode: differentiate the plain form instead."""
    del dtype
    q, k, v, layer, q_positions, k_positions = primals

    def plain(q: Array, k: Array, v: Array) -> Array:
        return plain_attention(q, k[layer], v[layer], q_positions, k_positions, window, scale)

    return jax.jvp(plain, (q, k, v), tangents[:3])


def plain_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    window: int,
    scale: float,
) -> Float[Array, "B T N H"]:
    """What `attend` computes, in float32 with the whole [T, S] matrix of scores; differentiable."""
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[1], -1, h)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    seen = mask(q_positions, k_positions, window)[:, None, None]  # B 1 1 T S
    scores = jnp.where(seen, _dot("btkgh,bksh->bkgts", q, k) * jnp.float32(scale), _NEVER)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0.0)
    return _dot("bkgts,bksh->btkgh", weights, v).reshape(b, t, n, h)
