"""Q6_K: 256 weights in 16 groups, signed 8-bit scales under one f16, integers centred on 32.

block, 210 bytes:

    [128 bytes: low 4 bits][64 bytes: high 2 bits][16 signed scales][d f16]

low bits: two halves of 64 bytes; in half h low nibbles are weights 128 h + 0-63, high ones + 64-127
high bits: two halves of 32 bytes; field s of byte j in half h belongs to weight 128 h + 32 s + j
weight = d * scale * (q - 32)
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, repack


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 210] -> planes."""
    return HostPlanes(
        bits=(repack(blocks[..., :128], 4, 64), repack(blocks[..., 128:192], 2, 32)),
        scale=as_f16(blocks[..., 208:210]),
        sub=blocks[..., 192:208].view(np.int8),
    )


FORMAT = Format(
    ggml_type=14,
    widths=(4, 2),
    group=16,
    super_block=256,
    zero=32,
    unpack=unpack,
)
