"""The names of split models: NAME-00001-of-00003.gguf to NAME-00003-of-00003.gguf."""

import re
from collections.abc import Iterable

SUFFIX = ".gguf"
MAX_PARTS = 1000  # of a model that is fetched
_SPLIT = re.compile(r"(?P<base>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})")  # without .gguf


def base_name(name: str) -> str:
    """NAME of NAME.gguf, and of each of its parts; folders before it stay."""
    stem = name.removesuffix(SUFFIX)
    match = _SPLIT.fullmatch(stem)
    return stem if match is None else match["base"]


def first_part(stem: str) -> str:
    """NAME-00003-of-00005 -> NAME-00001-of-00005; another name stays."""
    match = _SPLIT.fullmatch(stem)
    return stem if match is None else f"{match['base']}-00001-of-{match['parts']}"


def all_parts(name: str) -> tuple[str, ...]:
    """The names of all files of the model that a file belongs to, in order.

    Args:
        name: with or without folders, ending in .gguf.
    """
    match = _SPLIT.fullmatch(name.removesuffix(SUFFIX))
    if match is None or not 1 <= int(match["parts"]) <= MAX_PARTS:
        return (name,)
    return tuple(
        f"{match['base']}-{part:05d}-of-{match['parts']}{SUFFIX}"
        for part in range(1, int(match["parts"]) + 1)
    )


def models_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The whole models among some files: base name -> names of its files, in order.

    Args:
        names: of files; those that do not end in .gguf are left out, and so is a split of which
            parts are missing.
    """
    present = {name for name in names if name.endswith(SUFFIX)}
    found = {}
    for name in sorted(present):
        parts = all_parts(name)
        if name == parts[0] and present.issuperset(parts):
            found[base_name(name)] = parts
    return found
