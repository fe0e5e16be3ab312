"""A prompt, or another text of a user's, from a file or from standard input."""

import codecs
import logging
import os
import sys

from minfer_jax.usage import UsageError

log = logging.getLogger("minfer_jax")

LONGEST = 64 << 20  # bytes
STANDARD_INPUT = "-"

# What Windows puts in front of a text, and the encoding that it stands for.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def read_text(name: str, what: str = "the prompt file") -> str:
    """The text of a file, as `decoded` makes it.

    Args:
        name: its path, or "-" for standard input. Where that is closed the text is empty.
        what: what to call it in messages.

    Raises:
        UsageError: there is no such file, it cannot be read, is too large, or is no text.
    """
    if name == STANDARD_INPUT:
        raw = b"" if sys.stdin is None else sys.stdin.buffer.read(LONGEST + 1)
        return decoded(raw, "standard input")
    shown = f"{what} {name!r}"
    if os.path.isdir(name):
        raise UsageError(f"{shown} is a folder; the path of a text file is expected")
    try:
        with open(name, "rb") as file:
            raw = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise UsageError(f"{shown} does not exist") from None
    except OSError as e:
        raise UsageError(f"{shown} cannot be read: {e.strerror or e}") from None
    return decoded(raw, shown)


def decoded(raw: bytes, shown: str) -> str:
    """The same text whatever system wrote it: no byte order mark, LF for CRLF, none at the end.

    Args:
        raw: UTF-8, or UTF-16 with a byte order mark. What is neither becomes U+FFFD, with a
            warning.
        shown: what to call it in messages.

    Raises:
        UsageError: it is longer than LONGEST, or has a NUL in it.
    """
    if len(raw) > LONGEST:
        raise UsageError(f"{shown} holds more than {LONGEST} bytes; give less")
    mark, encoding = next(((m, e) for m, e in _MARKS if raw.startswith(m)), (b"", "utf-8"))
    raw = raw.removeprefix(mark)
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as e:
        log.warning("%s is not %s at byte %d: U+FFFD stands for such", shown, encoding, e.start)
        text = raw.decode(encoding, "replace")
    if "\0" in text:
        raise UsageError(f"{shown} is no text: there is a NUL in it")
    return text.replace("\r\n", "\n").removesuffix("\n")
