"""TQ2_0: 256 weights of 2 bits, one scale.

block, 66 bytes:  [64 bytes of 2-bit fields][d f16]

fields: two halves of 32 bytes; field s of byte j in half h is weight 128 h + 32 s + j
weight = d * (q - 1)
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, repack


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 66] -> planes."""
    return HostPlanes(bits=(repack(blocks[..., :64], 2, 32),), scale=as_f16(blocks[..., 64:66]))


FORMAT = Format(ggml_type=35, widths=(2,), super_block=256, zero=1, unpack=unpack)
