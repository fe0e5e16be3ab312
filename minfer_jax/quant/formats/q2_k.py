"""Q2_K: 256 weights in 16 groups, 4-bit scales and minimums under two f16.

block, 84 bytes:

    [16 bytes: low nibble scale, high nibble minimum][64 bytes of 2-bit fields][d f16][dmin f16]

fields: two halves of 32 bytes; field s of byte j in half h is weight 128 h + 32 s + j
weight = d * scale * q - dmin * minimum
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words, flat, repack


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 84] -> planes."""
    halves = blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 32)
    return HostPlanes(
        bits=(as_words(repack(halves, 2)),),
        scale=as_f16(blocks[..., 80:82]),
        sub=flat(blocks[..., :16] & 15, np.int8),
        low=-as_f16(blocks[..., 82:84]),
        sublow=flat(blocks[..., :16] >> 4, np.int8),
    )


FORMAT = Format(
    ggml_type=10,
    widths=(2,),
    group=16,
    super_block=256,
    unpack=unpack,
)
