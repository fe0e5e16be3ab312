"""What both attention kernels do: read a tile of the cache, and one block of a running softmax.

A tile's sides must be powers of two. Heads of another size (80, 96, 112, 192) are padded to the
next one in registers: what lies past the end of a row is not read, and counts as 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from minfer_jax.pallas.scoring import NEVER, Scoring, capped, seen
from minfer_jax.quant.cache import Cache, Q8Cache, floats

LARGEST_HEAD = 256  # a tile of larger ones does not fit the registers
_OFFSETS = 2**31 - 1  # that Triton computes in 32 bits, for arrays of up to 4 GiB

State = tuple[Array, Array, Array]  # the running softmax: M, M, M Hv


def refused(k: Cache, v: Cache) -> str | None:
    """Why there is no kernel for such caches; None if there is."""
    widest = max(k.shape[-1], v.shape[-1])
    if widest > LARGEST_HEAD:
        return f"heads of {widest} values, more than {LARGEST_HEAD}"
    for plane in jax.tree.leaves((k, v)):
        if plane.size > _OFFSETS and plane.size * plane.dtype.itemsize <= 2**32:
            return f"a plane of {plane.size} values of {plane.dtype}: offsets overflow 32 bits"
    return None


def case(q: Float[Array, "B T N H"], k: Cache, v: Cache, dtype: str) -> str:
    """How the cases of both kernels begin in blocks.json: heads, the cache's type, the factors'."""
    kind = "q8_0" if isinstance(k, Q8Cache) else str(k.dtype)
    return f"{q.shape[2]}/{k.shape[2]} heads of {k.shape[-1]}/{v.shape[-1]} {kind} {dtype}"


def padded(n: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, pl.next_power_of_2(n))


def widths(cache: Cache) -> Any:
    """The last axis of each plane."""
    return jax.tree.map(lambda plane: plane.shape[-1], cache)


def specs(cache: Cache, block: int, least: int, index: Any) -> Any:
    """Block specs by which a kernel sees [L, S, H] of one kv head of one sequence.

    S and H are rounded up to whole tiles: what the kernel does not mask would be read past the end.

    Args:
        cache: [L, B, K, S, H].
        block: slots of a tile.
        least: columns of a tile, at least.
        index: (kv head, sequence) of a program's place in the grid.
    """
    h = cache.shape[-1]

    def spec(plane: Array) -> pl.BlockSpec:
        n_layers, _, _, n_slots, width = plane.shape
        columns = padded(h, least) // (h // width)  # that of scales: one for 32
        shape = (n_layers, None, None, pl.cdiv(n_slots, block) * block, columns)

        def place(*program: Array) -> tuple[Any, ...]:
            head, batch = index(*program)
            return 0, batch, head, 0, 0

        return pl.BlockSpec(shape, place)

    return jax.tree.map(spec, cache)


def tile(
    cache: Any, width: Any, layer: Array, start: Array, block: int, n_slots: int, dtype: str
) -> Float[Array, "C H"]:
    """Rows of one layer from slot `start` on, in `dtype`.

    Args:
        cache: refs of its planes, as `specs` has them.
        width: of its planes, from `widths`.
        layer: index.
        start: a multiple of block.
        block: C, how many.
        n_slots: S; rows past it are 0.
        dtype: of the result.
    """

    def load(ref: Any, width: int) -> Array:
        size = ref.shape[-1]
        inside = None
        if n_slots % block:
            inside = ((start + jnp.arange(block, dtype=jnp.int32)) < n_slots)[:, None]
        if width != size:
            columns = (jnp.arange(size, dtype=jnp.int32) < width)[None]
            inside = columns if inside is None else inside & columns
        other = None if inside is None else jnp.zeros((), ref.dtype)
        return plt.load(ref.at[layer, pl.ds(start, block), :], mask=inside, other=other)

    return floats(jax.tree.map(load, cache, width), dtype)


def held_by(held: Any, start: Array, block: int, n_slots: int) -> Int[Array, " C"]:
    """The positions that slots hold, -1 for what lies past the last."""
    inside = (start + jnp.arange(block, dtype=jnp.int32)) < n_slots
    return plt.load(held.at[pl.ds(start, block)], mask=inside, other=jnp.int32(-1))


def unseen(rows: int, width: int) -> State:
    """The running softmax of rows that have seen nothing."""
    return (
        jnp.full((rows,), NEVER, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def absorbed(
    state: State,
    q: Float[Array, "M H"],
    k: Float[Array, "C H"],
    v: Float[Array, "C Hv"],
    at: Int[Array, " M"],
    held: Int[Array, " C"],
    scoring: Scoring,
) -> State:
    """The running softmax after one more block of slots.

    Args:
        state: before it.
        q: scaled queries in the type of the factors; M is 16 at least, as tensor cores want it.
        k, v: rows of the block in the same type.
        at: the queries' positions.
        held: the slots' positions.
        scoring: static.
    """
    top, total, acc = state
    scores = capped(dot(q, k, transposed=True), scoring.softcap)
    see = seen(at[:, None], held[None], scoring.window)
    scores = jnp.where(see, scores, NEVER)
    new_top = jnp.maximum(top, scores.max(1))
    weights = jnp.where(see, jnp.exp(scores - new_top[:, None]), 0.0)
    shrink = jnp.exp(top - new_top)
    total = total * shrink + weights.sum(1)
    acc = acc * shrink[:, None] + dot(weights.astype(v.dtype), v)
    return new_top, total, acc


def dot(a: Array, b: Array, *, transposed: bool = False) -> Array:
    """A product summed in float32; of float32 factors it is exact, that is, without TF32."""
    return plt.dot(a, b, trans_b=transposed, precision=lax.Precision.HIGHEST)


def quotient(acc: Float[Array, "... Hv"], total: Float[Array, "..."]) -> Float[Array, "... Hv"]:
    """acc / total; 0 where nothing was seen. Triton's maximum would lose a NaN in the total."""
    return acc / jnp.where(total == 0.0, 1.0, total)[..., None]
