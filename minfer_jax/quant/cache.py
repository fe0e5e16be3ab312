"""Rows of keys or values as the cache holds them: plain floats, or q8_0.

q8_0 (ggml's block of that name) keeps 32 neighbours of a row as bytes with one float16 scale:

    row        x0 .. x31        x32 .. x63
    values     q0 .. q31        q32 .. q63         int8,     q = round(x / d), halves away from 0
    scales     d0               d1                 float16,  d = max |x| / 127

The bytes are made with d as it is before it is rounded to float16, as in ggml's quantize_row_q8_0.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Int8

Q8_0 = "q8_0"
BLOCK = 32  # values that share a scale
CACHE_TYPES = {  # what a user calls it, and ModelConfig.cache_dtype
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "q8_0": Q8_0,
}
TYPES = tuple(CACHE_TYPES.values())


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q8Cache:
    """Rows of q8_0. A row is the last axis; the axes before it are any.

    Attributes:
        values: [..., H].
        scales: [..., H / 32].
    """

    values: Int8[Array, "... H"]
    scales: Float16[Array, "... blocks"]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what the rows stand for, [..., H]."""
        return self.values.shape


Cache = Array | Q8Cache


def row_bytes(width: int, cache_type: str) -> int:
    """Bytes of one row.

    Args:
        width: H, values of a row.
        cache_type: one of TYPES.

    Raises:
        ValueError: there is no such type, or it does not take rows of this width. One line.
    """
    if cache_type not in TYPES:
        raise ValueError(f"the cache type is {cache_type!r}, expected one of {', '.join(TYPES)}")
    if cache_type != Q8_0:
        return width * jnp.dtype(cache_type).itemsize
    if width % BLOCK:
        raise ValueError(
            f"a {Q8_0} cache takes heads of a multiple of {BLOCK} values, but this model's have "
            f"{width}; choose {', '.join(name for name in CACHE_TYPES if name != Q8_0)}"
        )
    return width + width // BLOCK * 2


def empty(shape: tuple[int, ...], cache_type: str) -> Cache:
    """Rows of zeros, [..., H]. Errors as of `row_bytes`."""
    row_bytes(shape[-1], cache_type)
    if cache_type != Q8_0:
        return jnp.zeros(shape, cache_type)
    scales = (*shape[:-1], shape[-1] // BLOCK)
    return Q8Cache(values=jnp.zeros(shape, jnp.int8), scales=jnp.zeros(scales, jnp.float16))


def rounded(x: Float[Array, "... H"], like: Cache) -> Cache:
    """Rows of float32 in the type of a cache."""
    if not isinstance(like, Q8Cache):
        return x.astype(like.dtype)
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    largest = jnp.abs(blocks).max(-1, keepdims=True)
    # Rounded at each step, as ggml does: were the divisor constant, XLA would multiply by 1 / 127,
    # and but for the barrier it would turn 2 / (x / 127) into 2 * 127 / x.
    d = lax.optimization_barrier(largest / jnp.where(largest == 0, 1.0, 127.0))
    twice = (blocks * jnp.where(d == 0, 0.0, 2.0 / d)).astype(jnp.int32)
    q = lax.div(twice + jnp.sign(twice), jnp.int32(2))
    return Q8Cache(values=q.astype(jnp.int8).reshape(x.shape), scales=d[..., 0].astype(jnp.float16))


def floats(cache: Cache, dtype: str) -> Float[Array, "... H"]:
    """What the rows stand for; that of q8_0 is computed in float32, then rounded to `dtype`."""
    if not isinstance(cache, Q8Cache):
        return cache.astype(dtype)
    blocks = cache.values.astype(jnp.float32).reshape(*cache.scales.shape, BLOCK)
    x = blocks * cache.scales.astype(jnp.float32)[..., None]
    return x.reshape(cache.shape).astype(dtype)
