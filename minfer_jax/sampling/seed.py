"""The seed of a run for which none was chosen, and the seeds that follow one."""

import numbers
import secrets
from typing import Any

FRESH = -1
"""Stands for a seed that is drawn, as None does."""

_BITS = 32  # short enough to be typed again


def settled(seed: Any) -> Any:
    """The seed as it is, checked by whoever uses it; for None and -1, one that nobody chose."""
    return secrets.randbits(_BITS) if seed is None or seed == FRESH else seed


def following(seed: Any, n: int) -> Any:
    """The seed that is n after one, of 64 bits; what is no such seed stays as it is."""
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        return seed
    whole = int(seed)  # numpy's own overflow
    return (whole + n) % 2**64 if 0 <= whole < 2**64 else seed
