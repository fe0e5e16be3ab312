"""Q2_K: 256 weights in 16 groups, 4-bit scales and minimums under two f16.

block, 84 bytes:

    [16 bytes: low nibble scale, high nibble minimum][64 bytes of 2-bit fields][d f16][dmin f16]

fields: two halves of 32 bytes; field s of byte j in half h is weight 128 h + 32 s + j
weight = d * scale * q - dmin * minimum
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words, repack

FOUR = np.uint32(0x0F0F0F0F)  # the low nibble of each byte


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 84] -> planes."""
    nibbles = np.array(as_words(blocks[..., :16]))
    return HostPlanes(
        bits=(repack(blocks[..., 16:80], 2, 32),),
        scale=as_f16(blocks[..., 80:82]),
        sub=(nibbles & FOUR).view(np.int8),
        low=-as_f16(blocks[..., 82:84]),
        sublow=((nibbles >> np.uint32(4)) & FOUR).view(np.int8),
    )


FORMAT = Format(
    ggml_type=10,
    widths=(2,),
    group=16,
    super_block=256,
    unpack=unpack,
)
