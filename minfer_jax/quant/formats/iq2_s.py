"""IQ2_S: 256 weights in 16 groups, a grid of 1024 entries of 8 columns.

block, 82 bytes:

    [d f16][32 bytes: low 8 bits of indices][32 bytes of signs][8 bytes: 2 high bits of indices]
    [16 scales of 4 bits]

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
    """uint8 [rows, blocks, 82] -> planes."""
    return HostPlanes(
        bits=(as_words(blocks[..., 2:34]), repack_signs(blocks[..., 34:66])),
        scale=as_f16(blocks[..., :2]),
        sub=grids.odd(nibbles(blocks[..., 74:])),
        high=blocks[..., 66:74],
    )


FORMAT = Format(
    ggml_type=22,
    widths=(1, 1),
    group=16,
    super_block=256,
    zero=codebooks.IQ2_ZERO,
    codebook=codebooks.IQ2_CODEBOOK,
    grid=Grid(span=8, high=2, name="IQ2_S"),
    factor=1 / 8,
    unpack=unpack,
)
