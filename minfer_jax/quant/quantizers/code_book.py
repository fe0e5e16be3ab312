"""IQ4_NL and IQ4_XS: 4 bits choose among 16 values that lie closer together around zero.

block of IQ4_NL, 18 bytes:

    [d f16][16 bytes of nibbles]

block of IQ4_XS, 136 bytes:

    [d f16][u16: field s has the high 2 bits of scale s][4 bytes: low nibbles of scales][128 bytes]

nibbles: runs of 16 bytes; low nibbles of run r are weights 32 r + 0-15, high ones 32 r + 16-31
weight = d * value[q], in IQ4_XS d * (scale - 32) * value[q]
"""

import numpy as np

from minfer_jax.quant.formats import codebooks
from minfer_jax.quant.quantizers.fit import fit_scale, importance
from minfer_jax.quant.quantizers.pack import (
    groups_first,
    half,
    pack_fields,
    rounded_half,
    safe_inverse,
    signed_integers,
)

VALUES = np.array(codebooks.IQ4_CODEBOOK, np.float32) - np.float32(codebooks.IQ4_ZERO)

# Halfway between two values is a multiple of 1/2, so the nearest is found by a table over halves.
_REACH = 160  # further out there is only the outermost value
_INDEX = np.searchsorted(
    (VALUES[1:] + VALUES[:-1]) / 2, np.arange(-2 * _REACH, 2 * _REACH) / 2 + 0.25
).astype(np.uint8)
_NEAREST = VALUES[_INDEX]

# What the largest weight of a group is scaled to: about the outermost values of either side.
_PEAKS = (127.0, *(-127.0 + i for i in range(-7, 8)))


def iq4_nl(x: np.ndarray) -> np.ndarray:
    """float32 [blocks, 32] -> uint8 [blocks, 18]."""
    groups = groups_first(x, 32)
    d = fit_scale(groups, importance(groups), _nearest, _PEAKS)
    q = _index(groups * safe_inverse(rounded_half(d))).T.reshape(x.shape)
    return np.concatenate((half(d), pack_fields(q, 4, 16)), axis=1)


def iq4_xs(x: np.ndarray) -> np.ndarray:
    """float32 [blocks, 256] -> uint8 [blocks, 136]."""
    groups = groups_first(x, 32)
    fitted = fit_scale(groups, importance(groups), _nearest, _PEAKS)
    scales, d = signed_integers(fitted.reshape(len(x), 8), 32)
    step = (rounded_half(d)[:, None] * scales).reshape(-1)
    q = _index(groups * safe_inverse(step)).T.reshape(x.shape)
    s = (scales + np.int8(32)).view(np.uint8)
    high, low = pack_fields(s >> 4, 2, 1), pack_fields(s & 15, 4, 1)
    return np.concatenate((half(d), high, low, pack_fields(q, 4, 16)), axis=1)


def _index(v: np.ndarray) -> np.ndarray:
    return _INDEX.take(_cell(v), mode="clip")


def _nearest(v: np.ndarray) -> np.ndarray:
    return _NEAREST.take(_cell(v), mode="clip")


def _cell(v: np.ndarray) -> np.ndarray:
    """The table's index of each value; below zero is cut to zero, so truncation is floor."""
    v = v * np.float32(2) + np.float32(2 * _REACH)
    return np.clip(v, 0, 4 * _REACH - 1, out=v).astype(np.int32)
