"""What the user asks of the sampler, checked; and the same values as arrays for the device."""

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np

_INT32_MAX = 2**31 - 1
_INTEGRAL = (int, np.integer)
_REAL = (int, float, np.integer, np.floating)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplerArgs:
    """The sampler's values, one per row, all traced: no value of any of them compiles anything.

    Attributes:
        temperature: float32 ``[B]``.
        top_k: int32 ``[B]``.
        top_p: float32 ``[B]``.
        min_p: float32 ``[B]``.
        repeat_penalty: float32 ``[B]``.
        frequency_penalty: float32 ``[B]``.
        presence_penalty: float32 ``[B]``.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repeat_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token.

    Attributes:
        temperature: Divides the logits before the draw; below 1e-6 the largest logit is taken.
        top_k: Keep the k largest logits (and those equal to the smallest of them); 0 is off.
        top_p: Keep the most likely tokens until their probability exceeds p; off outside (0, 1).
        min_p: Keep tokens at least this likely relative to the likeliest one; off at or below 0.
        repeat_penalty: Divides positive and multiplies other logits of recent tokens; off at or
            below 1.
        frequency_penalty: Taken from a recent token's logit once per occurrence.
        presence_penalty: Taken from a recent token's logit once.
        seed: 64-bit seed of the draws.

    Raises:
        ValueError: A value is not a number, not finite, or out of its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("temperature", "repeat_penalty"):
            _check_float(name, getattr(self, name), at_least_zero=True)
        for name in ("top_p", "min_p", "frequency_penalty", "presence_penalty"):
            _check_float(name, getattr(self, name), at_least_zero=False)
        _check_int("top_k", self.top_k, expected="an integer >= 0 (0 turns it off)", end=None)
        _check_int("seed", self.seed, expected="an integer from 0 to 2**64 - 1", end=2**64)

    def arrays(self, batch: int = 1) -> SamplerArgs:
        """Puts the values on the device, the same for every row.

        Made on the host and copied over, so that this compiles nothing.

        Args:
            batch: Number of rows, B.

        Returns:
            The values as arrays of shape ``[batch]``.
        """
        names = [field.name for field in dataclasses.fields(SamplerArgs)]
        values: dict[str, np.ndarray] = {
            name: np.full((batch,), getattr(self, name), np.float32)
            for name in names
            if name != "top_k"
        }
        values["top_k"] = np.full((batch,), min(self.top_k, _INT32_MAX), np.int32)
        if self.top_p > 0:  # a p too small for float32 still keeps one token; 0 would be off
            values["top_p"] = np.maximum(values["top_p"], np.finfo(np.float32).tiny)
        return SamplerArgs(**jax.device_put(values))


def _check_float(name: str, value: object, *, at_least_zero: bool) -> None:
    """Refuses what is not a number that float32 holds, and negative ones where asked to."""
    low = 0.0 if at_least_zero else -_FLOAT32_MAX
    if isinstance(value, _REAL) and not isinstance(value, bool):
        # NaN fails every comparison, and an integer too large for a float is compared as it is.
        if low <= value <= _FLOAT32_MAX:
            return
    expected = ">= 0 and finite" if at_least_zero else "a finite number"
    raise ValueError(f"{name} must be {expected}, got {_shown(value)}")


def _check_int(name: str, value: object, *, expected: str, end: int | None) -> None:
    """Refuses what is not an integer of ``range(end)``; without an end, any from 0 up will do."""
    if isinstance(value, _INTEGRAL) and not isinstance(value, bool):
        if 0 <= value and (end is None or value < end):
            return
    raise ValueError(f"{name} must be {expected}, got {_shown(value)}")


def _shown(value: object) -> str:
    """The value in a message, cut to a readable length."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
