"""What a GGUF block format is, and the packed planes that every format is unpacked to.

A quantised weight of N rows (outputs) and K columns (contraction) is kept as planes, cut into tiles
of 16 outputs. The tile's outputs are minor: one vector register holds a 32-bit word of each, a
product needs no horizontal sum, and whoever works through a tile reads one run of memory.

    bits[i]  uint32 [tiles, K * width / 32, 16]   unsigned fields of `width` bits
    scale    f16    [tiles, K / super_block, 16]  or uint8, see `byte_scale`
    sub      int8   [tiles, K / group, 16]        multiplies scale (K-quants), or absent
    low      f16    [tiles, K / super_block, 16]  added to every weight, or absent
    sublow   int8   [tiles, K / group, 16]        multiplies low (K-quants), or absent
    high     uint8 or uint16 [tiles, K / 32, 16]  of a grid's indices, see `Grid`, or absent

    q[k, n]      = bits[0] | bits[1] << widths[0] | ...          (0 .. 2**sum(widths) - 1)
    weight[k, n] = (scale * factor * sub) * (code[q] - zero) + (low * sublow)

where code[q] is `codebook[q]`, an unsigned byte, or q itself where there is no codebook.

Output n is lane n % 16 of tile n // 16; lanes beyond N are zero. Columns go in units of 32, which
take `width` words. A byte holds 8 / width fields, `width` columns of words apart:

    field p of byte b of word i in a unit  =  column 4 (i + width p) + b

    width 8    word 0: [ 3| 2| 1| 0]  word 1: [ 7| 6| 5| 4] ...            highest byte first
    width 4    word 0: [19 3|18 2|17 1|16 0]  word 1: [23 7|22 6|21 5|20 4] ...

So a shift and a mask give the bytes of 4 neighbouring columns for any width, and planes of two
widths line up: what a product of bytes (VNNI, NEON's dot product) takes.

Every product above is exact in float32 (at most 24 bits of scale, sub and q together; factor is a
power of two). The only rounding is that of the last addition, as in gguf-py's reference: equal bit
for bit.

Formats of plain floats (F32, F16, BF16) have no integer planes: `bits` is empty, `dense` is
[tiles, K, 16].
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minfer_jax.gguf_types import GGML_TYPES

TILE = 16  # outputs that lie side by side


@dataclass(frozen=True, kw_only=True)
class HostPlanes:
    """Planes of some rows on the host, still row-major: every array is [rows, blocks, ...].

    They may be views of the file, and unaligned: each is read once, to be cut into tiles.
    """

    bits: tuple[np.ndarray, ...] = ()
    scale: np.ndarray | None = None
    sub: np.ndarray | None = None
    low: np.ndarray | None = None
    sublow: np.ndarray | None = None
    high: np.ndarray | None = None
    dense: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the fields of a format are looked up in groups: an index stands for several columns.

    The table's entries hold three bits of q for each column, a flag is the fourth:

        entry, of 8 columns (the lower nibbles alone, of 4)    [7 3|6 2|5 1|4 0]
        bits[0]: indices, a byte each, in order of columns     [ 3| 2| 1| 0]  for 8 columns each
        high: the upper bits of the indices of 32 columns, `high` bits each
        bits[1]: the flags, signs here; bit 8 b + 4 h + g of a unit is of column 8 g + 4 h + b

    With high = 3 there are no signs: fields of `high` are 4 bits wide, and the fourth is the flag
    of all 8 columns. An entry's nibble h of byte b is of column 4 h + b, so that one shift and one
    mask put four flags at a time beside the bits that they belong to.

    Attributes:
        span: columns of an index, 8 or 4.
        high: bits of an index beyond 8: 0, 1, 2 or 3.
        name: of the type in gguf-py whose table it is, see `grids.table`.
    """

    span: int
    high: int = 0
    name: str


@dataclass(frozen=True, kw_only=True)
class Format:
    """One GGUF type.

    Attributes:
        ggml_type: its number in the file.
        widths: bits of each integer plane, lowest first; empty for plain floats.
        group: weights that share a scale and lie in one unit: 32, or 16.
        super_block: weights that share `scale` itself.
        zero: what is subtracted from every integer.
        codebook: what the integers stand for, unsigned bytes, or None for themselves.
        byte_scale: `scale` holds the 8 bits below the sign of a "float16" or "bfloat16", the others
            being 0; None where it is float16.
        grid: how groups of integers are looked up, or None where `bits` holds them.
        factor: of `scale`, a power of two.
        unpack: uint8 [rows, blocks, block_bytes] -> HostPlanes.
    """

    ggml_type: int
    widths: tuple[int, ...] = ()
    group: int = 32
    super_block: int = 32
    zero: int = 0
    codebook: tuple[int, ...] | None = None
    byte_scale: str | None = None
    grid: Grid | None = None
    factor: float = 1.0
    unpack: Callable[[np.ndarray], HostPlanes] = field(repr=False)

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


def as_words(raw: np.ndarray) -> np.ndarray:
    """uint8 [rows, blocks, bytes] of the file -> uint32 [rows, blocks, words], without a copy."""
    return raw.view("<u4")


def as_f16(raw: np.ndarray) -> np.ndarray:
    """uint8 [rows, blocks, 2] of the file -> float16 [rows, blocks, 1], without a copy."""
    return raw.view("<f2")


def repack(raw: np.ndarray, width: int, n: int) -> np.ndarray:
    """Bring ggml's strided bit fields into the order of the planes.

    ggml stores runs of n bytes, of which field s holds element s * n + (index of the byte):

        byte j:   [ ... | element 2n + j | element n + j | element j ]

    A unit of the planes is the same with n = 4 * width. So among 8 words, the p-th `width` words'
    field s and the s-th words' field p change places: first halves, then quarters, then eighths.

        width 4     words 0-3    words 4-7              words 0-3    words 4-7
        field 1     32..47       48..63          ->     16..31       48..63
        field 0      0..15       16..31                  0..15       32..47

    Args:
        raw: uint8 [rows, blocks, bytes] of the file; bytes is a multiple of n.
        width: 1, 2 or 4 bits a field.
        n: bytes of a run, a multiple of 32.

    Returns:
        uint32 [rows, blocks, runs, 8 / width, n / 32, width]: the units of the same elements, in
        order.
    """
    lead = (*raw.shape[:2], raw.shape[2] // n, n // 32)
    words = np.array(np.moveaxis(as_words(raw).reshape(*lead, 8), -1, 0), order="C")
    for shift, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        if shift >= width:  # words this far apart exchange fields this far apart
            pairs = words.reshape(-1, 2, shift, *lead)
            low, high = pairs[:, 0], pairs[:, 1]
            change = ((low >> np.uint32(shift)) ^ high) & np.uint32(mask)
            high ^= change
            low ^= change << np.uint32(shift)
    return words.reshape(8 // width, width, *lead).transpose(2, 3, 4, 0, 5, 1)


def repack_bits(raw: np.ndarray) -> np.ndarray:
    """The same for single bits in natural order.

    Bit 4 p + b goes to bit 8 b + p: the two low bits of its number become the two high ones. Each
    line below exchanges two bits of the number.

    Args:
        raw: uint8 [rows, blocks, 4 n] of the file.

    Returns:
        uint32 [rows, blocks, n].
    """
    words = np.array(as_words(raw))
    _exchange(words, (14, 0x0000CCCC), (7, 0x00AA00AA), (2, 0x0C0C0C0C), (1, 0x22222222))
    return words


def repack_signs(raw: np.ndarray) -> np.ndarray:
    """Signs in natural order, uint8 [rows, blocks, 4 n], to the order of Grid: uint32 [.., n].

    Bit 8 g + 4 h + b goes to bit 8 b + 4 h + g.
    """
    words = np.array(as_words(raw))
    _exchange(words, (14, 0x0000CCCC), (7, 0x00AA00AA))
    return words


def _exchange(words: np.ndarray, *pairs: tuple[int, int]) -> None:
    """Exchange the bits of a mask with those `shift` above them, for each (shift, mask)."""
    for shift, mask in pairs:
        change = (words ^ (words >> np.uint32(shift))) & np.uint32(mask)
        words ^= change ^ (change << np.uint32(shift))


def pack(q: np.ndarray, width: int) -> np.ndarray:
    """Integers one by one to the fields of a plane.

    Args:
        q: uint8 [rows, blocks, n], below 2**width, in order of columns; n is a multiple of 32.
        width: 1, 2 or 4 bits a field.

    Returns:
        uint32 [rows, blocks, n * width / 32].
    """
    fields = q.reshape(*q.shape[:2], -1, 8 // width, 4 * width)  # unit, field of a byte, byte
    packed = fields[..., 0, :].copy()
    for p in range(1, 8 // width):
        packed |= fields[..., p, :] << np.uint8(width * p)
    return as_words(packed.reshape(*q.shape[:2], -1))


def nibbles(raw: np.ndarray) -> np.ndarray:
    """uint8 [rows, blocks, n] -> [rows, blocks, 2 n]: of each byte low, then high."""
    pairs = np.stack((raw & np.uint8(15), raw >> np.uint8(4)), axis=-1)
    return pairs.reshape(*raw.shape[:2], -1)


def scale_min_k4(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and minimums of Q4_K and Q5_K (llama.cpp: get_scale_min_k4).

        byte     0..3                 4..7                 8..11
        bits     [s4-7 hi | s0-3]     [m4-7 hi | m0-3]     [m4-7 low 4 | s4-7 low 4]
                  2 bits    6 bits

    Args:
        raw: uint8 [rows, blocks, 12] of the file.

    Returns:
        (scales, minimums), each int8 [rows, blocks, 8], 0 to 63.
    """
    words = as_words(raw)
    six, four, two = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    s, m, rest = words[..., 0], words[..., 1], words[..., 2]
    scales = s & six, (rest & four) | ((s >> np.uint32(2)) & two)
    minimums = m & six, ((rest >> np.uint32(4)) & four) | ((m >> np.uint32(2)) & two)
    return as_int8(*scales), as_int8(*minimums)


def as_int8(*words: np.ndarray) -> np.ndarray:
    """uint32 [rows, blocks] each -> their bytes, int8 [rows, blocks, 4 a word]."""
    return np.stack(words, axis=-1).view(np.int8)
