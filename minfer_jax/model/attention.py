"""Causal grouped-query attention over the KV state.

In this file M = G * T are the query rows of one kv head, C the slots of a block, Hv the size of a
value (that of a query and a key is H).
"""

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minfer_jax.model.tap import Values
from minfer_jax.pallas.scoring import NEVER, Scoring, capped, seen, visible_blocks
from minfer_jax.quant import kernels
from minfer_jax.quant.cache import Cache, floats
from minfer_jax.quant.native import calls

log = logging.getLogger("minfer_jax")

BLOCK = 256  # slots that one step looks at
TILE = 128  # query positions that share a loop over the blocks they can see


def mask(
    q_positions: Int[Array, "B T"], k_positions: Int[Array, "B C"], window: int
) -> Bool[Array, "B T C"]:
    """Which slots each query sees: 0 <= kp <= qp, and qp - kp < window unless window is 0."""
    return seen(q_positions[:, :, None], k_positions[:, None, :], window)


@functools.partial(jax.custom_jvp, nondiff_argnums=(7,))
def attend(
    q: Float[Array, "B T N H"],
    k: Cache,
    v: Cache,
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    sinks: Float[Array, " N"] | None,
    scoring: Scoring,
) -> Float[Array, "B T N Hv"]:
    """softmax(scores of q and k, over the slots that the mask leaves) v.

    In plain XLA it works through blocks of slots with a running softmax (Milakov & Gimelshein
    2018), over those that any query can see (position p lies in slot p % S, as in `kv_state`):
    neither time nor memory grows with empty slots, and no shape depends on how many are filled. The
    kernels do the same.

    Args:
        q: queries, float32.
        k: keys of all layers of a kind, [L, B, K, S, H].
        v: values, likewise, [L, B, K, S, Hv].
        layer: which of them; an index, so that no layer is copied out of the stack.
        q_positions: -1 marks padding, whose output is 0.
        k_positions: the position that each slot holds, -1 if empty.
        sinks: float32; one more score of each query head, that has no value: the weights of the
            slots sum to less than 1 (gpt-oss; Xiao et al. 2023). None for none.
        scoring: static.

    Returns:
        float32 [B, T, N, Hv].
    """
    if kernels.use_native(scoring.kernels) and calls.supports_heads(q.shape[3], v.shape[4]):
        return calls.attention(
            q,
            k,
            v,
            layer,
            q_positions,
            k_positions,
            sinks,
            window=scoring.window,
            scale=scoring.scale,
            softcap=scoring.softcap,
            bfloat16=scoring.dtype == "bfloat16",
        )
    plain = functools.partial(_blocked, scoring=scoring)
    args = (q, k, v, layer, q_positions, k_positions, sinks)
    if kernels.use_pallas(scoring.kernels) and (kernel := _kernel(q, k, v)) is not None:
        return kernels.on_cuda(functools.partial(kernel, scoring=scoring), plain, *args)
    return plain(*args)


def _kernel(q: Float[Array, "B T N H"], k: Cache, v: Cache) -> Callable[..., Array] | None:
    """The Pallas kernel for such shapes; None, and a line in the log, where there is none."""
    # Slow to import, and not needed on a CPU.
    from minfer_jax.pallas import attention_decode, attention_prefill

    if attention_decode.supports(q, k, v) is None:
        return attention_decode.attention
    if (reason := attention_prefill.supports(q, k, v)) is None:
        return attention_prefill.attention
    log.debug("attention in plain XLA: %s", reason)
    return None


def _blocked(q, k, v, layer, q_positions, k_positions, sinks, scoring):
    """`attend` in plain XLA."""
    t = q.shape[1]
    if t <= TILE:
        return _attend_tile(q, k, v, layer, q_positions, k_positions, sinks, scoring)
    pad = -t % TILE
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    q_positions = jnp.pad(q_positions, ((0, 0), (0, pad)), constant_values=-1)

    def tile(start: Array) -> Array:
        q_tile, at = (lax.dynamic_slice_in_dim(x, start, TILE, 1) for x in (q, q_positions))
        return _attend_tile(q_tile, k, v, layer, at, k_positions, sinks, scoring)

    tiles = lax.map(tile, jnp.arange(0, t + pad, TILE))  # tiles B TILE N Hv
    return jnp.moveaxis(tiles, 0, 1).reshape(*q.shape[:3], v.shape[4])[:, :t]


def _attend_tile(q, k, v, layer, q_positions, k_positions, sinks, scoring):
    b, t, n, h = q.shape
    heads_kv, n_slots, h_v = *k.shape[2:4], v.shape[4]
    groups = n // heads_kv
    block = min(BLOCK, n_slots)
    dtype = scoring.dtype
    q = q.reshape(b, t, heads_kv, groups, h).transpose(0, 2, 3, 1, 4)  # B K G T H
    q = (q * jnp.float32(scoring.scale)).reshape(b, heads_kv, groups * t, h).astype(dtype)

    first, count = visible_blocks(q_positions, n_slots, block, scoring.window)

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry  # B K M 1, B K M 1, B K M Hv
        i = lax.rem(first + i, jnp.int32(-(-n_slots // block)))
        start = jnp.minimum(i * block, n_slots - block)  # the last block may overlap the one before
        k_block, v_block = (floats(_block(cache, layer, start, block), dtype) for cache in (k, v))
        held = lax.dynamic_slice_in_dim(k_positions, start, block, 1)
        fresh = (start + jnp.arange(block) >= i * block)[None]
        sees = mask(q_positions, jnp.where(fresh, held, -1), scoring.window)  # B T C
        sees = jnp.tile(sees[:, None], (1, 1, groups, 1))  # B 1 M C
        scores = capped(_dot("bkmh,bkch->bkmc", q, k_block), scoring.softcap)
        scores = jnp.where(sees, scores, NEVER)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.where(sees, jnp.exp(scores - new_top), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(-1, keepdims=True)
        acc = acc * shrink + _dot("bkmc,bkch->bkmh", weights.astype(dtype), v_block)
        return new_top, total, acc

    rows = (b, heads_kv, groups * t)
    if sinks is None:
        top, total = jnp.full((*rows, 1), NEVER, jnp.float32), jnp.zeros((*rows, 1), jnp.float32)
    else:  # as if each row had seen its sink, with a value of 0
        top = jnp.repeat(sinks.reshape(1, heads_kv, groups), t, axis=2)  # 1 K M
        top, total = jnp.broadcast_to(top, rows)[..., None], jnp.ones((*rows, 1), jnp.float32)
    carry = (top, total, jnp.zeros((*rows, h_v), jnp.float32))
    _, total, acc = lax.fori_loop(jnp.int32(0), count, step, carry)
    out = acc / jnp.maximum(total, 1e-30)
    return out.reshape(b, heads_kv, groups, t, h_v).transpose(0, 3, 1, 2, 4).reshape(b, t, n, h_v)


def _block(cache: Cache, layer: Array, start: Array, size: int) -> Cache:
    """[B, K, size, H] of one layer, from slot `start` on."""
    zero = jnp.uint32(0)
    at = (layer.astype(jnp.uint32), zero, zero, start.astype(jnp.uint32), zero)

    def cut(plane: Array) -> Array:
        shape = (1, *plane.shape[1:3], size, plane.shape[4])
        return lax.dynamic_slice(plane, at, shape)[0]

    return jax.tree.map(cut, cache)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(
        spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


@attend.defjvp
def _attend_jvp(scoring: Scoring, primals, tangents):
    """A loop of data-dependent length has no reverse mode: differentiate the plain form instead."""
    q, k, v, layer, q_positions, k_positions, sinks = primals

    def plain(q: Array, k: Cache, v: Cache, sinks: Array | None) -> Array:
        k, v = jax.tree.map(lambda plane: plane[layer], (k, v))
        return plain_attention(q, k, v, q_positions, k_positions, sinks, scoring)

    return jax.jvp(plain, (q, k, v, sinks), (*tangents[:3], tangents[6]))


def plain_attention(
    q: Float[Array, "B T N H"],
    k: Cache,
    v: Cache,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    sinks: Float[Array, " N"] | None,
    scoring: Scoring,
    tap: Values | None = None,
) -> Float[Array, "B T N Hv"]:
    """What `attend` computes of one layer, k [B, K, S, H] and v [B, K, S, Hv].

    In float32, whatever `scoring.dtype` says, and with the whole [T, S] matrix of scores;
    differentiable. A tap gets the scores, -inf where masked, and what the softmax makes of them.
    """
    b, t, n, h = q.shape
    heads_kv, h_v = k.shape[1], v.shape[3]
    q = q.reshape(b, t, heads_kv, -1, h)
    k, v = floats(k, "float32"), floats(v, "float32")
    sees = mask(q_positions, k_positions, scoring.window)[:, None, None]  # B 1 1 T S
    scores = _dot("btkgh,bksh->bkgts", q, k) * jnp.float32(scoring.scale)
    scores = capped(scores, scoring.softcap)
    if tap is not None:
        scores = _named(tap, "scores", jnp.where(sees, scores, -jnp.inf))
    scores = jnp.where(sees, scores, NEVER)
    if sinks is not None:
        column = sinks.reshape(1, heads_kv, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:4], 1))], -1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[2]]
    weights = jnp.where(sees, weights, 0.0)
    if tap is not None:
        weights = _named(tap, "weights", weights)
    return _dot("bkgts,bksh->btkgh", weights, v).reshape(b, t, n, h_v)


def _named(tap: Values, name: str, x: Float[Array, "B K G T S"]) -> Float[Array, "B K G T S"]:
    """What belongs to a query's head, under its name as [B, N, T, S]."""
    return tap(name, x.reshape(x.shape[0], -1, *x.shape[3:])).reshape(x.shape)
