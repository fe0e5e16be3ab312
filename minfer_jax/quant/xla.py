"""The quantised product in plain XLA: runs everywhere, and is the reference for the kernels.

Two forms. `dequantize`, followed by XLA's own dot, pays once for many rows of x (prefill). `matvec`
never writes a dequantised weight: for a few rows of x (decode) it reads the packed words once.

In this file M is rows of x, K contraction, N outputs, U = K / unit, J tiles of R = 16 outputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from minfer_jax.quant.formats import grids
from minfer_jax.quant.formats.base import TILE, column_places
from minfer_jax.quant.qtensor import QTensor


def dequantize(w: QTensor, dtype: jnp.dtype) -> Float[Array, "K N"]:
    """The weight transposed, [K, N], exact in float32 and then rounded to `dtype`."""
    n, k = w.shape
    tiles = _tiles(w).astype(dtype)
    return jnp.swapaxes(tiles, 0, 1).reshape(k, -1)[:, :n]


def dot(x: Float[Array, "M K"], weight: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """The product with a dequantised weight, summed in float32."""
    return lax.dot(x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _tiles(w: QTensor) -> Float[Array, "J K R"]:
    """The weight in float32, in its tiles."""
    if w.dense is not None:
        return w.own(w.dense).astype(jnp.float32)
    assert w.scale is not None  # every format of integers has one
    q = _from_grid(w) if w.fmt.grid else _fields(w)
    if w.fmt.codebook is not None:
        q = _looked_up(q, w.fmt.codebook)
    q = lax.bitcast_convert_type(q, jnp.int32) - jnp.int32(w.fmt.zero)
    grouped = q.astype(jnp.float32).reshape(len(q), -1, w.fmt.group, q.shape[-1])
    value = grouped * _level(w, w.scale, w.sub)[:, :, None]
    if w.low is not None:
        value = value + _level(w, w.low, w.sublow)[:, :, None]
    return value.reshape(q.shape)


def _fields(w: QTensor) -> UInt32[Array, "J K R"]:
    """The integers of all planes."""
    k, lanes = w.shape[1], w.bits[0].shape[-1]
    q = jnp.uint32(0)
    low_bits = 0
    for plane, width in zip(w.bits, w.fmt.widths, strict=True):
        words = w.own(plane)
        words = words.reshape(len(words), k // 32, 1, width, 1, lanes)  # J U field word byte R
        byte, field = np.arange(0, 32, 8), np.arange(0, 8, width)
        shifts = (field[:, None, None, None] + byte[:, None]).astype(np.uint32)[None, None]
        fields = (words >> shifts) & jnp.uint32((1 << width) - 1)
        fields = fields.reshape(len(words), k, lanes) << jnp.uint32(low_bits)
        q = fields if low_bits == 0 else q | fields
        low_bits += width
    return q


def _from_grid(w: QTensor) -> UInt32[Array, "J K R"]:
    """The integers that indices stand for; see `Grid`."""
    grid = w.fmt.grid
    assert grid is not None
    words = w.own(w.bits[0])
    tiles, lanes = len(words), words.shape[-1]
    each = 32 // grid.span  # indices of a unit
    index = words.reshape(tiles, -1, each // 4, 1, lanes)  # J U word byte R
    index = (index >> _along(np.arange(0, 32, 8), 5)) & jnp.uint32(255)
    index = index.reshape(tiles, -1, each, lanes)
    flags = None
    if w.high is not None:
        width = 4 if grid.high == 3 else grid.high
        high = w.own(w.high).astype(jnp.uint32)[:, :, None]
        high = high >> _along(np.arange(0, 4 * width, width), 4)
        index = index | ((high & jnp.uint32((1 << grid.high) - 1)) << jnp.uint32(8))
        flags = ((high >> jnp.uint32(3)) & jnp.uint32(1)) * jnp.uint32(0x88888888)
    table = jnp.asarray(grids.table(grid.name))
    entries = table.at[index].get(mode="promise_in_bounds")
    if grid.span == 4:
        entries = entries[:, :, ::2] | (entries[:, :, 1::2] << jnp.uint32(4))
    if len(w.bits) == 2:
        flags = w.own(w.bits[1])[:, :, None] << _along(np.arange(3, -1, -1), 4)
    assert flags is not None
    entries = entries | (flags & jnp.uint32(0x88888888))
    places = np.arange(0, 8, 4)[:, None] + np.arange(0, 32, 8)  # of halves h, bytes b
    q = entries[:, :, :, None] >> _along(places.reshape(-1), 5)  # J U g hb R
    return (q & jnp.uint32(15)).reshape(tiles, -1, lanes)


def _along(shifts: np.ndarray, axes: int) -> Array:
    """Shifts along the last axis but one of so many."""
    return jnp.asarray(shifts.astype(np.uint32)).reshape(*[1] * (axes - 2), -1, 1)


def _looked_up(q: Array, codebook: tuple[int, ...]) -> Array:
    """codebook[q] for any uint32: four bytes to a word, the word chosen, the byte shifted down.

    XLA would look up one value at a time, where all of this is done with vectors.
    """
    packed = [
        jnp.uint32(sum(byte << (8 * i) for i, byte in enumerate(codebook[at : at + 4])))
        for at in range(0, len(codebook), 4)
    ]
    word = packed[0]
    if len(packed) > 1:
        assert len(packed) == 4
        upper, odd = (q & jnp.uint32(8)) != 0, (q & jnp.uint32(4)) != 0
        word = jnp.where(
            upper, jnp.where(odd, packed[3], packed[2]), jnp.where(odd, packed[1], packed[0])
        )
    return (word >> ((q & jnp.uint32(3)) << jnp.uint32(3))) & jnp.uint32(255)


def _level(w: QTensor, base: Array, fine: Array | None) -> Float[Array, "J groups R"]:
    """One float32 for each group: `base`, times `fine` where there are two levels."""
    coarse = _coarse(w, base)
    each = w.fmt.super_block // w.fmt.group
    if each > 1:
        coarse = jnp.repeat(coarse, each, axis=1)
    return coarse if fine is None else coarse * w.own(fine).astype(jnp.float32)


def _coarse(w: QTensor, base: Array) -> Float[Array, "J super_blocks R"]:
    """`scale` with its factor, or `low`, in float32; no format has both a factor and `low`."""
    base = w.own(base)
    if base.dtype == jnp.uint8:
        assert w.fmt.byte_scale is not None
        whole = base.astype(jnp.uint16) << jnp.uint16(7)
        base = lax.bitcast_convert_type(whole, jnp.dtype(w.fmt.byte_scale))
    base = base.astype(jnp.float32)
    if w.fmt.factor != 1:
        base = base * jnp.float32(w.fmt.factor)
    return base


@jax.jit  # traced and lowered once for each format and shape, however many layers use it
def matvec(x: Float[Array, "M K"], w: QTensor) -> Float[Array, "M N"]:
    """x times the weight, for a few rows of x, in float32, from the packed words.

    With s the scale of a group, m its minimum and z the format's zero,

        sum (s (q - z) + m) x  =  s sum q x  +  (m - s z) sum x

    The terms of a unit of 32 columns are written out, so that XLA makes one elementwise loop over N
    of them: an XLA reduction would be a scalar loop per output. A field is masked in place, not
    shifted down: it is 2**shift too large, which a power of two on x's side takes back exactly.
    Fields that stand for values of a codebook do come down; a grid is dequantised first.
    """
    if w.fmt.grid is not None:
        return dot(x.astype(jnp.float32), dequantize(w, jnp.dtype(jnp.float32)))
    m, k = x.shape
    n, unit = w.shape[0], w.unit
    x = x.astype(jnp.float32).reshape(m, 1, k // unit, unit)
    if w.dense is not None:
        columns = (_column(w, w.dense, unit, i).astype(jnp.float32) for i in range(unit))
        return _over_units(_sum([c[None] * x[..., i, None] for i, c in enumerate(columns)]), n)
    assert w.scale is not None
    groups = unit // w.fmt.group
    words = [
        [lax.bitcast_convert_type(_column(w, plane, width, i), jnp.int32) for i in range(width)]
        for plane, width in zip(w.bits, w.fmt.widths, strict=True)
    ]
    size = w.fmt.group
    sums = [  # of q x over each group [M, J, U, R]
        _sum(_terms(w, words, x, range(g * size, (g + 1) * size))) for g in range(groups)
    ]

    def of_group(base: Array, fine: Array | None, g: int) -> Array:
        if fine is None:
            return _level(w, base, fine)[:, g::groups]
        coarse = jnp.repeat(_coarse(w, base), w.fmt.super_block // unit, axis=1)
        return coarse * _column(w, fine, groups, g).astype(jnp.float32)

    x_sums = x.reshape(m, 1, k // unit, groups, -1).sum(-1)  # M 1 U groups
    total = []
    for g in range(groups):
        scale = of_group(w.scale, w.sub, g)
        offset = -scale * jnp.float32(w.fmt.zero) if w.fmt.zero else None
        if w.low is not None:
            low = of_group(w.low, w.sublow, g)
            offset = low if offset is None else offset + low
        value = sums[g] * scale[None]
        total.append(value if offset is None else value + offset[None] * x_sums[..., g, None])
    return _over_units(_sum(total), n)


def _terms(
    w: QTensor, words: list[list[Array]], x: Float[Array, "M 1 U unit"], columns: range
) -> list[Float[Array, "M J U R"]]:
    """q x for some columns of every unit, a term a column and plane; words are int32 [J, U, R]."""
    terms = []
    if w.fmt.codebook is not None:  # always of one plane
        (plane,), (width,) = words, w.fmt.widths
        where, places = column_places(width)
        for i in columns:
            field = lax.shift_right_logical(plane[where[i]], jnp.int32(places[i]))
            field = lax.bitcast_convert_type(field & jnp.int32((1 << width) - 1), jnp.uint32)
            value = lax.bitcast_convert_type(_looked_up(field, w.fmt.codebook), jnp.int32)
            terms.append(value.astype(jnp.float32)[None] * x[..., i, None])
        return terms
    low_bits = 0
    for plane, width in zip(words, w.fmt.widths, strict=True):
        where, places = column_places(width)
        shifts = np.asarray(places)
        down = shifts + width == 32  # these fields hold the sign bit, so they have to come down
        powers = np.exp2(low_bits - np.where(down, 0, shifts)).astype(np.float32)
        scaled = x * powers[None, None, None]
        for i in columns:
            word, shift = plane[where[i]], jnp.int32(shifts[i])
            if down[i]:
                field = lax.shift_right_logical(word, shift)
            else:
                field = word & jnp.int32(((1 << width) - 1) << shifts[i])
            terms.append(field.astype(jnp.float32)[None] * scaled[..., i, None])
        low_bits += width
    return terms


def _column(w: QTensor, plane: Array, per_unit: int, i: int) -> Float[Array, "J U R"]:
    """Row i of every unit of a plane with `per_unit` rows a unit.

    Sliced straight out of the stack, in one step: XLA would rather copy a layer's plane than fuse a
    slice of a slice that many terms share.
    """
    rows = plane.reshape(*plane.shape[:-2], -1, per_unit, TILE)
    if w.layer is None:
        return rows[:, :, i]
    zero = jnp.uint32(0)
    start = (w.layer, zero, zero, jnp.uint32(i), zero)
    shape = (rows.shape[1], rows.shape[2], TILE)
    return lax.dynamic_slice(rows, start, (1, *shape[:2], 1, TILE)).reshape(shape)


def _sum(terms: list[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _over_units(partial: Float[Array, "M J U R"], n: int) -> Float[Array, "M N"]:
    """Sum over U as a product with ones: XLA's dot streams it, its reduction would not."""
    m, tiles, units, _ = partial.shape
    ones = jnp.ones((m, tiles, 1, units), jnp.float32)
    partial = lax.optimization_barrier(partial)
    total = lax.dot_general(
        ones, partial, (((3,), (2,)), ((0, 1), (0, 1))), precision=lax.Precision.HIGHEST
    )
    return total.reshape(m, -1)[:, :n]


def rows(w: QTensor, ids: Array) -> Float[Array, "ids K"]:
    """Dequantised rows of the weight, float32: the embedding lookup. `ids` are int32 in [0, N)."""
    assert w.layer is None
    ids = jnp.clip(ids, 0, w.shape[0] - 1)
    tile, lane = ids // TILE, ids % TILE
    picked = jax.tree.map(lambda plane: plane[tile, :, lane][..., None], w)
    return _tiles(picked)[..., 0]
