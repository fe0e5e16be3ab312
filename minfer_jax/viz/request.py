"""What a run is asked for: read from JSON, and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 32  # of an answer, unless told
MOST_TOKENS = 512  # the page holds the values of each
TEMPERATURE = 0.8
_MOST_SEED = 2**31 - 1


class Busy(Exception):
    """A run is going already."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run is asked for.

    Attributes:
        prompt: in words; the model's chat template goes around it.
        max_tokens: of the answer, at most.
        temperature: of the draw.
        seed: of the draw; None for one that is drawn.
    """

    prompt: str
    max_tokens: int = MAX_TOKENS
    temperature: float = TEMPERATURE
    seed: int | None = None


def request_of(body: Mapping[str, Any]) -> Request:
    """A request as it was sent.

    Raises:
        ValueError: the prompt is empty, or a value is none that it takes.
    """
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("the prompt is empty, expected words")
    return Request(
        prompt=prompt,
        max_tokens=_whole("max_tokens", body.get("max_tokens", MAX_TOKENS), MOST_TOKENS),
        temperature=_number("temperature", body.get("temperature", TEMPERATURE), 100),
        seed=None if body.get("seed") is None else _whole("seed", body["seed"], _MOST_SEED),
    )


def _whole(name: str, found: Any, most: int) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        raise ValueError(f"{name} is {str(found)[:40]}, expected a whole number from 0 to {most}")
    return found


def _number(name: str, found: Any, most: int) -> float:
    fits = isinstance(found, int | float) and not isinstance(found, bool)
    if not fits or not 0 <= found <= most:  # which NaN is not
        raise ValueError(f"{name} is {str(found)[:40]}, expected a number from 0 to {most}")
    return float(found)
