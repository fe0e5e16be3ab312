"""Q4_1: 32 weights, one scale and one minimum.

block, 20 bytes:  [d f16][m f16][16 bytes: low nibbles are weights 0-15, high nibbles 16-31]
weight = d * q + m
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 20] -> planes."""
    return HostPlanes(
        bits=(as_words(blocks[..., 4:]),),
        scale=as_f16(blocks[..., :2]),
        low=as_f16(blocks[..., 2:4]),
    )


FORMAT = Format(ggml_type=3, widths=(4,), unpack=unpack)
