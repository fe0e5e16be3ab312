"""Q3_K and Q6_K: groups of 16 with a signed scale, an integer under one f16, and no minimum.

The error of a weight counts by its size. ggml takes the square of it: as good by the model's mean
KL (a model with Q3_K: 0.70, and 0.70 with this; with Q6_K 0.0087 and 0.0086), and 2 % worse by the
mean square error.
"""

import numpy as np

from minfer_jax.quant.quantizers.fit import fit_scale
from minfer_jax.quant.quantizers.pack import (
    groups_first,
    half,
    pack_fields,
    rounded_half,
    safe_inverse,
    signed_integers,
)

# What the largest weight of a group is scaled to before rounding: about the outermost integer,
# which is negative. Three bits take wider steps, and gain by either sign.
_PEAKS = {
    4: tuple(sign * (4 - 1.2 + 0.1 * i) for sign in (-1, 1) for i in range(20)),
    32: tuple(-(32 - 0.9 + 0.1 * i) for i in range(19)),
}


def q3_k(x: np.ndarray) -> np.ndarray:
    """float32 [blocks, 256] -> uint8 [blocks, 110]."""
    scales, d, q = _quantize(x, half_range=4, half_scales=32)
    s = (scales + np.int8(32)).view(np.uint8)
    low = (s[:, :8] & 15) | (s[:, 8:] & 15) << 4
    high = pack_fields(s >> 4, 2, 4)
    bits = (pack_fields(q >> 2, 1, 32), pack_fields(q & 3, 2, 32))
    return np.concatenate((*bits, low, high, half(d)), axis=1)


def q6_k(x: np.ndarray) -> np.ndarray:
    """float32 [blocks, 256] -> uint8 [blocks, 210]."""
    scales, d, q = _quantize(x, half_range=32, half_scales=128)
    bits = (pack_fields(q & 15, 4, 64), pack_fields(q >> 4, 2, 32))
    return np.concatenate((*bits, scales.view(np.uint8), half(d)), axis=1)


def _quantize(
    x: np.ndarray, *, half_range: int, half_scales: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantises super-blocks of 256.

    Returns:
        scales, int8 [blocks, 16]; what multiplies them, float32 [blocks]; the integers plus
        `half_range`, uint8 [blocks, 256].
    """
    groups = groups_first(x, 16)

    def nearest(v: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(v, out=v), -half_range, half_range - 1, out=v)

    fitted = fit_scale(groups, np.abs(groups), nearest, _PEAKS[half_range])
    scales, d = signed_integers(fitted.reshape(len(x), 16), half_scales)
    step = (rounded_half(d)[:, None] * scales).reshape(-1)
    q = nearest(groups * safe_inverse(step)) + np.float32(half_range)
    return scales, d, q.astype(np.uint8).T.reshape(x.shape)
