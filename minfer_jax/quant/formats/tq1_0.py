"""TQ1_0: 256 weights of -1, 0 and 1, five to a byte, one scale.

block, 54 bytes:

    [32 bytes: 5 x 32 weights][16 bytes: 5 x 16 weights][4 bytes: 4 x 4 weights][d f16]

Digit s of byte j of a run of n is weight s * n + j of it. A byte is the number in base 3, as a
fraction of 256: three times its lower 8 bits carry the next digit into the 9th and 10th.
weight = d * (digit - 1)

Kept with 2 bits a weight, as TQ2_0: digits of base 3 have no place in a product of bytes.
"""

import numpy as np

from minfer_jax.quant.formats.base import Format, HostPlanes, as_f16, pack

RUNS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))  # first byte, last, digits


def unpack(blocks: np.ndarray) -> HostPlanes:
    """uint8 [rows, blocks, 54] -> planes."""
    digits = []
    for first, last, count in RUNS:
        rest = blocks[..., first:last]
        for _ in range(count):
            carried = rest.astype(np.uint16) * np.uint16(3)
            digits.append((carried >> np.uint16(8)).astype(np.uint8))
            rest = carried.astype(np.uint8)
    return HostPlanes(
        bits=(pack(np.concatenate(digits, axis=-1), 2),), scale=as_f16(blocks[..., 52:54])
    )


FORMAT = Format(ggml_type=34, widths=(2,), super_block=256, zero=1, unpack=unpack)
