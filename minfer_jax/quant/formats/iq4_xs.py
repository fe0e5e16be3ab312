"""IQ4_XS: IQ4_NL's values in blocks of 256, 8 groups with signed 6-bit scales under one f16.

block, 136 bytes:

    [d f16][u16: 8 x 2 high bits of the scales][4 bytes: 8 x 4 low bits][8 x 16 bytes as in IQ4_NL]

weight = d * (scale - 32) * value[q]
"""

import numpy as np

from minfer_jax.quant.formats import codebooks
from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words, nibbles


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 136] -> planes."""
    high = blocks[..., 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = nibbles(blocks[..., 4:8]) | ((high & np.uint16(3)) << np.uint16(4)).astype(np.uint8)
    return HostPlanes(
        bits=(as_words(blocks[..., 8:]),),
        scale=as_f16(blocks[..., :2]),
        sub=scales.view(np.int8) - np.int8(32),
    )


FORMAT = Format(
    ggml_type=23,
    widths=(4,),
    super_block=256,
    zero=codebooks.IQ4_ZERO,
    codebook=codebooks.IQ4_CODEBOOK,
    unpack=unpack,
)
