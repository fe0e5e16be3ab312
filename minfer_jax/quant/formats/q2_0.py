"""Q2_0: 64 weights of 2 bits, one scale.

block, 18 bytes:  [d f16][16 bytes: field s of byte j is weight 4 j + s]
weight = d * (q - 1)
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, pack


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 18] -> planes."""
    fields = blocks[..., 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)
    q = (fields & np.uint8(3)).reshape(*blocks.shape[:2], -1)
    return HostPlanes(bits=(pack(q, 2),), scale=as_f16(blocks[..., :2]))


FORMAT = Format(ggml_type=42, widths=(2,), super_block=64, zero=1, unpack=unpack)
