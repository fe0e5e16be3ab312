"""Attention of many positions: tiles of queries against blocks of slots, with a running softmax.

Its plain twin is `_blocked` in `model/attention.py`. A program has one query head and a tile of
positions. It walks over the blocks of slots that its tile can see: the bounds of the loop are made
from the tile's positions, so that neither slots of the future, nor those that the window has left,
nor empty ones cost anything.

Why it is cut as it is. Programs of neighbouring query heads are started together, and those that
share a kv head read the same rows at about the same time: from the L2 cache, all but one of them.
Later tiles see more slots and are started first, so that the device does not wait for one long
program at the end. Queries stay in registers as tensor core operands, and so does what is summed
up: 128 positions of 64 values are 64 registers of each of 128 threads, 128 values take 8 warps, 256
values tiles of 64 positions. Keys and values go through shared memory, copied while the block
before is worked on: two stages of 64 rows of 128 values of 2 bytes are 64 KiB, which every device
since Ampere has. Float32 factors have no tensor cores without TF32: their tiles are small.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from minfer_jax.pallas import attention_tiles as tiles
from minfer_jax.pallas import blocks
from minfer_jax.pallas.scoring import Scoring, visible_blocks
from minfer_jax.quant.cache import Cache

NAME = "attention_prefill"
_LEAST = 16  # the smallest side of a product


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes; all are powers of two.

    Attributes:
        tile: positions of a program, 16 at least.
        block: slots of a step, 16 at least.
        warps: of a program.
        stages: blocks that are on their way at a time.
    """

    tile: int
    block: int
    warps: int
    stages: int


def default(q: Float[Array, "B T N H"], k: Cache, v: Cache, dtype: str) -> Config:
    """A rule of thumb, for queries, caches of all layers, and the type of the factors."""
    width = tiles.padded(max(k.shape[-1], v.shape[-1]), _LEAST)
    if dtype == "float32":
        tile, block, warps, stages = 32, 32 if width <= 128 else 16, 4, 1
    elif width <= 64:
        tile, block, warps, stages = 128, 64, 4, 2
    elif width <= 128:
        tile, block, warps, stages = 128, 64, 8, 2
    else:
        tile, block, warps, stages = 64, 32, 8, 2
    tile = min(tile, tiles.padded(q.shape[1], _LEAST))
    block = min(block, tiles.padded(k.shape[3], _LEAST))
    return Config(tile=tile, block=block, warps=min(warps, tile // _LEAST * 2), stages=stages)


def supports(q: Float[Array, "B T N H"], k: Cache, v: Cache) -> str | None:
    """None if the kernel takes such queries and caches, [L, B, K, S, H]; else why it does not."""
    del q  # of any number
    return tiles.refused(k, v)


def case(q: Float[Array, "B T N H"], k: Cache, v: Cache, dtype: str) -> str:
    """What the best sizes depend on, as blocks.json names it."""
    return f"{tiles.case(q, k, v, dtype)} tokens {q.shape[1]}"


# Traced and lowered once for a shape, however many layers call it.
@functools.partial(jax.jit, static_argnames=("scoring", "config", "interpret"))
def attention(
    q: Float[Array, "B T N H"],
    k: Cache,
    v: Cache,
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    sinks: Float[Array, " N"] | None,
    scoring: Scoring,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N Hv"]:
    """What `model.attention.attend` computes; position p lies in slot p % S, as there.

    Args:
        q, k, v, layer, q_positions, k_positions, sinks, scoring: as there.
        config: sizes; None for the table's, or the default.
        interpret: run on any device, slowly.

    Returns:
        float32 [B, T, N, Hv].
    """
    b, t, n, h = q.shape
    n_slots, h_v = k.shape[3], v.shape[4]
    groups = n // k.shape[2]
    dtype = scoring.dtype
    if config is None:
        config = blocks.chosen(NAME, case(q, k, v, dtype), default(q, k, v, dtype))
    size, block = config.tile, config.block
    n_tiles = pl.cdiv(t, size)
    least = functools.partial(tiles.padded, least=_LEAST)

    def rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, size, None, least(width)), lambda n, i, b: (b, n_tiles - 1 - i, n, 0)
        )

    caches = functools.partial(
        tiles.specs,
        block=block,
        least=_LEAST,
        index=lambda n, i, b: (lax.div(n, jnp.int32(groups)), b),
    )
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            scoring=scoring,
            t=t,
            n_slots=n_slots,
            width=(h, h_v),
            planes=(tiles.widths(k), tiles.widths(v)),
        ),
        grid=(n, n_tiles, b),
        in_specs=[
            pl.BlockSpec((), lambda n, i, b: ()),
            pl.BlockSpec((None, size), lambda n, i, b: (b, n_tiles - 1 - i)),
            pl.BlockSpec((None, pl.cdiv(n_slots, block) * block), lambda n, i, b: (b, 0)),
            rows(h),
            caches(k),
            caches(v),
            None if sinks is None else pl.BlockSpec((None,), lambda n, i, b: (n,)),
        ],
        out_specs=rows(h_v),
        out_shape=jax.ShapeDtypeStruct((b, t, n, h_v), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name=NAME,
    )
    return call(layer.astype(jnp.int32), q_positions, k_positions, q, k, v, sinks)


def _kernel(
    layer_ref: Any,
    at_ref: Any,  # tile
    held_ref: Any,  # S
    q_ref: Any,  # tile H
    k_ref: Any,  # L S H, or a Q8Cache of such
    v_ref: Any,
    sink_ref: Any | None,
    out_ref: Any,  # tile Hv
    *,
    config: Config,
    scoring: Scoring,
    t: int,
    n_slots: int,
    width: tuple[int, int],
    planes: tuple[Any, Any],
):
    size, block = config.tile, config.block
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * size
    real = (start + jnp.arange(size, dtype=jnp.int32)) < t
    at = plt.load(at_ref, mask=real, other=jnp.int32(-1))
    inside, inside_v = (
        real[:, None] & (jnp.arange(ref.shape[-1], dtype=jnp.int32) < w)[None]
        for ref, w in zip((q_ref, out_ref), width, strict=True)
    )
    q = plt.load(q_ref, mask=inside, other=jnp.float32(0))
    q = (q * jnp.float32(scoring.scale)).astype(scoring.dtype)
    layer = layer_ref[()]
    first, count = visible_blocks(at, n_slots, block, scoring.window)
    n_blocks = pl.cdiv(n_slots, block)

    def step(i: Array, state: tiles.State) -> tiles.State:
        i = first + i
        begin = jnp.where(i < n_blocks, i, i - n_blocks) * block
        k, v = (
            tiles.tile(ref, plane, layer, begin, block, n_slots, scoring.dtype)
            for ref, plane in zip((k_ref, v_ref), planes, strict=True)
        )
        held = tiles.held_by(held_ref, begin, block, n_slots)
        return tiles.absorbed(state, q, k, v, at, held, scoring)

    state = tiles.unseen(size, out_ref.shape[-1])
    if sink_ref is not None:  # as if each row had seen its sink, with a value of 0
        state = jnp.full((size,), sink_ref[()]), jnp.ones((size,), jnp.float32), state[2]
    _, total, acc = lax.fori_loop(jnp.int32(0), count, step, state)
    plt.store(out_ref, tiles.quotient(acc, total), mask=inside_v)
