"""What all transfers share: their error, the line and the bar they show, and room on the disk."""

import errno
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from minfer_jax.gguf_header import one_line

MAX_QUOTED = 200  # characters of others' words in an error
_URL = re.compile(r"\A(https?:/*)(?:[^/?#]*@)?([^?#]*).*", re.IGNORECASE | re.DOTALL)


class SourceError(ValueError):
    """A model that cannot be found or fetched; one line that says why and what to do."""


def shown(text: str | Path) -> str:
    """A reference or a URL without login and query, which may be secret."""
    return _URL.sub(r"\1\2", str(text))


def quoted(text: str | Path) -> str:
    """Text fit for an error: in quotes, short, one line, and no secrets of a URL in it."""
    text = shown(text)
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "...")


def not_cached(ref: str) -> SourceError:
    """Makes the error of a model that is not here, where nothing may be fetched."""
    return SourceError(
        f"{quoted(ref)} is not in the cache; this fetches it: python -m minfer_jax.models download"
        f" {shown(ref)}"
    )


def cannot_keep(
    name: str, folder: Path, error: OSError, variable: str = "MINFER_MODEL_DIR"
) -> SourceError:
    """Makes the error of a folder that cannot be written to, or is full.

    Args:
        name: What was to be kept.
        folder: Where.
        error: What the system says.
        variable: The environment variable that names the folder.
    """
    full = error.errno in (0, errno.ENOSPC, errno.EDQUOT)
    return SourceError(
        f"cannot keep {name} in {str(folder)!r}: {error.strerror or error};"
        f" {'make room there, or ' if full else ''}set {variable} to another folder"
    )


def say(line: str) -> None:
    """Prints a line on standard error, where somebody reads it, whatever names are in it."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(one_line(line), file=sys.stderr, flush=True)


def say_fetching(name: str, size: int | None, place: str, folder: Path) -> None:
    """Says what is about to be fetched, from where, and where it is kept."""
    shown = "" if size is None else f" ({size / 1e6:.0f} MB)"
    say(f"fetching {name}{shown} from {place} into {folder}")


def on_terminal() -> bool:
    """Whether somebody watches standard error."""
    return sys.stderr is not None and sys.stderr.isatty()


def progress_bar(name: str, size: int | None, done: int = 0) -> tqdm:
    """A bar of bytes on a terminal; elsewhere it shows nothing.

    Args:
        name: what is transferred.
        size: bytes in all, where known.
        done: bytes that are there already.
    """
    return tqdm(
        total=size,
        initial=done,
        desc=one_line(name),
        unit="B",
        unit_scale=True,
        leave=False,
        disable=not on_terminal(),
    )


def check_free(folder: Path, needed: int) -> None:
    """Raises OSError where the disk has no room for as many bytes more."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(0, f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")
