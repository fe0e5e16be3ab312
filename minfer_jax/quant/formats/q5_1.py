"""Q5_1: 32 weights, one scale and one minimum.

block, 24 bytes:

    [d f16][m f16][qh u32: bit i is the fifth bit of weight i][16 bytes of nibbles as in Q4_0]

weight = d * q + m
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words, repack_bits


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 24] -> planes."""
    return HostPlanes(
        bits=(as_words(blocks[..., 8:]), repack_bits(blocks[..., 4:8])),
        scale=as_f16(blocks[..., :2]),
        low=as_f16(blocks[..., 2:4]),
    )


FORMAT = Format(ggml_type=7, widths=(4, 1), unpack=unpack)
