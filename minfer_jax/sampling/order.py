"""The names of the steps, and the order they run in: llama.cpp's names, letters and default."""

from types import MappingProxyType

LETTERS = MappingProxyType(
    {
        "e": "penalties",
        "d": "dry",
        "s": "top_n_sigma",
        "k": "top_k",
        "y": "typ_p",
        "p": "top_p",
        "m": "min_p",
        "x": "xtc",
        "t": "temperature",
    }
)
"""A letter and a name for each step that `samplers` may list; in this order they run by default."""

SAMPLERS = tuple(LETTERS.values())
"""llama.cpp's default order."""

BY_TOKEN = ("penalties", "dry")
"""Those that change logits by token; all others look at how the logits compare."""

MIROSTAT = "mirostat"
"""A step that no list names: `SamplingParams.mirostat` puts it in the place of others."""

STEPS = (*SAMPLERS, MIROSTAT)
"""A step's number is its place here."""


def samplers_from(text: str) -> tuple[str, ...]:
    """Reads the order of steps as llama.cpp's commands take it.

    Args:
        text: names with ";" between them, as in "top_k;temperature", or letters, as in "kt".

    Returns:
        The names.

    Raises:
        ValueError: A name or letter is unknown, or comes twice.
    """
    names = tuple(name.strip().lower().replace("-", "_") for name in text.split(";"))
    names = tuple(_ALIASES.get(name, name) for name in names if name)
    if len(names) == 1 and names[0] not in SAMPLERS:  # letters
        names = tuple(LETTERS.get(letter, letter) for letter in names[0])
    check_samplers(names)
    return names


def check_samplers(names: object) -> None:
    """Refuses what is not a tuple of different steps.

    Raises:
        ValueError: It is something else, or has a name that is unknown or comes twice.
    """
    if not isinstance(names, tuple):
        raise ValueError(f"samplers must be a tuple of names, got {type(names).__name__}")
    for i, name in enumerate(names):
        if name not in SAMPLERS:
            raise ValueError(f"samplers has {str(name)[:40]!r}: {_EXPECTED}")
        if name in names[:i]:
            raise ValueError(f"samplers has {name!r} twice: a step runs once")


_ALIASES = {"temp": "temperature", "typ": "typ_p", "nucleus": "top_p"}
_EXPECTED = (
    f"expected names of {', '.join(SAMPLERS)}, joined by ';', or letters of {''.join(LETTERS)!r}"
)
