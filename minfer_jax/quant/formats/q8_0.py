"""Q8_0: 32 weights, one scale, signed bytes.

    block, 34 bytes:  [d f16][32 signed bytes]
    weight = d * q

The planes hold unsigned fields, so the bytes are kept with their sign bit flipped: q + 128.
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 34] -> planes."""
    return HostPlanes(
        bits=(as_words(blocks[..., 2:]) ^ np.uint32(0x80808080),), scale=as_f16(blocks[..., :2])
    )


FORMAT = Format(ggml_type=8, widths=(8,), zero=128, unpack=unpack)
