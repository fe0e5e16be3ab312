"""NVFP4: 64 weights of 4 bits (E2M1) in 4 groups, each with a scale of 8 bits (UE4M3).

block, 36 bytes:

    [4 scales][4 x 8 bytes: of each group low nibbles are weights 0-7, high nibbles 8-15]

weight = scale * value[q] / 2, with MXFP4's values

Half of a scale is 0 or from 2**-10 to 240 and has 4 significant bits: float16 holds it, and its
8 bits below the sign, 5 of exponent and 3 of fraction, are all that is ever set. 0x7f is not a
number; llama.cpp takes it for 0.
"""

import numpy as np

from minfer_jax.quant.formats import codebooks
from minfer_jax.quant.formats.base import Format, HostPlanes, as_words


def _scales() -> np.ndarray:
    """uint8 [256]: for each UE4M3 the byte that is kept; its top bit has no meaning."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    half = np.where(exponent == 0, fraction * 2.0**-9, normal) / 2
    half[0x7F] = 0
    return (half.astype(np.float16).view(np.uint16) >> 7).astype(np.uint8)


SCALES = _scales()


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 36] -> planes."""
    words = as_words(blocks[..., 4:]).reshape(*blocks.shape[:2], 2, 2, 2)  # unit, group, word
    low, high, four = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0), np.uint32(4)
    first, second = words[..., 0, :], words[..., 1, :]
    bits = np.stack(
        ((first & low) | ((second & low) << four), ((first & high) >> four) | (second & high)),
        axis=-2,
    )
    return HostPlanes(bits=(bits,), scale=SCALES[blocks[..., :4]])


FORMAT = Format(
    ggml_type=40,
    widths=(4,),
    group=16,
    super_block=16,
    zero=codebooks.E2M1_ZERO,
    codebook=codebooks.E2M1_CODEBOOK,
    byte_scale="float16",
    unpack=unpack,
)
