"""IQ4_NL: 32 weights, one scale, integers that stand for 16 values, denser about zero.

block, 18 bytes:  [d f16][16 bytes: low nibbles are weights 0-15, high nibbles 16-31]
weight = d * value[q]
"""

import numpy as np

from minfer_jax.quant.formats import codebooks
from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, as_words


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 18] -> planes."""
    return HostPlanes(bits=(as_words(blocks[..., 2:]),), scale=as_f16(blocks[..., :2]))


FORMAT = Format(
    ggml_type=20,
    widths=(4,),
    zero=codebooks.IQ4_ZERO,
    codebook=codebooks.IQ4_CODEBOOK,
    unpack=unpack,
)
