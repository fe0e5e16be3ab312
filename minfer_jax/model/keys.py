"""Typed access to GGUF metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer_jax import gguf_header
from minfer_jax.model.config import ModelError

_MISSING: Any = object()
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # what is nearer to 0 has no finite reciprocal


def shown(value: object) -> str:
    """A value from a file, fit for a message: it may hold megabytes."""
    return gguf_header.shown(repr(value[:100] if isinstance(value, str | list) else value))


@dataclass(frozen=True)
class Keys:
    """Metadata of one architecture: `keys.integer("block_count")` reads `<arch>.block_count`.

    Every getter raises ModelError when the key is missing and has no default, or has another type.
    """

    metadata: Mapping[str, Any]
    arch: str

    def integer(self, name: str, default: int = _MISSING, *, minimum: int = 0) -> int:
        """A whole number of at least `minimum`; an array stands for its one common value."""
        value = self._single(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(
                f"{self._key(name)} is {shown(value)}, expected a whole number >= {minimum}"
            )
        return value

    def number(
        self,
        name: str,
        default: float = _MISSING,
        *,
        minimum: float = -LARGEST,
        above: bool = False,
    ) -> float:
        """A number that float32 holds, of at least `minimum`, or `above` it."""
        value, fits = self._single(name, default), True
        if isinstance(value, int | float) and not isinstance(value, bool):
            fits = value == 0 or SMALLEST <= abs(value) <= LARGEST
            if fits and value >= minimum and not (above and value == minimum):
                return float(value)
        if minimum == -LARGEST:
            expected = "a finite number"
        else:
            expected = f"a number {'above' if above else '>='} {minimum:g}"
        if not fits and math.isfinite(value):
            expected += " that float32 holds"
        raise ModelError(f"{self._key(name)} is {shown(value)}, expected {expected}")

    def text(self, name: str, default: str = _MISSING) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self._key(name)} is {shown(value)}, expected a string")
        return value

    def boolean(self, name: str, default: bool = _MISSING) -> bool:
        """True or false."""
        value = self._single(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._key(name)} is {shown(value)}, expected true or false")
        return value

    def array(self, name: str) -> np.ndarray | None:
        """An array of numbers or booleans, or None where the key is absent or a single value."""
        value = self._get(name, None)
        return value if isinstance(value, np.ndarray) else None

    def _key(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def _get(self, name: str, default: Any) -> Any:
        value = self.metadata.get(self._key(name), default)
        if value is _MISSING:
            raise ModelError(
                f"the file has no key {self._key(name)}, which this architecture needs"
            )
        return value

    def _single(self, name: str, default: Any) -> Any:
        value = self._get(name, default)
        if not isinstance(value, np.ndarray):
            return value
        distinct = np.unique(value)
        if len(distinct) != 1:
            raise ModelError(
                f"{self._key(name)} differs from layer to layer ({value[:4].tolist()}...), "
                "which is not supported: expected one value for all layers"
            )
        return distinct[0].item()
