"""Q1_0: 128 weights of one bit, one scale.

block, 18 bytes:  [d f16][16 bytes: bit i of byte j is weight 8 j + i]
weight = d where the bit is set, else -d
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, repack_bits


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 18] -> planes."""
    return HostPlanes(bits=(repack_bits(blocks[..., 2:]),), scale=as_f16(blocks[..., :2]))


FORMAT = Format(
    ggml_type=41,
    widths=(1,),
    super_block=128,
    zero=1,
    codebook=(0, 2),
    unpack=unpack,
)
