"""Q5_K: Q4_K with a fifth bit.

block, 176 bytes:

    [d f16][dmin f16][12 bytes of scales as in Q4_K][32 bytes of high bits][128 bytes of nibbles]

high bits: bit s of byte j is the fifth bit of weight 32 s + j
nibbles: as in Q4_K
weight = d * scale * q - dmin * minimum
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, repack, scale_min_k4


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 176] -> planes."""
    scales, minimums = scale_min_k4(blocks[..., 4:16])
    return HostPlanes(
        bits=(repack(blocks[..., 48:], 4, 32), repack(blocks[..., 16:48], 1, 32)),
        scale=as_f16(blocks[..., :2]),
        sub=scales,
        low=-as_f16(blocks[..., 2:4]),
        sublow=minimums,
    )


FORMAT = Format(
    ggml_type=13,
    widths=(4, 1),
    super_block=256,
    unpack=unpack,
)
