"""IQ2_XS: 256 weights in 16 groups, a grid of 512 entries of 8 columns.

block, 74 bytes:  [d f16][32 x u16: 9 bits of index, 7 of signs][16 scales of 4 bits]
weight = d (2 scale + 1) / 8 * (8, 25 or 43, signed)
"""

import numpy as np

from minfer_jax.quant.formats import codebooks, grids
from minfer_jax.quant.formats.base import (
    Format,
    Grid,
    HostPlanes,
    as_f16,
    as_words,
    nibbles,
    repack_signs,
)


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 74] -> planes."""
    fields = blocks[..., 2:66].view("<u2")
    ninth = (fields >> np.uint16(8)).astype(np.uint8) & np.uint8(1)
    return HostPlanes(
        bits=(
            as_words(fields.astype(np.uint8)),
            repack_signs(grids.signs_of(fields >> np.uint16(9))),
        ),
        scale=as_f16(blocks[..., :2]),
        sub=grids.odd(nibbles(blocks[..., 66:])),
        high=np.bitwise_or.reduce(
            ninth.reshape(*blocks.shape[:2], 8, 4) << np.arange(4, dtype=np.uint8), axis=-1
        ),
    )


FORMAT = Format(
    ggml_type=17,
    widths=(1, 1),
    group=16,
    super_block=256,
    zero=codebooks.IQ2_ZERO,
    codebook=codebooks.IQ2_CODEBOOK,
    grid=Grid(span=8, high=1, name="IQ2_XS"),
    factor=1 / 8,
    unpack=unpack,
)
