"""IQ1_S: 256 weights in 8 groups, a grid of 2048 entries of 8 columns.

block, 50 bytes:

    [d f16][32 bytes: low 8 bits of indices]
    [8 x u16: 4 x 3 high bits of indices, 3 bits of scale, delta's sign]

weight = d (2 scale + 1) * (-1, 0 or 1, +- 1/8)
"""

import numpy as np

from minfer_jax.quant.formats import codebooks, grids
from minfer_jax.quant.formats.base import Format, Grid, HostPlanes, as_f16, as_words


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 50] -> planes."""
    rest = blocks[..., 34:].view("<u2")
    high = (rest >> np.uint16(15)) * np.uint16(0x8888)  # delta's sign, once for each index
    for i in range(4):
        high |= ((rest >> np.uint16(3 * i)) & np.uint16(7)) << np.uint16(4 * i)
    return HostPlanes(
        bits=(as_words(blocks[..., 2:34]),),
        scale=as_f16(blocks[..., :2]),
        sub=grids.odd((rest >> np.uint16(12)) & np.uint16(7)),
        high=high,
    )


FORMAT = Format(
    ggml_type=19,
    widths=(1,),
    super_block=256,
    zero=codebooks.IQ1_ZERO,
    codebook=codebooks.IQ1_CODEBOOK,
    grid=Grid(span=8, high=3, name="IQ1_S"),
    factor=1 / 8,
    unpack=unpack,
)
