"""What the packing of blocks has in common; the blocks themselves are drawn in `quant/formats/`."""

import numpy as np


def groups_first(x: np.ndarray, group: int) -> np.ndarray:
    """float32 [blocks, weights] -> [group, groups], as `fit.py` takes them."""
    return np.ascontiguousarray(x.reshape(-1, group).T)


def pack_fields(q: np.ndarray, width: int, run: int) -> np.ndarray:
    """Packs integers into ggml's strided bit fields; `formats.base.repack` has the picture.

    Args:
        q: uint8 [blocks, weights], below 2**width.
        width: 1, 2 or 4 bits a field.
        run: bytes of a run, of which field s holds weight s * run + (index of the byte).

    Returns:
        uint8 [blocks, weights * width / 8].
    """
    n = 8 // width
    fields = q.reshape(len(q), -1, n, run)
    packed = fields[:, :, 0].copy()
    for s in range(1, n):
        packed |= fields[:, :, s] << np.uint8(s * width)
    return packed.reshape(len(q), -1)


def as_integers(x: np.ndarray, least: int, most: int) -> np.ndarray:
    """Rounds to the nearest integer within bounds, as int8."""
    return np.clip(np.rint(x), least, most).astype(np.int8)


def safe_inverse(x: np.ndarray) -> np.ndarray:
    """1 / x, and 0 where x is 0."""
    zero = x == 0
    return np.where(zero, np.float32(0), 1 / np.where(zero, np.float32(1), x))


def half(x: np.ndarray) -> np.ndarray:
    """float32 [blocks] as a block's f16 field: uint8 [blocks, 2]."""
    return x.astype("<f2").view(np.uint8).reshape(-1, 2)


def rounded_half(x: np.ndarray) -> np.ndarray:
    """float32 [blocks] as it will be read back from f16."""
    return x.astype(np.float16).astype(np.float32)


def signed_integers(values: np.ndarray, half_range: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of a block, float32 [blocks, groups], as int8 under one float32 a block.

    The largest of a block becomes -half_range, where the range reaches furthest.
    """
    high, low = values.max(axis=1), values.min(axis=1)
    unit = np.where(-low > high, low, high) / np.float32(-half_range)
    return as_integers(values * safe_inverse(unit)[:, None], -half_range, half_range - 1), unit
