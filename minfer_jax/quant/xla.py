"""The quantised product in plain XLA: runs everywhere, and is the reference for the kernels.

Two forms. `dequantize`, followed by XLA's own dot, pays once for many rows of x (prefill). `matvec`
never writes a dequantised weight: for a few rows of x (decode) it reads the packed words once.

In this file M is rows of x, K contraction, N outputs, U = K / unit.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from minfer_jax.quant.qtensor import QTensor


def dequantize(w: QTensor, dtype: jnp.dtype) -> Float[Array, "K N"]:
    """The weight transposed, [K, N], exact in float32 and then rounded to `dtype`."""
    if w.dense is not None:
        return w.own(w.dense).astype(dtype)
    n, k = w.shape
    q = None
    low_bits = 0
    for plane, width in zip(w.bits, w.fmt.widths, strict=True):
        words = w.own(plane)
        shifts = jnp.arange(0, 32, width, dtype=jnp.uint32)
        fields = (words[:, None, :] >> shifts[None, :, None]) & jnp.uint32((1 << width) - 1)
        fields = fields.reshape(k, n) << jnp.uint32(low_bits)
        q = fields if q is None else q | fields
        low_bits += width
    assert q is not None and w.scale is not None
    q = lax.bitcast_convert_type(q, jnp.int32) - jnp.int32(w.fmt.zero)
    value = q.astype(jnp.float32).reshape(-1, w.fmt.group, n) * _level(w, w.scale, w.sub)[:, None]
    if w.low is not None:
        value = value + _level(w, w.low, w.sublow)[:, None]
    return value.reshape(k, n).astype(dtype)


def _level(w: QTensor, base: Array, fine: Array | None) -> Float[Array, "groups N"]:
    """One float32 for each group: `base`, times `fine` where there are two levels."""
    base = w.own(base).astype(jnp.float32)
    if fine is None:
        return base
    each = w.fmt.super_block // w.fmt.group
    return jnp.repeat(base, each, axis=0) * w.own(fine).astype(jnp.float32)


@jax.custom_jvp
def matvec(x: Float[Array, "M K"], w: QTensor) -> Float[Array, "M N"]:
    """x times the weight, for a few rows of x, in float32, from the packed words.

    With s the scale of a group, m its minimum and z the format's zero,

        sum (s (q - z) + m) x  =  s sum q x  +  (m - s z) sum x

    The terms of a unit of 32 columns are written out, so that XLA makes one elementwise loop over N
    of them: an XLA reduction would be a scalar loop per output. A field is masked in place, not
    shifted down: it is 2**shift too large, which a power of two on x's side takes back exactly.
    """
    return _matvec(x, w)


@matvec.defjvp
def _matvec_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """The derivative of the plain form: that of hundreds of terms would take minutes to compile."""

    def plain(x: Array, w: QTensor) -> Array:
        weight = dequantize(w, jnp.dtype(jnp.float32))
        return lax.dot(x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST)

    return matvec(*primals), jax.jvp(plain, primals, tangents)[1]


@jax.jit  # traced and lowered once for each format and shape, however many layers use it
def _matvec(x: Float[Array, "M K"], w: QTensor) -> Float[Array, "M N"]:
    m, k = x.shape
    n, unit = w.shape[0], w.unit
    x = x.astype(jnp.float32).reshape(m, k // unit, unit)
    if w.dense is not None:
        columns = (_column(w, w.dense, unit, i).astype(jnp.float32) for i in range(unit))
        return _over_units(_sum([c[None] * x[:, :, i, None] for i, c in enumerate(columns)]))
    assert w.scale is not None  # every format of integers has one
    groups = unit // w.fmt.group
    words = [
        [lax.bitcast_convert_type(_column(w, plane, width, i), jnp.int32) for i in range(width)]
        for plane, width in zip(w.bits, w.fmt.widths, strict=True)
    ]
    size = w.fmt.group
    sums = [  # of q x over each group [M, U, N]
        _sum(_terms(w, words, x, range(g * size, (g + 1) * size))) for g in range(groups)
    ]
    scale = _level(w, w.scale, w.sub).reshape(-1, groups, n)  # U groups N
    low = None if w.low is None else _level(w, w.low, w.sublow).reshape(-1, groups, n)
    x_sums = x.reshape(m, k // unit, groups, -1).sum(-1)  # M U groups
    total = []
    for g in range(groups):
        offset = -scale[:, g] * jnp.float32(w.fmt.zero) if w.fmt.zero else None
        if low is not None:
            offset = low[:, g] if offset is None else offset + low[:, g]
        value = sums[g] * scale[None, :, g]
        total.append(value if offset is None else value + offset[None] * x_sums[:, :, g, None])
    return _over_units(_sum(total))


def _terms(
    w: QTensor, words: list[list[Array]], x: Float[Array, "M U unit"], columns: range
) -> list[Float[Array, "M U N"]]:
    """q x for some columns of every unit, one term a column and plane; words are int32 [U, N]."""
    terms = []
    low_bits = 0
    for plane, width in zip(words, w.fmt.widths, strict=True):
        shifts = np.arange(0, 32 * width, width) % 32
        down = shifts + width == 32  # these fields hold the sign bit, so they have to come down
        powers = np.exp2(low_bits - np.where(down, 0, shifts)).astype(np.float32)
        scaled = x * powers[None, None]
        for i in columns:
            word, shift = plane[i * width // 32], jnp.int32(shifts[i])
            if down[i]:
                field = lax.shift_right_logical(word, shift)
            else:
                field = word & jnp.int32(((1 << width) - 1) << shifts[i])
            terms.append(field.astype(jnp.float32)[None] * scaled[:, :, i, None])
        low_bits += width
    return terms


def _column(w: QTensor, plane: Array, per_unit: int, i: int) -> Array:
    """Row i of every unit of a plane with `per_unit` rows a unit: [U, N].

    Sliced straight out of the stack, in one step: XLA would rather copy a layer's plane than fuse a
    slice of a slice that many terms share.
    """
    rows = plane.reshape(*plane.shape[:-2], -1, per_unit, plane.shape[-1])
    if w.layer is None:
        return rows[:, i]
    start = (w.layer, jnp.int32(0), jnp.int32(i), jnp.int32(0))
    return lax.dynamic_slice(rows, start, (1, rows.shape[1], 1, rows.shape[3])).reshape(
        rows.shape[1], rows.shape[3]
    )


def _sum(terms: list[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _over_units(partial: Float[Array, "M U N"]) -> Float[Array, "M N"]:
    """Sum over U as a product with ones: XLA's dot streams it, its reduction would not."""
    ones = jnp.ones((partial.shape[0], 1, partial.shape[1]), jnp.float32)
    partial = lax.optimization_barrier(partial)
    return lax.dot_general(
        ones, partial, (((2,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST
    )[:, 0]


def rows(w: QTensor, ids: Array) -> Float[Array, "ids K"]:
    """Dequantised rows of the weight, float32: the embedding lookup. `ids` are int32 in [0, N)."""
    assert w.layer is None
    picked = jax.tree.map(lambda plane: jnp.take(plane, ids, axis=1, mode="clip"), w)
    picked = dataclasses.replace(picked, shape=(ids.shape[0], w.shape[1]))
    return dequantize(picked, jnp.dtype(jnp.float32)).T
