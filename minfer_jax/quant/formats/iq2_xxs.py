"""IQ2_XXS: 256 weights in 8 groups, a grid of 256 entries of 8 columns.

block, 66 bytes:

    [d f16][8 x: [4 indices, a byte each][u32: 4 x 7 bits of signs, 4 bits of scale]]

weight = d (2 scale + 1) / 8 * (8, 25 or 43, signed)
"""

import numpy as np

from minfer_jax.quant.formats import codebooks, grids
from minfer_jax.quant.formats.base import Format, Grid, HostPlanes, as_f16, as_words, repack_signs


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 66] -> planes."""
    words = as_words(blocks[..., 2:]).reshape(*blocks.shape[:2], 8, 2)
    rest = words[..., 1]
    return HostPlanes(
        bits=(words[..., 0], repack_signs(grids.packed_signs(rest))),
        scale=as_f16(blocks[..., :2]),
        sub=grids.odd(rest >> np.uint32(28)),
    )


FORMAT = Format(
    ggml_type=16,
    widths=(1, 1),
    super_block=256,
    zero=codebooks.IQ2_ZERO,
    codebook=codebooks.IQ2_CODEBOOK,
    grid=Grid(span=8, name="IQ2_XXS"),
    factor=1 / 8,
    unpack=unpack,
)
