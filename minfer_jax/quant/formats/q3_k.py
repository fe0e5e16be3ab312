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

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_int8, as_words, repack


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 110] -> planes."""
    words = as_words(blocks[..., 96:108])
    low, high = [words[..., i] for i in (0, 1)], words[..., 2]
    four, two = np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    nibbles = (low[0], low[1], low[0] >> np.uint32(4), low[1] >> np.uint32(4))
    scales = [
        (nibbles[s] & four) | ((high >> np.uint32(2 * s) << np.uint32(4)) & two) for s in range(4)
    ]
    return HostPlanes(
        bits=(repack(blocks[..., 32:96], 2, 32), repack(blocks[..., :32], 1, 32)),
        scale=as_f16(blocks[..., 108:110]),
        sub=as_int8(*scales) - np.int8(32),
    )


FORMAT = Format(
    ggml_type=11,
    widths=(2, 1),
    group=16,
    super_block=256,
    zero=4,
    unpack=unpack,
)
