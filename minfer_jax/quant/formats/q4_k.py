"""Q4_K: 256 weights in 8 groups, 6-bit scales and minimums under two f16.

block, 144 bytes:

    [d f16][dmin f16][12 bytes: 8 x (6-bit scale, 6-bit minimum)][128 bytes of nibbles]

nibbles: four runs of 32 bytes; low nibbles of run r are weights 64 r + 0-31, high ones 64 r + 32-63
weight = d * scale * q - dmin * minimum
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, repack, scale_min_k4


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 144] -> planes."""
    scales, minimums = scale_min_k4(blocks[..., 4:16])
    return HostPlanes(
        bits=(repack(blocks[..., 16:], 4, 32),),
        scale=as_f16(blocks[..., :2]),
        sub=scales,
        low=-as_f16(blocks[..., 2:4]),
        sublow=minimums,
    )


FORMAT = Format(
    ggml_type=12,
    widths=(4,),
    super_block=256,
    unpack=unpack,
)
