"""Random weights and caches, made on the device: nothing of their size is ever on the host."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from minfer_jax.quant import cache as caches
from minfer_jax.quant.cache import Cache
from minfer_jax.quant.formats import FORMATS, Format
from minfer_jax.quant.formats.base import TILE
from minfer_jax.quant.qtensor import QTensor

BY_NAME = {fmt.name: fmt for fmt in FORMATS.values()}
_MOST = 63  # of the integers that multiply a scale


def key(seed: int) -> Array:
    """Of a generator that takes the device little time, and the compiler too."""
    return jax.random.key(seed, impl="unsafe_rbg")


def weight(
    seed: int, name: str, shape: tuple[int, int], layers: int = 0, std: float | None = None
) -> QTensor:
    """A random weight, or a stack of them, with a mean of about 0.

    Args:
        seed: of all planes.
        name: ggml's name of the format.
        shape: (N, K).
        layers: of the stack; 0 for none.
        std: standard deviation of the weights, roughly; None for 1 / sqrt(K).
    """
    spread = 1.0 / math.sqrt(shape[1]) if std is None else std
    return _weight(key(seed), fmt=BY_NAME[name], shape=shape, layers=layers, std=spread)


@functools.partial(jax.jit, static_argnames=("fmt", "shape", "layers", "std"))
def _weight(key: Array, fmt: Format, shape: tuple[int, int], layers: int, std: float) -> QTensor:
    n, k = shape
    if k % fmt.block:
        raise ValueError(f"K={k} is no multiple of {fmt.name}'s block of {fmt.block}")
    keys = iter(jax.random.split(key, 8))
    # What planes a format has is known to its `unpack`: one block tells.
    planes = fmt.unpack(np.zeros((1, 1, fmt.block_bytes), np.uint8))

    def full(plane: np.ndarray) -> tuple[int, ...]:
        tall = (-(-n // TILE), plane.size * (k // fmt.block), TILE)
        return (layers, *tall) if layers else tall

    def words(plane: np.ndarray) -> Array:
        return jax.random.bits(next(keys), full(plane), plane.dtype)

    if planes.dense is not None:
        dense = std * jax.random.normal(next(keys), full(planes.dense))
        return QTensor(fmt=fmt, shape=shape, dense=dense.astype(planes.dense.dtype))
    assert planes.scale is not None
    sub, ranged = None, 1.0
    if planes.sub is not None:
        least = -_MOST if planes.sublow is None else 1  # with a minimum they are unsigned
        sub = jax.random.randint(next(keys), full(planes.sub), least, _MOST + 1, jnp.int8)
        ranged = _MOST / math.sqrt(3)
    codes = np.arange(2 ** sum(fmt.widths)) if fmt.codebook is None else np.array(fmt.codebook)
    base = std / (float(codes.std()) * ranged * fmt.factor)
    scale, low = _scale(next(keys), fmt, full(planes.scale), base), None
    if planes.low is not None:
        low = (scale.astype(jnp.float32) * -float(codes.mean() - fmt.zero)).astype(jnp.float16)
    return QTensor(
        fmt=fmt,
        shape=shape,
        bits=tuple(words(plane) for plane in planes.bits),
        scale=scale,
        sub=sub,
        low=low,
        sublow=None if planes.sublow is None else sub,
        high=None if planes.high is None else words(planes.high),
    )


def _scale(key: Array, fmt: Format, shape: tuple[int, ...], base: float) -> Array:
    """float16 around `base`, or the bytes of a format whose scales are powers of two, or nearly."""
    if fmt.byte_scale is None:
        some = jax.random.uniform(key, shape, jnp.float32, 0.8, 1.2)
        return (base * some).astype(jnp.float16)
    exponent = round(math.log2(base))
    if fmt.byte_scale == "bfloat16":
        return jax.random.randint(key, shape, exponent + 126, exponent + 128, jnp.uint8)
    fraction = jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(7)
    return fraction | jnp.uint8((exponent + 15) << 3)


def nbytes(w: QTensor) -> int:
    """Of the planes of one weight of the stack; arrays may be their shapes."""
    total = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(w))
    plane = w.bits[0] if w.dense is None else w.dense
    return total // plane.shape[0] if w.stacked else total


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of a model's attention.

    Attributes:
        name: what it is of.
        n, k, h: query heads, kv heads, size of a head.
        window: positions that a query sees; 0 for all.
        softcap: of the scores; 0 for none.
        sinks: whether each head has one.
    """

    name: str
    n: int
    k: int
    h: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Arguments of `attend` but for the scoring, in its order."""

    q: Float[Array, "B T N H"]
    k: Cache
    v: Cache
    layer: Array
    q_positions: Array
    k_positions: Array
    sinks: Array | None

    def args(self) -> tuple:
        """In order."""
        return (
            *(self.q, self.k, self.v, self.layer),
            *(self.q_positions, self.k_positions, self.sinks),
        )


def attention(
    heads: Heads,
    *,
    t: int,
    slots: int,
    filled: int,
    cache: str,
    layers: int = 2,
    batch: int = 1,
    padding: int = 0,
) -> Attention:
    """The last t of `filled` positions ask, where slots hold what is left of all of them.

    Args:
        heads: of the model.
        t: queries of each sequence.
        slots: of the cache; fewer than `filled` make it a ring that has wrapped.
        filled: positions of the longest sequence; each further one has a fourth less.
        cache: one of `quant.cache.TYPES`.
        layers: in the stack.
        batch: sequences.
        padding: queries at the end that are none.
    """
    keys = jax.random.split(key(2), 4)
    shape = (layers, batch, heads.k, slots, heads.h)
    lengths = [max(t, filled - i * (filled // 4)) for i in range(batch)]
    asked, held = np.full((batch, t), -1, np.int32), np.full((batch, slots), -1, np.int32)
    for row, length in enumerate(lengths):
        real = t - padding
        asked[row, :real] = np.arange(length - real, length)
        some = np.arange(max(0, length - slots), length)
        held[row, some % slots] = some
    return Attention(
        q=jax.random.normal(keys[0], (batch, t, heads.n, heads.h)),
        k=_rows(keys[1], shape, cache),
        v=_rows(keys[2], shape, cache),
        layer=jnp.uint32(layers - 1),
        q_positions=jnp.asarray(asked),
        k_positions=jnp.asarray(held),
        sinks=jax.random.normal(keys[3], (heads.n,)) if heads.sinks else None,
    )


@functools.partial(jax.jit, static_argnames=("shape", "cache"))
def _rows(key: Array, shape: tuple[int, ...], cache: str) -> Cache:
    if cache != caches.Q8_0:
        return jax.random.normal(key, shape).astype(cache)
    return caches.rounded(jax.random.normal(key, shape), caches.empty(shape, cache))
