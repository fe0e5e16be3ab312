"""IQ3_S: 256 weights in 8 groups, a grid of 512 entries of 4 columns.

block, 110 bytes:

    [d f16][64 bytes: low 8 bits of indices][8 bytes: bit i is the ninth of index 8 j + i]
    [32 bytes of signs][8 scales of 4 bits]

weight = d (2 scale + 1) * (1, 3, ... 13 or 15, signed)

Kept without the grid, as 4 bits a weight, which stand for the odd numbers from -15 to 15: a quarter
more memory, but a product needs no lookup of indices.
"""

import numpy as np

from minfer_jax.quant.formats import grids
from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, nibbles, pack


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 110] -> planes."""
    ninth = np.unpackbits(blocks[..., 66:74], axis=-1, bitorder="little").astype(np.uint16)
    sizes = grids.values_of("IQ3_S", blocks[..., 2:66] | ninth << np.uint16(8))
    signs = np.unpackbits(blocks[..., 74:106], axis=-1, bitorder="little")
    sizes = sizes.reshape(signs.shape)
    q = np.where(signs, np.uint8(7) - sizes, np.uint8(8) + sizes)
    return HostPlanes(
        bits=(pack(q, 4),),
        scale=as_f16(blocks[..., :2]),
        sub=grids.odd(nibbles(blocks[..., 106:])),
    )


FORMAT = Format(
    ggml_type=21,
    widths=(4,),
    super_block=256,
    zero=15,
    codebook=tuple(range(0, 32, 2)),
    unpack=unpack,
)
