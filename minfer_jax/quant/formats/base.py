"""What a GGUF block format is, and the packed planes that every format is unpacked to.

A quantised weight of N rows (outputs) and K columns (contraction) is kept as planes with N minor,
so that one vector register holds one k of many rows and a product needs no horizontal sum:

    bits[i]  uint32 [K * width / 32, N]   unsigned fields of `width` bits, little-endian:
                                          field k is bits (k * width) % 32 of word (k * width) // 32
    scale    f16    [K / super_block, N]
    sub      int8   [K / group, N]        multiplies scale (K-quants), or absent
    low      f16    [K / super_block, N]  added to every weight, or absent
    sublow   int8   [K / group, N]        multiplies low (K-quants), or absent

    q[k, n]      = bits[0] | bits[1] << widths[0] | ...          (0 .. 2**sum(widths) - 1)
    weight[k, n] = (scale * sub) * (q - zero) + (low * sublow)

Every product above is exact in float32 (11 bits of scale, at most 7 of sub, at most 8 of q). The
only rounding is that of the last addition, as in gguf-py's reference: equal bit for bit.

Formats of plain floats (F32, F16, BF16) have no integer planes: `bits` is empty, `dense` is [K, N].
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minfer_jax.gguf_types import GGML_TYPES


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


def repack(packed: np.ndarray, width: int) -> np.ndarray:
    """Bring strided bit fields into natural order.

    ggml stores n bytes whose field s holds element s * n + (index of the byte):

        byte j:   [ ... | element 2n + j | element n + j | element j ]

    The result holds the same elements in order, each `width` bits, low bits first.

    Args:
        packed: uint8 [..., n].
        width: 1, 2 or 4 bits a field.

    Returns:
        uint8 [..., n].
    """
    per = 8 // width  # fields a byte, and source bytes that make one output byte
    wide = np.dtype(f"<u{per}")
    mask = wide.type((1 << width) - 1)
    words = np.ascontiguousarray(packed).view(wide)  # [..., n / per]
    fields = []
    for s in range(per):
        out = np.zeros(words.shape, np.uint8)
        for i in range(per):
            field = (words >> wide.type(8 * i + width * s)) & mask
            out |= (field << wide.type(width * i)).astype(np.uint8)
        fields.append(out)
    return np.stack(fields, axis=-2).reshape(packed.shape)


def as_words(packed: np.ndarray) -> np.ndarray:
    """uint8 [rows, ..., bytes] -> uint32 [rows, words], keeping the order of the bytes."""
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
