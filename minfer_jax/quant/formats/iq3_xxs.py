"""IQ3_XXS: 256 weights in 8 groups, a grid of 256 entries of 4 columns.

block, 98 bytes:  [d f16][64 indices, a byte each][8 x u32: 4 x 7 bits of signs, 4 bits of scale]
weight = d (2 scale + 1) / 4 * (4, 12, ... 52 or 62, signed)
"""

import numpy as np

from minfer_jax.quant.formats import codebooks, grids
from minfer_jax.quant.formats.base import Format, Grid, HostPlanes, as_f16, as_words, repack_signs


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 98] -> planes."""
    rest = as_words(blocks[..., 66:])
    return HostPlanes(
        bits=(as_words(blocks[..., 2:66]), repack_signs(grids.packed_signs(rest))),
        scale=as_f16(blocks[..., :2]),
        sub=grids.odd(rest >> np.uint32(28)),
    )


FORMAT = Format(
    ggml_type=18,
    widths=(2, 1),
    super_block=256,
    zero=codebooks.IQ3_ZERO,
    codebook=codebooks.IQ3_CODEBOOK,
    grid=Grid(span=4, name="IQ3_XXS"),
    factor=1 / 4,
    unpack=unpack,
)
