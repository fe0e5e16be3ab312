"""What the user asks of the sampler, checked; and the same values as arrays for the device."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from minfer_jax.sampling.args import (
    ALL,
    WINDOW,
    WINDOW_EXTENDED,
    ExtendedArgs,
    SamplerArgs,
    n_words,
)
from minfer_jax.sampling.order import BY_TOKEN, MIROSTAT, SAMPLERS, STEPS, check_samplers

_INT32_MAX = 2**31 - 1
_INTEGRAL = (int, np.integer)
_REAL = (int, float, np.integer, np.floating)
_FLOAT32_MAX = float(np.finfo(np.float32).max)

# The steps of `sample`, in its order, and the values that turn each of them off.
_USUAL = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
_NOT_NEGATIVE = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "repeat_penalty"),
    *("dry_multiplier", "dry_base", "xtc_probability", "xtc_threshold"),
    *("mirostat_tau", "mirostat_eta"),
)
_ANY_FLOAT = (
    *("top_p", "min_p", "typical_p", "top_n_sigma", "frequency_penalty", "presence_penalty"),
)
_LAST_N = ("penalty_last_n", "dry_penalty_last_n")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token.

    Attributes:
        temperature: Divides the logits before the draw; below 1e-6 the largest logit is taken,
            after penalties and DRY, whatever the other steps.
        top_k: Keep the k largest logits (and those equal to the smallest of them); 0 is off.
        top_p: Keep the most likely tokens until their probability exceeds p; off outside (0, 1).
        min_p: Keep tokens at least this likely relative to the likeliest one; off at or below 0.
        typical_p: Keep the tokens nearest to the average surprise, until their probability exceeds
            p; off outside (0, 1).
        top_n_sigma: Keep logits within so many standard deviations of the largest; off at or
            below 0.
        xtc_probability: How often to drop the top choices, if several reach `xtc_threshold`, all
            but the least likely of these; 0 is off.
        xtc_threshold: The probability that makes a top choice; above 0.5 XTC is off.
        dynatemp_range: The temperature moves by so much, up where the model is unsure, down where
            it is sure; 0 is off.
        dynatemp_exponent: How the temperature follows the normalised entropy.
        repeat_penalty: Divides positive and multiplies other logits of recent tokens; off at or
            below 1.
        frequency_penalty: Taken from a recent token's logit once per occurrence.
        presence_penalty: Taken from a recent token's logit once.
        penalty_last_n: How many of the latest tokens are recent: up to 1024, which -1 stands for;
            0 turns the three penalties off.
        dry_multiplier: The penalty of a token that would go on with a repetition; 0 is off.
        dry_base: It grows by this factor with every token repeated; below 1 DRY is off.
        dry_allowed_length: Tokens that may be repeated freely.
        dry_penalty_last_n: How far back repetitions are looked for, as for `penalty_last_n`.
        mirostat: 0, or 2 for mirostat 2.0, which takes the place of all steps but penalties, DRY
            and the temperature.
        mirostat_tau: The surprise to hold, in bits.
        mirostat_eta: How fast mirostat follows it.
        samplers: The steps to run, in this order, of those in `order.SAMPLERS`.
        seed: 64-bit seed of the draws.

    Raises:
        ValueError: A value is not a number, not finite, or out of its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_penalty: float = 1.1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = WINDOW
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = SAMPLERS
    seed: int = 42

    def __post_init__(self) -> None:
        for name in _NOT_NEGATIVE:
            _check_float(name, getattr(self, name), at_least_zero=True)
        for name in _ANY_FLOAT:
            _check_float(name, getattr(self, name), at_least_zero=False)
        _check_int("top_k", self.top_k, expected="an integer >= 0 (0 turns it off)")
        _check_int("dry_allowed_length", self.dry_allowed_length, expected="an integer >= 0")
        last_n = f"an integer from -1 to {WINDOW_EXTENDED} (0 turns it off, -1 is all)"
        for name in _LAST_N:
            value = getattr(self, name)
            _check_int(name, value, expected=last_n, begin=-1, end=WINDOW_EXTENDED + 1)
        _check_int("mirostat", self.mirostat, expected="0 (off) or 2", end=3)
        if self.mirostat == 1:
            raise ValueError("mirostat must be 0 (off) or 2, got 1: version 1 is not supported")
        check_samplers(self.samplers)
        _check_int("seed", self.seed, expected="an integer from 0 to 2**64 - 1", end=2**64)

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that do something, in their order."""
        penalises = self.repeat_penalty > 1 or self.frequency_penalty or self.presence_penalty
        does = {
            "penalties": self.penalty_last_n != 0 and penalises,
            "dry": self.dry_multiplier > 0 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": 0 < self.typical_p < 1,
            "top_p": 0 < self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0,
            "temperature": True,
        }
        steps = tuple(name for name in self.samplers if does[name])
        by_token = tuple(name for name in steps if name in BY_TOKEN)
        if self.temperature < 1e-6:
            return by_token
        return (*by_token, "temperature", MIROSTAT) if self.mirostat else steps

    @property
    def extended(self) -> bool:
        """Whether `sample_extended` is needed, since `sample` would choose otherwise."""
        steps = iter(_USUAL)
        if not all(name in steps for name in self.steps):  # each after the one before
            return True
        if "penalties" in self.steps and self.penalty_last_n != WINDOW:
            return True
        return "temperature" in self.steps and self.dynatemp_range > 0

    def arrays(self, batch: int = 1, *, n_vocab: int = ALL) -> SamplerArgs:
        """Puts the values of the usual steps on the device, the same for every row.

        Made on the host and copied over, so that this compiles nothing.

        Args:
            batch: Number of rows, B.
            n_vocab: Tokens that are real; logits beyond are never drawn.

        Returns:
            The values as arrays of shape ``[batch]``.
        """
        return jax.device_put(self._usual(batch, n_vocab))

    def extended_arrays(
        self,
        batch: int = 1,
        *,
        bias: np.ndarray,
        breakers: np.ndarray | None = None,
        n_vocab: int = ALL,
    ) -> ExtendedArgs:
        """Puts all values on the device, the same for every row; compiles nothing either.

        Args:
            batch: Number of rows, B.
            bias: float32 ``[V]``, added to the logits; -inf forbids a token.
            breakers: uint32 ``[ceil(V / 32)]``, from `dry.breaker_tokens`; None for no breakers.
            n_vocab: As for `arrays`.

        Returns:
            What `sample_extended` takes.
        """
        order = np.full((len(STEPS) + 1,), -1, np.int32)
        order[: len(self.steps)] = [STEPS.index(name) for name in self.steps]
        if breakers is None:
            breakers = np.zeros((n_words(bias.size),), np.uint32)
        shared = {
            "usual": self._usual(batch, n_vocab),
            "order": order,
            "bias": np.asarray(bias, np.float32),
            "breakers": np.asarray(breakers, np.uint32),
        }
        names = {field.name for field in dataclasses.fields(ExtendedArgs)} - shared.keys()
        own = {name: self._row(name, batch) for name in names}
        if self.mirostat:  # its temperature is a plain one
            own["dynatemp_range"] = np.zeros((batch,), np.float32)
        return ExtendedArgs(**jax.device_put(own | shared))

    def plain(self) -> dict[str, Any]:
        """The fields as what JSON can hold: values may be numpy's, or integers without a bound."""
        fields = dataclasses.asdict(self)
        whole = {name for name in fields if _is_whole(name)}
        fields |= {name: min(int(fields[name]), 2**64 - 1) for name in whole}
        fields |= {name: float(fields[name]) for name in fields.keys() - whole - {"samplers"}}
        return fields | {"samplers": list(self.samplers)}

    @staticmethod
    def from_plain(fields: dict[str, Any]) -> "SamplingParams":
        """Undoes `plain`; a field that is not there has its default.

        Raises:
            ValueError: As the constructor.
            TypeError: It is no dictionary, or a field is unknown.
        """
        fields = {**fields}
        if isinstance(fields.get("samplers"), list):
            fields["samplers"] = tuple(fields["samplers"])
        return SamplingParams(**fields)

    def _usual(self, batch: int, n_vocab: int) -> SamplerArgs:
        """As numpy arrays. Steps that are not in `samplers` are off."""
        names = [name for off in _USUAL.values() for name in off]
        values = {name: self._row(name, batch) for name in names}
        absent = [step for step in _USUAL if step not in self.samplers]
        if self.penalty_last_n == 0:
            absent.append("penalties")
        for step in absent:
            for name, off in _USUAL[step].items():
                values[name] = np.full_like(values[name], off)
        if self.temperature < 1e-6 or self.mirostat:  # whatever `samplers` says
            values["temperature"] = self._row("temperature", batch)
        values["n_vocab"] = np.full((batch,), n_vocab, np.int32)
        return SamplerArgs(**values)  # pyright: ignore[reportArgumentType]

    def _row(self, name: str, batch: int) -> np.ndarray:
        """A field's value for each row: int32 where the field holds integers, else float32."""
        value = getattr(self, name)
        if _is_whole(name):
            return np.full((batch,), min(int(value), _INT32_MAX), np.int32)
        if name in ("top_p", "typical_p") and value > 0:
            # A p too small for float32 still keeps one token; 0 would be off.
            value = max(value, float(np.finfo(np.float32).tiny))
        return np.full((batch,), value, np.float32)


def _is_whole(name: str) -> bool:
    """Whether a field holds an integer."""
    return isinstance(getattr(SamplingParams, name), int)  # by its default


def _check_float(name: str, value: object, *, at_least_zero: bool) -> None:
    """Refuses what is not a number that float32 holds, and negative ones where asked to."""
    low = 0.0 if at_least_zero else -_FLOAT32_MAX
    if isinstance(value, _REAL) and not isinstance(value, bool):
        # NaN fails every comparison, and an integer too large for a float is compared as it is.
        if low <= value <= _FLOAT32_MAX:
            return
    expected = ">= 0 and finite" if at_least_zero else "a finite number"
    raise ValueError(f"{name} must be {expected}, got {_shown(value)}")


def _check_int(
    name: str, value: object, *, expected: str, begin: int = 0, end: int | None = None
) -> None:
    """Refuses what is not an integer of ``range(begin, end)``; without an end, all from `begin`."""
    if isinstance(value, _INTEGRAL) and not isinstance(value, bool):
        if begin <= value and (end is None or value < end):
            return
    raise ValueError(f"{name} must be {expected}, got {_shown(value)}")


def _shown(value: object) -> str:
    """The value in a message, cut to a readable length."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
