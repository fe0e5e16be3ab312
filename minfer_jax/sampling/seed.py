"""The seed of a run for which none was chosen."""

import secrets
from typing import Any

FRESH = -1
"""Stands for a seed that is drawn, as None does."""

_BITS = 32  # short enough to be typed again


def settled(seed: Any) -> Any:
    """The seed as it is, checked by whoever uses it; for None and -1, one that nobody chose."""
    return secrets.randbits(_BITS) if seed is None or seed == FRESH else seed
