"""What a GGUF block format is, and the packed planes that every format is unpacked to.

A quantised weight of N rows (outputs) and K columns (contraction) is kept as planes, cut into tiles
of 16 outputs. The tile's outputs are minor: one vector register holds a 32-bit word of each, a
product needs no horizontal sum, and whoever works through a tile reads one run of memory.

    bits[i]  uint32 [tiles, K * width / 32, 16]   unsigned fields of `width` bits
    scale    f16    [tiles, K / super_block, 16]
    sub      int8   [tiles, K / group, 16]        multiplies scale (K-quants), or absent
    low      f16    [tiles, K / super_block, 16]  added to every weight, or absent
    sublow   int8   [tiles, K / group, 16]        multiplies low (K-quants), or absent

    q[k, n]      = bits[0] | bits[1] << widths[0] | ...          (0 .. 2**sum(widths) - 1)
    weight[k, n] = (scale * sub) * (q - zero) + (low * sublow)

Output n is lane n % 16 of tile n // 16; lanes beyond N are zero. Columns go in units of 32, which
take `width` words. A byte holds 8 / width fields, `width` columns of words apart:

    field p of byte b of word i in a unit  =  column 4 (i + width p) + b

    width 8    word 0: [ 3| 2| 1| 0]  word 1: [ 7| 6| 5| 4] ...            highest byte first
    width 4    word 0: [19 3|18 2|17 1|16 0]  word 1: [23 7|22 6|21 5|20 4] ...

So a shift and a mask give the bytes of 4 neighbouring columns for any width, and planes of two
widths line up: what a product of bytes (VNNI, NEON's dot product) takes.

Every product above is exact in float32 (11 bits of scale, at most 7 of sub, at most 8 of q). The
only rounding is that of the last addition, as in gguf-py's reference: equal bit for bit.

Formats of plain floats (F32, F16, BF16) have no integer planes: `bits` is empty, `dense` is
[tiles, K, 16].
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minfer_jax.gguf_types import GGML_TYPES

TILE = 16  # outputs that lie side by side


@dataclass(frozen=True, kw_only=True)
class HostPlanes:
    """Planes of some rows on the host, still row-major: every array is [rows, ...]."""

    bits: tuple[np.ndarray, ...] = ()
    scale: np.ndarray | None = None
    sub: np.ndarray | None = None
    low: np.ndarray | None = None
    sublow: np.ndarray | None = None
    dense: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Format:
    """One GGUF type.

    Attributes:
        ggml_type: its number in the file.
        widths: bits of each integer plane, lowest first; empty for plain floats.
        group: weights that share a scale.
        super_block: weights that share `scale` itself; `group` where there is one level of scales.
        zero: what is subtracted from every integer.
        unpack: uint8 [rows, blocks, block_bytes] -> HostPlanes.
    """

    ggml_type: int
    widths: tuple[int, ...] = ()
    group: int = 32
    super_block: int = 32
    zero: int = 0
    unpack: Callable[[np.ndarray], HostPlanes]

    @property
    def name(self) -> str:
        """ggml's name, such as "Q4_K"."""
        return GGML_TYPES[self.ggml_type].name

    @property
    def block(self) -> int:
        """Weights in a block; K is a multiple of it."""
        return GGML_TYPES[self.ggml_type].block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the file."""
        return GGML_TYPES[self.ggml_type].block_bytes


def column_places(width: int) -> tuple[list[int], list[int]]:
    """(word of the unit, shift within the word) of each of the 32 columns of a unit."""
    groups = range(32 // 4)
    words = [g % width for g in groups for _ in range(4)]
    shifts = [8 * b + width * (g // width) for g in groups for b in range(4)]
    return words, shifts


def repack(packed: np.ndarray, width: int) -> np.ndarray:
    """Bring ggml's strided bit fields into the order of the planes.

    ggml stores n bytes whose field s holds element s * n + (index of the byte):

        byte j:   [ ... | element 2n + j | element n + j | element j ]

    A plane's unit is the same with n = 4 * width.

    Args:
        packed: uint8 [..., n], n a multiple of 32, or 4 * width.
        width: 1, 2 or 4 bits a field.

    Returns:
        uint32 [..., n / 4]: the units of the same elements, in order.
    """
    lead, per = packed.shape[:-1], 8 // width
    words = np.ascontiguousarray(packed).view("<u4")
    if packed.shape[-1] == 4 * width:
        return words
    mask = np.uint32(0x01010101 * ((1 << width) - 1))
    words = words.reshape(*lead, -1, per, width)  # bytes of 32 elements of each field s
    units = []
    for s in range(per):
        fields = (words >> np.uint32(width * s)) & mask
        units.append(sum(fields[..., p, :] << np.uint32(width * p) for p in range(per)))
    return np.stack(units, axis=-3).reshape(*lead, -1)


def repack_bits(packed: np.ndarray) -> np.ndarray:
    """The same for single bits in natural order: uint8 [..., 4] -> uint32 [..., 1]."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    bits = bits.reshape(*packed.shape[:-1], 8, 4).swapaxes(-1, -2)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0].view("<u4")


def as_words(packed: np.ndarray) -> np.ndarray:
    """Bytes or words [rows, ...] -> uint32 [rows, words], keeping the order of the bytes."""
    return np.ascontiguousarray(packed).reshape(len(packed), -1).view("<u4")


def as_f16(raw: np.ndarray) -> np.ndarray:
    """uint8 [rows, blocks, 2] -> float16 [rows, blocks]."""
    return np.ascontiguousarray(raw).view("<f2")[..., 0]


def flat(values: np.ndarray, dtype: type) -> np.ndarray:
    """[rows, blocks, groups] -> dtype [rows, blocks * groups]."""
    return values.reshape(len(values), -1).astype(dtype)


def scale_min_k4(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and minimums of Q4_K and Q5_K (llama.cpp: get_scale_min_k4).

        byte     0..3                 4..7                 8..11
        bits     [s4-7 hi | s0-3]     [m4-7 hi | m0-3]     [m4-7 low 4 | s4-7 low 4]
                  2 bits    6 bits

    Args:
        packed: uint8 [rows, blocks, 12].

    Returns:
        (scales, minimums), each int8 [rows, blocks * 8], 0 to 63.
    """
    s, m, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([s & 63, (rest & 15) | ((s >> 6) << 4)], axis=-1)
    minimums = np.concatenate([m & 63, (rest >> 4) | ((m >> 6) << 4)], axis=-1)
    return flat(scales, np.int8), flat(minimums, np.int8)
