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

from minfer_jax.model.config import LayerSpec, ModelConfig, ModelError
from minfer_jax.quant import cache as rows
from minfer_jax.quant.cache import Cache

FULL, SLIDING = 0, 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVState:
    """Keys and values of a batch of sequences. Tuples have an entry for FULL and one for SLIDING.

    Attributes:
        k, v: [layers of the kind, B, K, S, H] and [..., Hv], in the cache's type.
        positions: int32 [B, S], the same for all layers of the kind; -1 marks an empty slot.
    """

    k: tuple[Cache, Cache]
    v: tuple[Cache, Cache]
    positions: tuple[Array, Array]


def init(cfg: ModelConfig, n_ctx: int, *, batch: int = 1, chunk: int = 512) -> KVState:
    """An empty state.

    Args:
        cfg: the model.
        n_ctx: positions that fit.
        batch: B, sequences.
        chunk: the longest run of tokens that one call of `forward` will be given.

    Raises:
        ModelError: the cache's type does not take heads of this model's size.
    """
    row_bytes(cfg)
    n_sliding = sum(spec.sliding for spec in cfg.layers)
    layers = (cfg.n_layer - n_sliding, n_sliding)
    slots = (n_ctx, min(n_ctx, cfg.window + chunk))

    def empty(which: int, width: int) -> Cache:
        shape = (layers[which], batch, cfg.n_head_kv, slots[which], width)
        return rows.empty(shape, cfg.cache_dtype)

    held = [jnp.full((batch, s), -1, jnp.int32) for s in slots]
    return KVState(
        k=(empty(FULL, cfg.head_dim), empty(SLIDING, cfg.head_dim)),
        v=(empty(FULL, cfg.value_dim), empty(SLIDING, cfg.value_dim)),
        positions=(held[FULL], held[SLIDING]),
    )


def repeated(state: KVState, *, batch: int) -> KVState:
    """As many equal sequences as `batch` says, of a state of one."""

    def planes(pair: tuple[Cache, Cache]) -> tuple[Cache, Cache]:
        return jax.tree.map(lambda plane: jnp.repeat(plane, batch, axis=1), pair)

    full, sliding = (jnp.repeat(held, batch, axis=0) for held in state.positions)
    return KVState(k=planes(state.k), v=planes(state.v), positions=(full, sliding))


def row_bytes(cfg: ModelConfig) -> int:
    """Bytes of one position's keys and values in one layer. Errors as of `init`."""
    try:
        return cfg.n_head_kv * sum(
            rows.row_bytes(width, cfg.cache_dtype) for width in (cfg.head_dim, cfg.value_dim)
        )
    except ValueError as e:
        raise ModelError(str(e)) from None


def kind(spec: LayerSpec) -> int:
    """Which entry of the KVState's tuples a layer uses."""
    return SLIDING if spec.sliding else FULL


def in_kind(cfg: ModelConfig) -> list[int]:
    """Each layer's index among the layers of its kind."""
    kinds = [kind(spec) for spec in cfg.layers]
    return [kinds[:i].count(own) for i, own in enumerate(kinds)]


def slots_of(positions: Int[Array, "B T"], n_slots: int) -> Int[Array, "B T"]:
    """The slot of each position; padding (-1) gets n_slots, where nothing is written."""
    return jnp.where(positions < 0, n_slots, positions % n_slots)


def write(
    cache: Cache,
    new: Float[Array, "B T K H"],
    layer: Int[Array, ""],
    slots: Int[Array, "B T"],
) -> Cache:
    """Put rows into their slots of one layer, rounded to the cache's type; slot S is nowhere.

    Args:
        cache: [L, B, K, S, H].
        new: float32.
        layer: index in L.
        slots: of each row.
    """

    def put(cache: Float[Array, "L B K S W"], new: Float[Array, "B T K W"]) -> Array:
        return _write(cache, new, layer, slots)

    return jax.tree.map(put, cache, rows.rounded(new, cache))


def _write(cache: Array, new: Array, layer: Array, slots: Array) -> Array:
    """`write` of one plane."""
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
        row = new[b, 0][None, None, :, None]  # 1 1 K 1 W
        old = lax.dynamic_slice(cache, at, row.shape)
        cache = lax.dynamic_update_slice(cache, jnp.where(slots[b, 0] < n_slots, row, old), at)
    return cache


def write_positions(
    held: Int[Array, "B S"], positions: Int[Array, "B T"], slots: Int[Array, "B T"]
) -> Int[Array, "B S"]:
    """Note which position each written slot now holds."""
    batch = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    return held.at[batch, slots].set(positions, mode="drop")
