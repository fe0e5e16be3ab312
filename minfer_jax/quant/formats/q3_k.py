"""Q3_K: 256 weights in 16 groups, signed 6-bit scales under one f16.

block, 110 bytes:

    [32 bytes of high bits][64 bytes of 2-bit fields][12 bytes of scales][d f16]

high bits: bit s of byte j is the third bit of weight 32 s + j
fields: two halves of 32 bytes; field s of byte j in half h is weight 128 h + 32 s + j
scales: nibbles of bytes 0-7 hold the low 4 bits of scales 0-7 and 8-15; field s of byte 8 + j holds
        the two high bits of scale 4 s + j
weight = d * (scale - 32) * (q - 4)
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words, flat, repack


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 110] -> planes."""
    halves = blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 32)
    nibbles, high = blocks[..., 96:104], blocks[..., 104:108]
    low4 = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    high2 = np.concatenate([(high >> (2 * s)) & 3 for s in range(4)], axis=-1)
    scales = (low4 | (high2 << 4)).astype(np.int8) - np.int8(32)
    return HostPlanes(
        bits=(as_words(repack(halves, 2)), as_words(repack(blocks[..., :32], 1))),
        scale=as_f16(blocks[..., 108:110]),
        sub=flat(scales, np.int8),
    )


FORMAT = Format(
    ggml_type=11,
    widths=(2, 1),
    group=16,
    super_block=256,
    zero=4,
    unpack=unpack,
)
