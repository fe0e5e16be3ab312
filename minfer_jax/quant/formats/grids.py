"""What the grid formats (IQ1, IQ2, IQ3) have in common: their tables, signs and scales.

The tables are those of gguf-py, imported when first needed: few models do, and it takes 0.07 s.
"""

import functools

import numpy as np


@functools.cache
def _levels(name: str) -> np.ndarray:
    """uint8 [entries, columns]: of each weight of a grid which of the values it takes."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    levels = np.searchsorted(np.asarray(kind.grid_map), kind.grid.reshape(kind.grid_shape))
    return levels.astype(np.uint8)


@functools.cache
def table(name: str) -> np.ndarray:
    """The entries of a grid, uint32 as `Grid` has them; `name` is that of its class in gguf-py."""
    levels = _levels(name).astype(np.uint32)
    places = [8 * (i % 4) + 4 * (i // 4) for i in range(levels.shape[1])]
    return (levels << np.array(places, np.uint32)).sum(axis=-1, dtype=np.uint32)


def values_of(name: str, index: np.ndarray) -> np.ndarray:
    """uint8 [..., columns]: the entries at `index`, one value's number a byte."""
    return _levels(name)[index]


def signs_of(index: np.ndarray) -> np.ndarray:
    """The 8 signs that an index of 7 bits stands for: an even number of them is set."""
    bits = index.astype(np.uint8)
    parity = bits ^ (bits >> np.uint8(4))
    parity = parity ^ (parity >> np.uint8(2))
    parity = parity ^ (parity >> np.uint8(1))
    return bits | ((parity & np.uint8(1)) << np.uint8(7))


def packed_signs(words: np.ndarray) -> np.ndarray:
    """Four such indices from the low bits of each word, uint32 [..., n] -> uint8 [..., 4 n]."""
    index = (words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)) & np.uint32(127)
    return signs_of(index).reshape(*words.shape[:-1], -1)


def odd(scales: np.ndarray) -> np.ndarray:
    """2 s + 1 of scales s up to 15, as int8: d (s + 1/2) is d / 2 (2 s + 1)."""
    return (2 * scales.astype(np.uint8) + np.uint8(1)).view(np.int8)
