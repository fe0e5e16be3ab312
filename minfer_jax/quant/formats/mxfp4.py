"""MXFP4: 32 weights of 4 bits (E2M1), one scale that is a power of two (E8M0).

block, 17 bytes:  [e][16 bytes: low nibbles are weights 0-15, high nibbles 16-31]
weight = 2**(e - 127) * value[q] / 2, the values doubled to be whole
(OCP Microscaling Formats specification 1.0)

2**(e - 128) of e = 0 and 1 is subnormal in float32, which XLA takes for zero; it is kept as zero.
"""

import numpy as np

from minfer_jax.quant.formats import codebooks
from minfer_jax.quant.formats.base import Format, HostPlanes, as_words


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 17] -> planes."""
    exponent = np.maximum(blocks[..., :1], 1) - np.uint8(1)
    return HostPlanes(bits=(as_words(blocks[..., 1:]),), scale=exponent)


FORMAT = Format(
    ggml_type=39,
    widths=(4,),
    zero=codebooks.E2M1_ZERO,
    codebook=codebooks.E2M1_CODEBOOK,
    byte_scale="bfloat16",
    unpack=unpack,
)
