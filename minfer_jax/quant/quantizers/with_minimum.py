"""Q2_K, Q4_K and Q5_K: groups with a scale and a minimum, which are integers under two f16."""

import numpy as np

from minfer_jax.quant.quantizers.fit import fit_scale_and_minimum, importance
from minfer_jax.quant.quantizers.pack import (
    as_integers,
    groups_first,
    half,
    pack_fields,
    rounded_half,
    safe_inverse,
)

# What a group's range is scaled to before rounding; the least error wins.
_SPANS = {
    3: tuple(3 - 0.5 + 0.1 * i for i in range(16)),
    15: tuple(15 - 1.0 + 0.1 * i for i in range(21)),
    31: tuple(31 - 0.5 + 0.1 * i for i in range(16)),
}


def q2_k(x: np.ndarray) -> np.ndarray:
    """float32 [blocks, 256] -> uint8 [blocks, 84]."""
    scales, minimums, d, dmin, q = _quantize(x, group=16, most=3, most_scale=15)
    nibbles = scales | (minimums << np.uint8(4))
    return np.concatenate((nibbles, pack_fields(q, 2, 32), half(d), half(dmin)), axis=1)


def q4_k(x: np.ndarray) -> np.ndarray:
    """float32 [blocks, 256] -> uint8 [blocks, 144]."""
    scales, minimums, d, dmin, q = _quantize(x, group=32, most=15, most_scale=63)
    packed = _pack_scale_min_k4(scales, minimums)
    return np.concatenate((half(d), half(dmin), packed, pack_fields(q, 4, 32)), axis=1)


def q5_k(x: np.ndarray) -> np.ndarray:
    """float32 [blocks, 256] -> uint8 [blocks, 176]."""
    scales, minimums, d, dmin, q = _quantize(x, group=32, most=31, most_scale=63)
    packed = _pack_scale_min_k4(scales, minimums)
    high, low = pack_fields(q >> 4, 1, 32), pack_fields(q & 15, 4, 32)
    return np.concatenate((half(d), half(dmin), packed, high, low), axis=1)


def _quantize(
    x: np.ndarray, *, group: int, most: int, most_scale: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quantises super-blocks of 256.

    Returns:
        scales and minimums, uint8 [blocks, groups]; what multiplies them, float32 [blocks] each;
        the integers, uint8 [blocks, 256].
    """
    groups = groups_first(x, group)
    fitted = fit_scale_and_minimum(groups, importance(groups), most, _SPANS[most])
    (scales, d), (minimums, dmin) = (_integers(f.reshape(len(x), -1), most_scale) for f in fitted)
    step = (rounded_half(d)[:, None] * scales).reshape(-1)
    low = (rounded_half(dmin)[:, None] * minimums).reshape(-1)
    q = (groups + low) * safe_inverse(step)
    np.clip(np.rint(q, out=q), 0, most, out=q)
    return scales, minimums, d, dmin, q.astype(np.uint8).T.reshape(x.shape)


def _integers(values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Values of a block, float32 [blocks, groups], as integers under one float32 a block."""
    unit = values.max(axis=1) / np.float32(most)
    integers = as_integers(values * safe_inverse(unit)[:, None], 0, most)
    return integers.astype(np.uint8), unit


def _pack_scale_min_k4(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """Eight 6-bit scales and minimums in 12 bytes; `formats.base.scale_min_k4` has the picture."""
    (s, s_last), (m, m_last) = (np.split(v, 2, axis=1) for v in (scales, minimums))
    top = (s_last >> 4 << 6, m_last >> 4 << 6)
    return np.concatenate((s | top[0], m | top[1], (s_last & 15) | (m_last & 15) << 4), axis=1)
