"""Attention of few positions: the slots split among programs, and what these found merged.

Its plain twin is `_blocked` in `model/attention.py`. A program has one kv head of one sequence with
all its M = T * G query rows, so that each key and value is read once; row t * G + g is head g at
position t. The blocks of slots that the queries see (the bounds are made from positions, so no
empty slot is read) are dealt out in turns: P programs share however many are filled.

    blocks     first  +1  +2  +3  +4  +5  +6         P = 3
    program      0     1   2   0   1   2   0

Each leaves a softmax of its own: the largest score, the sum of weights, the weighted sum of values.
`attention_merge` makes one of them.

There are two forms of the same sum.

- Float32 factors and up to 8 rows, which is decoding token by token: multiply and sum. Tensor cores
  would round (TF32), and a plain product wants 16 rows, most of them padding: 16 multiplications
  for each cached value take longer than to read it. Each slot of the block (each lane) keeps a
  running softmax of its own over the steps, and the lanes are merged once at the end: so a step has
  no barrier and no sum across warps, only that over the columns of a key, which neighbours in one
  warp share. A thread loads 16 bytes of a row at a time, a warp whole runs of 128 bytes and more;
  keys, values and positions of a step do not wait for each other. The size of a block follows from
  the registers: what is summed up takes 16 for each of up to 4 rows, or 8 for each of 8, of 128
  threads.
- Otherwise, that is for 16-bit factors or many rows: products, on tensor cores where the factors
  have 16 bits, of rows padded to 16, 32 or 64, with one running softmax a row.
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

from minfer_jax.pallas import attention_merge, blocks
from minfer_jax.pallas import attention_tiles as tiles
from minfer_jax.pallas.scoring import NEVER, Scoring, capped, seen, visible_blocks
from minfer_jax.quant.cache import Cache

NAME = "attention_decode"
MOST_POSITIONS = 8
MOST_ROWS = 64
_SUMMED_ROWS = 8  # up to so many rows of float32 are multiplied and summed
_LEAST = 16  # the smallest side of a product
_PROGRAMS = 512  # that fill a large device, at 4 warps each
_MOST_SPLITS = 128


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes; all are powers of two.

    Attributes:
        block: slots of a step; 16 at least, where there are products.
        splits: P, programs that share the slots of one kv head; 128 at most.
        warps: of a program.
        stages: blocks that are on their way at a time.
    """

    block: int
    splits: int
    warps: int
    stages: int


def default(q: Float[Array, "B T N H"], k: Cache, v: Cache, dtype: str) -> Config:
    """A rule of thumb, for queries, caches of all layers, and the type of the factors."""
    _, b, heads_kv, n_slots, h = k.shape
    rows = q.shape[1] * q.shape[2] // heads_kv
    width = tiles.padded(max(h, v.shape[4]), _LEAST)
    if _summed(rows, dtype):
        block = min(64, (2048 if rows <= 4 else 1024) // width)
        block, warps, stages = min(block, tiles.padded(n_slots)), 4, 1
    else:
        values, stages = (4096, 1) if dtype == "float32" else (8192, 2)
        block = min(64, values // width, tiles.padded(n_slots, _LEAST))
        warps = 4 if rows <= 32 else 8
    wanted = min(_MOST_SPLITS, -(-_PROGRAMS // (b * heads_kv)), pl.cdiv(n_slots, block))
    return Config(block=block, splits=tiles.padded(wanted), warps=warps, stages=stages)


def supports(q: Float[Array, "B T N H"], k: Cache, v: Cache) -> str | None:
    """None if the kernel takes such queries and caches, [L, B, K, S, H]; else why it does not."""
    t, n = q.shape[1:3]
    if t > MOST_POSITIONS:
        return f"{t} positions, more than {MOST_POSITIONS}"
    if (rows := t * n // k.shape[2]) > MOST_ROWS:
        return f"{rows} query rows of a kv head, more than {MOST_ROWS}"
    return tiles.refused(k, v)


def case(q: Float[Array, "B T N H"], k: Cache, v: Cache, dtype: str) -> str:
    """What the best sizes depend on, as blocks.json names it."""
    return f"{tiles.case(q, k, v, dtype)} tokens {q.shape[0]}x{q.shape[1]}"


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
    heads_kv, n_slots, h_v = *k.shape[2:4], v.shape[4]
    groups, dtype = n // heads_kv, scoring.dtype
    if config is None:
        config = blocks.chosen(NAME, case(q, k, v, dtype), default(q, k, v, dtype))
    summed = _summed(t * groups, dtype)
    rows = tiles.padded(t * groups, 1 if summed else _LEAST)
    least = 1 if summed else _LEAST
    q = q.reshape(b, t, heads_kv, groups, h).swapaxes(1, 2).reshape(b, heads_kv, t * groups, h)
    at = jnp.repeat(q_positions, groups, axis=1)  # B M
    caches = functools.partial(
        tiles.specs, block=config.block, least=least, index=lambda p, head, b: (head, b)
    )
    parts = (b, heads_kv, t * groups, config.splits)
    number = pl.BlockSpec((None, None, rows, None), lambda p, head, b: (b, head, 0, p))
    width = tiles.padded(h_v, least)
    top, total, acc = pl.pallas_call(
        functools.partial(
            _kernel,
            config=config,
            scoring=scoring,
            rows=t * groups,
            n_slots=n_slots,
            width=(h, h_v),
            planes=(tiles.widths(k), tiles.widths(v)),
        ),
        grid=(config.splits, heads_kv, b),
        in_specs=[
            pl.BlockSpec((), lambda p, head, b: ()),
            pl.BlockSpec((None, rows), lambda p, head, b: (b, 0)),
            pl.BlockSpec(
                (None, pl.cdiv(n_slots, config.block) * config.block), lambda p, head, b: (b, 0)
            ),
            pl.BlockSpec(
                (None, None, rows, tiles.padded(h, least)), lambda p, head, b: (b, head, 0, 0)
            ),
            caches(k),
            caches(v),
        ],
        out_specs=[
            number,
            number,
            pl.BlockSpec((None, None, rows, None, width), lambda p, head, b: (b, head, 0, p, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((*parts, h_v), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name=NAME,
    )(layer.astype(jnp.int32), at, k_positions, q, k, v)
    return attention_merge.merged(top, total, acc, sinks, t, interpret=interpret)


def _summed(rows: int, dtype: str) -> bool:
    """Which of the two forms it is."""
    return dtype == "float32" and rows <= _SUMMED_ROWS


def _kernel(
    layer_ref: Any,
    at_ref: Any,  # M
    held_ref: Any,  # S
    q_ref: Any,  # M H
    k_ref: Any,  # L S H, or a Q8Cache of such
    v_ref: Any,
    top_ref: Any,  # M
    total_ref: Any,  # M
    acc_ref: Any,  # M Hv
    *,
    config: Config,
    scoring: Scoring,
    rows: int,
    n_slots: int,
    width: tuple[int, int],
    planes: tuple[Any, Any],
):
    block, splits = config.block, config.splits
    real = jnp.arange(at_ref.shape[0], dtype=jnp.int32) < rows
    at = plt.load(at_ref, mask=real, other=jnp.int32(-1))
    layer = layer_ref[()]
    first, count = visible_blocks(at, n_slots, block, scoring.window)
    n_blocks = pl.cdiv(n_slots, block)
    turn = pl.program_id(0)
    columns, columns_v = (
        jnp.arange(ref.shape[-1], dtype=jnp.int32) < w
        for ref, w in zip((q_ref, acc_ref), width, strict=True)
    )

    def read(i: Array) -> tuple[Array, Array, Array]:
        """(keys, values, positions) of this program's turn i."""
        i = first + turn + i * splits
        start = jnp.where(i < n_blocks, i, i - n_blocks) * block
        k, v = (
            tiles.tile(ref, plane, layer, start, block, n_slots, scoring.dtype)
            for ref, plane in zip((k_ref, v_ref), planes, strict=True)
        )
        return k, v, tiles.held_by(held_ref, start, block, n_slots)

    turns = lax.div(jnp.maximum(count - turn + (splits - 1), 0), jnp.int32(splits))
    if _summed(rows, scoring.dtype):
        queries = [
            plt.load(q_ref.at[pl.ds(m, 1), :], mask=columns[None], other=jnp.float32(0))
            * jnp.float32(scoring.scale)
            for m in range(rows)
        ]
        positions = [at_ref[m] for m in range(rows)]

        def step(i: Array, states: list[tiles.State]) -> list[tiles.State]:
            k, v, held = read(i)
            return [
                _by_lane(state, q, k, v, seen(qp, held, scoring.window), scoring.softcap)
                for state, q, qp in zip(states, queries, positions, strict=True)
            ]

        states = [tiles.unseen(block, acc_ref.shape[-1])] * rows
        for m, state in enumerate(lax.fori_loop(jnp.int32(0), turns, step, states)):
            top, total, acc = attention_merge.as_one(*state)
            top_ref[m], total_ref[m] = top, total
            plt.store(acc_ref.at[pl.ds(m, 1), :], acc[None], mask=columns_v[None] & (turns > 0))
    else:
        q = plt.load(q_ref, mask=real[:, None] & columns[None], other=jnp.float32(0))
        q = (q * jnp.float32(scoring.scale)).astype(scoring.dtype)

        def absorb(i: Array, state: tiles.State) -> tiles.State:
            k, v, held = read(i)
            return tiles.absorbed(state, q, k, v, at, held, scoring)

        state = tiles.unseen(at_ref.shape[0], acc_ref.shape[-1])
        top, total, acc = lax.fori_loop(jnp.int32(0), turns, absorb, state)
        plt.store(top_ref, top, mask=real)
        plt.store(total_ref, total, mask=real)
        plt.store(acc_ref, acc, mask=real[:, None] & columns_v[None] & (turns > 0))


def _by_lane(
    state: tiles.State,
    q: Float[Array, "1 H"],
    k: Float[Array, "C H"],
    v: Float[Array, "C Hv"],
    see: Array,
    softcap: float,
) -> tiles.State:
    """One step of a row's running softmaxes, of which each slot of the block has one of its own."""
    top, total, acc = state  # C, C, C Hv
    scores = jnp.where(see, capped((k * q).sum(1), softcap), NEVER)
    # Of the weight and of what shrinks the sums so far, one is 1: a step has one exponential.
    larger, smaller = scores > top, jnp.exp(-jnp.abs(scores - top))
    weights = jnp.where(see, jnp.where(larger, 1.0, smaller), 0.0)
    shrink = jnp.where(larger, smaller, 1.0)
    total = total * shrink + weights
    return jnp.maximum(top, scores), total, acc * shrink[:, None] + weights[:, None] * v
