"""The KV state: per layer keys and values, and the position that each slot holds.

A layer with full attention has n_ctx slots; a sliding layer has a ring of window + chunk slots.
Position p lies in slot p % S of either. A slot holds position -1 until it is written:

    S = 6, after positions 0..7:   slot       0  1  2  3  4  5
                                   position   6  7  2  3  4  5

One mask serves both kinds. A query at position qp sees slot s iff

    0 <= pos[s] <= qp  and  qp - pos[s] < window

A chunk of T consecutive positions is written before it attends. That is safe in a ring as long as
T <= S - window: the row that position p overwrites held p - S, out of reach of the whole chunk.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax.model.config import LayerSpec, ModelConfig

FULL, SLIDING = 0, 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVState:
    """Keys and values of a batch of sequences. Tuples have an entry for FULL and one for SLIDING.

    Attributes:
        k, v: cache dtype [layers of the kind, B, K, S, H].
        positions: int32 [B, S], the same for all layers of the kind; -1 marks an empty slot.
    """

    k: tuple[Array, Array]
    v: tuple[Array, Array]
    positions: tuple[Array, Array]


def init(cfg: ModelConfig, n_ctx: int, *, batch: int = 1, chunk: int = 512) -> KVState:
    """An empty state.

    Args:
        cfg: the model.
        n_ctx: positions that fit.
        batch: B, sequences.
        chunk: the longest run of tokens that one call of `forward` will be given.
    """
    n_sliding = sum(spec.sliding for spec in cfg.layers)
    layers = (cfg.n_layer - n_sliding, n_sliding)
    slots = (n_ctx, min(n_ctx, cfg.window + chunk))
    shapes = [
        (n, batch, cfg.n_head_kv, s, cfg.head_dim) for n, s in zip(layers, slots, strict=True)
    ]

    def empty() -> tuple[Array, Array]:
        return jnp.zeros(shapes[FULL], cfg.cache_dtype), jnp.zeros(shapes[SLIDING], cfg.cache_dtype)

    held = [jnp.full((batch, s), -1, jnp.int32) for s in slots]
    return KVState(k=empty(), v=empty(), positions=(held[FULL], held[SLIDING]))


def kind(spec: LayerSpec) -> int:
    """Which entry of the KVState's tuples a layer uses."""
    return SLIDING if spec.sliding else FULL


def slots_of(positions: Int[Array, "B T"], n_slots: int) -> Int[Array, "B T"]:
    """The slot of each position; padding (-1) gets n_slots, where nothing is written."""
    return jnp.where(positions < 0, n_slots, positions % n_slots)


def write(
    cache: Float[Array, "L B K S H"],
    new: Float[Array, "B T K H"],
    layer: Int[Array, ""],
    slots: Int[Array, "B T"],
) -> Float[Array, "L B K S H"]:
    """Put rows into their slots of one layer, rounded to the cache's dtype; slot S is nowhere."""
    new = new.astype(cache.dtype)
    n_batch, t = slots.shape
    if t > 1:
        batch = jnp.arange(n_batch, dtype=jnp.int32)[:, None]
        return cache.at[layer, batch, :, slots].set(new, mode="drop")
    # One row: a slice updates in place where a scatter would be a loop.
    n_slots = cache.shape[3]
    zero = jnp.uint32(0)
    for b in range(n_batch):
        slot = jnp.minimum(slots[b, 0], n_slots - 1).astype(jnp.uint32)
        at = (layer.astype(jnp.uint32), jnp.uint32(b), zero, slot, zero)
        row = new[b, 0][None, None, :, None]  # 1 1 K 1 H
        old = lax.dynamic_slice(cache, at, row.shape)
        cache = lax.dynamic_update_slice(cache, jnp.where(slots[b, 0] < n_slots, row, old), at)
    return cache


def write_positions(
    held: Int[Array, "B S"], positions: Int[Array, "B T"], slots: Int[Array, "B T"]
) -> Int[Array, "B S"]:
    """Note which position each written slot now holds."""
    batch = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    return held.at[batch, slots].set(positions, mode="drop")
