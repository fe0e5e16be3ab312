"""The second half of attention of few positions: many softmaxes of the same row made one.

Programs of `attention_decode` that shared the slots of a row have left the largest score, the sum
of weights and the weighted sum of values of what each of them saw. Merged by log-sum-exp, and with
the row's sink, these are the attention of the row; its plain twin is the end of `_attend_tile` in
`model/attention.py`.

XLA would need several kernels for it, and in decoding each launch counts. A program has one row and
up to 64 of its columns: 128 softmaxes of 64 columns are 64 registers of each of 128 threads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from minfer_jax.pallas import attention_tiles as tiles

NAME = "attention_merge"
_COLUMNS = 64  # of a program


def as_one(
    top: Float[Array, " P"], total: Float[Array, " P"], acc: Float[Array, "P Hv"]
) -> tuple[Array, Array, Array]:
    """P softmaxes of the same row as one: the largest score, the sum of weights, [Hv]."""
    new_top = top.max()
    factor = jnp.exp(top - new_top)
    return new_top, (total * factor).sum(), (acc * factor[:, None]).sum(0)


def merged(
    top: Float[Array, "B K M P"],
    total: Float[Array, "B K M P"],
    acc: Float[Array, "B K M P Hv"],
    sinks: Float[Array, " N"] | None,
    t: int,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N Hv"]:
    """The attention of each row.

    Args:
        top: the largest score that each of P programs saw; row t * G + g is head g at position t.
        total: sums of weights, relative to it.
        acc: weighted sums of values, likewise; not set where total is 0.
        sinks: one more score of each query head, without a value; None for none.
        t: positions.
        interpret: run on any device, slowly.

    Returns:
        float32 [B, T, N, Hv].
    """
    b, heads_kv, rows, splits, h_v = acc.shape
    groups = rows // t
    columns = min(_COLUMNS, tiles.padded(h_v))
    chunks = pl.cdiv(h_v, columns)

    def head(i: Array, kv_head: Array) -> Array:
        return kv_head * groups + lax.rem(lax.div(i, jnp.int32(chunks)), jnp.int32(groups))

    def chunk(i: Array) -> Array:
        return lax.rem(i, jnp.int32(chunks))

    def row(i: Array) -> Array:
        return lax.div(i, jnp.int32(chunks))

    numbers = pl.BlockSpec((None, None, None, splits), lambda i, kv, b: (b, kv, row(i), 0))
    return pl.pallas_call(
        functools.partial(_kernel, h_v=h_v, chunks=chunks),
        grid=(rows * chunks, heads_kv, b),
        in_specs=[
            numbers,
            numbers,
            pl.BlockSpec(
                (None, None, None, splits, columns),
                lambda i, kv, b: (b, kv, row(i), 0, chunk(i)),
            ),
            None if sinks is None else pl.BlockSpec((None,), lambda i, kv, b: (head(i, kv),)),
        ],
        out_specs=pl.BlockSpec(
            (None, None, None, columns),
            lambda i, kv, b: (b, lax.div(row(i), jnp.int32(groups)), head(i, kv), chunk(i)),
        ),
        out_shape=jax.ShapeDtypeStruct((b, t, heads_kv * groups, h_v), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=NAME,
    )(top, total, acc, sinks)


def _kernel(
    top_ref: Any,  # P
    total_ref: Any,  # P
    acc_ref: Any,  # P Hv
    sink_ref: Any | None,
    out_ref: Any,  # Hv
    *,
    h_v: int,
    chunks: int,
):
    top, total = top_ref[...], total_ref[...]
    columns = acc_ref.shape[1]
    start = lax.rem(pl.program_id(0), jnp.int32(chunks)) * columns
    inside = start + jnp.arange(columns, dtype=jnp.int32) < h_v
    # NaN is not 0: it goes on to the result.
    filled = inside[None] & (total != 0.0)[:, None]
    acc = plt.load(acc_ref, mask=filled, other=jnp.float32(0))
    new_top, new_total, new_acc = as_one(top, total, acc)
    if sink_ref is not None:  # one more score, without a value
        sink = sink_ref[()]
        larger = jnp.maximum(new_top, sink)
        shrink = jnp.exp(new_top - larger)
        new_total = new_total * shrink + jnp.exp(sink - larger)
        new_acc = new_acc * shrink
    plt.store(out_ref, tiles.quotient(new_acc, new_total), mask=inside)
