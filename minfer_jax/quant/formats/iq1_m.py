"""IQ1_M: IQ1_S's grid, 256 weights in 16 groups, delta's sign for each 8 columns.

block, 56 bytes:

    [32 bytes: low 8 bits of indices][16 bytes: 32 x (3 high bits, delta's sign)]
    [4 x u16: 4 scales of 3 bits, 4 bits of d: u16 number i has bits 4 i to 4 i + 3 of the f16]

weight = d (2 scale + 1) * (-1, 0 or 1, +- 1/8)
"""

import numpy as np

from minfer_jax.quant.formats import codebooks, grids
from minfer_jax.quant.formats.base import Format, Grid, HostPlanes, as_words


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 56] -> planes."""
    words = blocks[..., 48:].view("<u2")
    scales = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    parts = (words >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16)
    return HostPlanes(
        bits=(as_words(blocks[..., :32]),),
        scale=np.bitwise_or.reduce(parts, axis=-1, keepdims=True).view(np.float16),
        sub=grids.odd(scales.reshape(*blocks.shape[:2], 16)),
        high=blocks[..., 32:48].view("<u2"),
    )


FORMAT = Format(
    ggml_type=29,
    widths=(1,),
    group=16,
    super_block=256,
    zero=codebooks.IQ1_ZERO,
    codebook=codebooks.IQ1_CODEBOOK,
    grid=Grid(span=8, high=3, name="IQ1_S"),
    factor=1 / 8,
    unpack=unpack,
)
