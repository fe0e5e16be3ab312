"""Packed words to float32 inside a kernel, for every format that has no grid.

The planes are those of `quant/formats/base.py`. A kernel sees a weight as rows and fields: a row is
`spread` consecutive words of a unit's first plane, taken one by one, and every row has the same
32 / spread fields. With W the width of that plane, u the unit, i = i' + spread * i0 the word:

    row   (u, i')       what lies side by side in a tensor, and is computed at run time
    field (p, i0, b)    written out in the kernel; its shift is a constant
    column of both      32 u + 4 (i' + spread i0 + W p) + b

    spread 1    a row is a unit, a field is a column of it: a scale serves all fields of a row
    spread W    a row is a word of the first plane, 32 / W fields

x is brought into this order outside (`arranged`), so that what belongs to a field is one run.

Integers become floats without a conversion, which GPUs do at a fourth of the speed or less. A field
is masked where it stands, s bits up, and the exponent of 2**(23 - s) is put above it: those are
the bits of 2**(23 - s) + q, exactly, and one subtraction takes away the power together with the
format's zero. Fields above bit 23 come down first, a word at a time. Where there are two planes,
the fields of both are put side by side before, for the four columns of a word at once. Plain floats
are rows of one field.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from minfer_jax.quant.formats.base import TILE, Format
from minfer_jax.quant.qtensor import QTensor

_MANTISSA = 23
_DOWN = 16  # how far words come down for their upper fields


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which elements of the planes a tensor stands for: int32 arrays that broadcast.

    Attributes:
        tile: of 16 outputs.
        row: see above.
        lane: output of the tile.
    """

    tile: Array
    row: Array
    lane: Array


@dataclass(frozen=True, kw_only=True)
class Group:
    """Fields that share a scale.

    Attributes:
        scale: float32, of the shape of a Place; None for plain floats.
        low: what is added to every weight, or None.
        integers: code[q] - zero of each field in order, float32, exact; or plain floats.
    """

    scale: Array | None
    low: Array | None
    integers: list[Array]


def supports(w: QTensor) -> str | None:
    """Why kernels cannot read such a weight, or None if they can."""
    if w.fmt.grid is not None:
        return f"{w.fmt.name} looks its weights up in a grid, which the Pallas kernels do not"
    return None


def spread_of(fmt: Format) -> int:
    """The spread at which a row is a word of the first plane."""
    return fmt.widths[0] if fmt.widths else 1


def tiles(w: QTensor) -> int:
    """Tiles of 16 outputs."""
    return -(-w.shape[0] // TILE)


def power_below(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (n.bit_length() - 1)


def rows(w: QTensor, spread: int) -> int:
    """Rows of a weight."""
    return w.shape[1] // 32 * spread if w.fmt.widths else w.shape[1]


def fields(fmt: Format, spread: int) -> int:
    """Fields of a row."""
    return 32 // spread if fmt.widths else 1


def groups(fmt: Format) -> int:
    """Groups that the fields of a row belong to, in order and of the same size."""
    return 32 // fmt.group if fmt.widths else 1


def arranged(
    x: Float[Array, "M K"], w: QTensor, spread: int, *, fields_first: bool, pad: int
) -> Array:
    """x in the order of a weight's rows and fields, with zeros for `pad` more rows.

    Args:
        x: activations.
        w: the weight.
        spread: see above.
        fields_first: [M, fields, rows] if so, else [M, rows, fields].
        pad: rows that are no rows of the weight.
    """
    m, k = x.shape
    if w.fmt.widths:
        width = w.fmt.widths[0]
        x = x.reshape(m, k // 32, 8 // width, width // spread, spread, 4)  # M u p i0 i' b
        x = jnp.transpose(x, (0, 2, 3, 5, 1, 4) if fields_first else (0, 1, 4, 2, 3, 5))
    each, count = fields(w.fmt, spread), rows(w, spread)
    x = x.reshape(m, *((each, count) if fields_first else (count, each)))
    if pad == 0:
        return x
    return jnp.pad(x, ((0, 0), (0, 0), (0, pad)) if fields_first else ((0, 0), (0, pad), (0, 0)))


def table(fmt: Format) -> Float[Array, " entries"] | None:
    """What integers stand for, less the zero; None where that is linear in them."""
    if fmt.codebook is None or _step(fmt) is not None:
        return None
    return jnp.asarray(np.asarray(fmt.codebook) - fmt.zero, jnp.float32)


def groups_at(w: QTensor, table: Any, place: Place, spread: int) -> Iterator[Group]:
    """A weight's groups at a place, one after another, inside a kernel.

    Args:
        w: a weight of references to its planes.
        table: a reference to `table(fmt)`, or None.
        place: rows and outputs.
        spread: how the weight is seen.
    """
    if w.dense is not None:
        value = _load(w, w.dense, place.tile, place.row, place.lane).astype(jnp.float32)
        yield Group(scale=None, low=None, integers=[value])
        return
    assert w.scale is not None
    unit = lax.shift_right_logical(place.row, jnp.int32(spread.bit_length() - 1))
    inner = place.row & jnp.int32(spread - 1)
    words = [_words(w, n, place, unit=unit, inner=inner, spread=spread) for n in range(len(w.bits))]
    count = groups(w.fmt)
    powers = range(8 // w.fmt.widths[0])
    for g in range(count):
        low = None
        if w.low is not None:
            low = _level(w, w.low, w.sublow, place, unit, g)
        yield Group(
            scale=_level(w, w.scale, w.sub, place, unit, g),
            low=low,
            integers=[
                value
                for p in powers[g * len(powers) // count : (g + 1) * len(powers) // count]
                for i0 in range(w.fmt.widths[0] // spread)
                for value in _integers(w.fmt, words, table, p=p, i0=i0, spread=spread)
            ],
        )


def _load(w: QTensor, plane: Any, tile: Array, row: Array, lane: Array) -> Array:
    """Elements of a plane, which may be one of a stack."""
    if w.layer is None:
        return plane[tile, row, lane]
    layer: Any = w.layer
    return plane[layer[()].astype(jnp.int32), tile, row, lane]


def _words(
    w: QTensor, n: int, place: Place, *, unit: Array, inner: Array, spread: int
) -> list[Array]:
    """The words of plane n that rows take, in order of i0, so that shifts from here on are static.

    Plane n has its field of word i of the first plane in word i % its width, i // its width fields
    up. Of i = i' + spread i0 either part alone decides on that, as all are powers of two.
    """
    width = w.fmt.widths[n]
    if spread <= width:
        return [
            _load(w, w.bits[n], place.tile, unit * width + inner + spread * i, place.lane)
            for i in range(width // spread)
        ]
    up = lax.shift_right_logical(inner, jnp.int32(width.bit_length() - 1)) * width
    word = _load(w, w.bits[n], place.tile, unit * width + (inner & (width - 1)), place.lane)
    up = jnp.broadcast_to(up, word.shape)
    return [lax.shift_right_logical(word, lax.bitcast_convert_type(up, jnp.uint32))]


def _integers(
    fmt: Format, words: list[list[Array]], table: Any, *, p: int, i0: int, spread: int
) -> list[Array]:
    """code[q] - zero of the fields (p, i0) of every row, one for each byte, in float32."""
    step, width = _step(fmt), sum(fmt.widths)
    shifts = [n * (spread * i0 // n) + fmt.widths[0] * p for n in fmt.widths]
    own = [plane[i0 % len(plane)] for plane in words]
    if len(own) == 1:
        (word,), (at,) = own, shifts
    else:  # the planes' fields side by side in each byte: two operations for four columns
        parts, low_bits = [], 0
        for part, shift, n in zip(own, shifts, fmt.widths, strict=True):
            mask = np.uint32((((1 << n) - 1) << low_bits) * 0x01010101)
            parts.append(_shifted(part, shift - low_bits) & mask)
            low_bits += n
        word, at = functools.reduce(jnp.bitwise_or, parts), 0
    if step is None:
        index = [_shifted(word, 8 * b + at) & jnp.uint32((1 << width) - 1) for b in range(4)]
        return [table[lax.bitcast_convert_type(i, jnp.int32)] for i in index]
    return [_floated(word, 8 * b + at, width, step.bit_length() - 1, fmt.zero) for b in range(4)]


def _shifted(word: Array, down: int) -> Array:
    """Down, or up where that is negative."""
    if down == 0:
        return word
    by = jnp.uint32(abs(down))
    return lax.shift_right_logical(word, by) if down > 0 else lax.shift_left(word, by)


def _floated(word: Array, shift: int, width: int, up: int, minus: int) -> Array:
    """q 2**up - minus of a field, exact; see the head of this file."""
    if shift + width > _MANTISSA:
        word, shift = _shifted(word, _DOWN), shift - _DOWN
    elif shift < up:  # for an odd zero beside twice an integer the power has to be smaller
        word, shift = _shifted(word, -up), shift + up
    power = _MANTISSA - shift + up
    field = word & jnp.uint32(((1 << width) - 1) << shift)
    bits = field | jnp.uint32((127 + power) << _MANTISSA)
    taken = np.float32(2**power + minus)
    assert float(taken) == 2**power + minus
    return lax.bitcast_convert_type(bits, jnp.float32) - taken


def _step(fmt: Format) -> int | None:
    """What the integers are multiplied by to give the code; None if it takes a table."""
    if fmt.codebook is None:
        return 1
    step = fmt.codebook[1] - fmt.codebook[0]
    linear = fmt.codebook == tuple(range(0, step * len(fmt.codebook), step))
    return step if linear and step & (step - 1) == 0 else None


def _level(w: QTensor, base: Any, fine: Any, place: Place, unit: Array, g: int) -> Array:
    """One float32 for each row and output: `base`, times `fine` where there are two levels."""
    fmt, each = w.fmt, groups(w.fmt)
    if fmt.super_block >= 32:
        row = lax.div(unit, jnp.int32(fmt.super_block // 32))
    else:
        per_unit = 32 // fmt.super_block
        row = unit * per_unit + g * per_unit // each
    level = _load(w, base, place.tile, row, place.lane)
    if level.dtype == jnp.uint8:
        assert fmt.byte_scale is not None
        whole = level.astype(jnp.uint16) << jnp.uint16(7)
        level = lax.bitcast_convert_type(whole, jnp.dtype(fmt.byte_scale))
    level = level.astype(jnp.float32)
    if fine is None:
        return level
    byte = _load(w, fine, place.tile, unit * each + g, place.lane)  # int8
    byte = lax.bitcast_convert_type(byte, jnp.uint8).astype(jnp.uint32) ^ jnp.uint32(128)
    return level * _floated(byte, 0, 8, 0, 128)


def place_of(tile0: Array, row0: Array, tiles: int, block: int) -> Place:
    """Rows x outputs as a matrix [block, 16 * tiles], from a tile and a row on."""
    shape = (block, TILE * tiles)
    output = lax.broadcasted_iota(jnp.int32, shape, 1)
    return Place(
        tile=tile0 + lax.div(output, jnp.int32(TILE)),
        row=row0 + lax.broadcasted_iota(jnp.int32, shape, 0),
        lane=lax.rem(output, jnp.int32(TILE)),
    )


def within(w: QTensor, place: Place, spread: int, block: int) -> Place:
    """A place with the weight's last row for rows beyond it, where x is zero."""
    count = rows(w, spread)
    if count % block == 0:
        return place
    return Place(tile=place.tile, row=jnp.minimum(place.row, count - 1), lane=place.lane)


def references(w: QTensor) -> QTensor:
    """The weight as an operand of a kernel: its planes, and the layer if it is of a stack."""
    if w.stacked and w.layer is None:
        raise ValueError("the weight is a stack, expected one of it: call .at(layer)")
    return w
