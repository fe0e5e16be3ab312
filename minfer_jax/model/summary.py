"""What is kept of a value that is too large itself: its extremes, its mean, some samples.

It is computed where the value is, so that nothing else leaves the program. A value has one row a
token, and a phase of a run may go through in several calls, each of which gives its part:

    rows of the phase     0 1 2 3 4 5 6 7 8 9       10 tokens
    calls                 0 1 2 3|4 5 6 7|8 9 - -   4 rows each; - is padding and not counted
    samples               ^     ^     ^     ^       stride 3, whichever call has the row

A part is one vector, float32 [5 + SAMPLES]:

    min  max  sum  sum of |x|  count    sample 0 .. sample 63
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minfer_jax.model.names import ROWS
from minfer_jax.model.tap import Key

SAMPLES = 64
_STATS = 5


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of the values of one call.

    Attributes:
        first: int32 [], the row of the phase that is the call's first.
        n: int32 [], rows of the call; what follows is padding.
        slots: int32 [], slots of attention that hold something; slot p holds position p.
        at: of each value, where its samples lie: from `places`.
    """

    first: Int[Array, ""] | np.ndarray
    n: Int[Array, ""] | np.ndarray
    slots: Int[Array, ""] | np.ndarray
    at: Mapping[Key, Int[Array, "SAMPLES axes"] | np.ndarray]

    def __call__(self, name: str, value: Array) -> Float[Array, " 5+SAMPLES"]:
        """The part of a value, of a batch of one. Masked scores are not counted."""
        t, s = _axes(name)
        at, x = self.at[name, value.shape], value[0].astype(jnp.float32)
        counts = jnp.isfinite(x) & (_index(x, t) < self.n)
        if s is not None:
            counts &= _index(x, s) < self.slots
        row = at[:, t] - self.first
        own = (at[:, 0] >= 0) & (row >= 0) & (row < self.n)
        index = [jnp.maximum(row if axis == t else at[:, axis], 0) for axis in range(x.ndim)]
        samples = jnp.where(own, x.at[tuple(index)].get(mode="clip"), 0.0)
        return jnp.concatenate([_stats(x, counts), samples])


@dataclass(frozen=True, kw_only=True)
class Summarised:
    """What is known of a value, over all rows of a phase.

    Attributes:
        name: in full.
        dtype: of the value, float32 or int32.
        stats: min, max, mean and absmean (of |x|) of what is finite; None where nothing is.
        values: samples, one after every `stride` of the value's numbers; not finite where it is.
        stride: see there.
        n: of its numbers.
    """

    name: str
    dtype: str
    stats: Mapping[str, float | None]
    values: Float[np.ndarray, " samples"]
    stride: int
    n: int


def sizes(key: Key, rows: int, slots: int) -> list[int]:
    """The sizes of a value's axes without the batch, over a whole phase.

    Args:
        key: the value's.
        rows: of the phase.
        slots: of attention that hold something then.
    """
    t, s = _axes(key[0])
    return [rows if i == t else slots if i == s else n for i, n in enumerate(key[1][1:])]


def places(key: Key, rows: int, slots: int) -> Int[np.ndarray, "SAMPLES axes"]:
    """Where the samples of a value lie; -1 where there are fewer. Arguments: as of `sizes`."""
    shape = sizes(key, rows, slots)
    flat = np.arange(0, int(np.prod(shape, dtype=np.int64)), _stride(shape))
    at = np.full((SAMPLES, len(shape)), -1, np.int32)
    at[: len(flat)] = np.stack(np.unravel_index(flat, shape), axis=1)
    return at


def joined(
    name: str,
    dtype: str,
    shape: list[int],
    parts: Float[np.ndarray, "calls 5+SAMPLES"],
) -> Summarised:
    """A value's parts as one.

    Args:
        name: in full.
        dtype: of the value.
        shape: from `sizes`.
        parts: of all calls of the phase.
    """
    n, stride = int(np.prod(shape, dtype=np.int64)), _stride(shape)
    low, high = parts[:, 0].min(), parts[:, 1].max()
    total, absolute, count = parts[:, 2:_STATS].sum(axis=0, dtype=np.float64)
    found = (low, high, total / max(count, 1.0), absolute / max(count, 1.0))
    return Summarised(
        name=name,
        dtype=dtype,
        stats={
            stat: float(value) if count else None
            for stat, value in zip(("min", "max", "mean", "absmean"), found, strict=True)
        },
        values=parts[:, _STATS : _STATS + -(-n // stride)].sum(axis=0),
        stride=stride,
        n=n,
    )


def _stats(x: Array, counts: Bool[Array, "..."]) -> Float[Array, " 5"]:
    """min, max, both sums and count, in one pass: XLA's own take five times as long on a CPU."""
    inf = jnp.float32(jnp.inf)
    start = (inf, -inf, jnp.float32(0), jnp.float32(0), jnp.float32(0))
    numbers = (x, x, x, jnp.abs(x), jnp.ones_like(x))
    each = [jnp.where(counts, n, without) for n, without in zip(numbers, start, strict=True)]

    def join(a: tuple, b: tuple) -> tuple:
        sums = (one + other for one, other in zip(a[2:], b[2:], strict=True))
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), *sums

    axes = range(x.ndim - 1)  # the last one remains, along which vectors are
    found = lax.reduce(tuple(each), start, join, axes)
    return jnp.stack([jnp.min(found[0]), jnp.max(found[1]), *map(jnp.sum, found[2:])])


def _stride(shape: list[int]) -> int:
    return max(1, -(-int(np.prod(shape, dtype=np.int64)) // SAMPLES))


def _axes(name: str) -> tuple[int, int | None]:
    """The axes of rows and of slots, of a value without its batch axis."""
    axes = ROWS[name].axes.split()[1:]
    return axes.index("T"), axes.index("S") if "S" in axes else None


def _index(x: Array, axis: int) -> Int[Array, "..."]:
    """Each number's index on an axis, [.., n, ..]."""
    shape = [x.shape[axis] if i == axis else 1 for i in range(x.ndim)]
    return jnp.arange(x.shape[axis], dtype=jnp.int32).reshape(shape)
