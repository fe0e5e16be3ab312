"""Q5_0: 32 weights, one scale, integers centred on 16.

block, 22 bytes:

    [d f16][qh u32: bit i is the fifth bit of weight i][16 bytes of nibbles as in Q4_0]

weight = d * (q - 16)
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words, repack_bits


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 22] -> planes."""
    return HostPlanes(
        bits=(as_words(blocks[..., 6:]), repack_bits(blocks[..., 2:6])),
        scale=as_f16(blocks[..., :2]),
    )


FORMAT = Format(ggml_type=6, widths=(4, 1), zero=16, unpack=unpack)
