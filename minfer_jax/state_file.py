"""A file that holds a JSON header and arrays, and says so if it is not what was written.

    bytes   0 ..  7   "MINFERST"
            8 .. 11   version of this layout, uint32
           12 .. 15   length H of the header, uint32
           16 .. 23   length of the file, uint64
           24 ..      header: JSON, UTF-8, H bytes, at most 64 KiB
                      {"identity": {name: text}, "header": {..}, "arrays": [[dtype, [sizes]], ..]}
                      the arrays' bytes, one after the other, as the header lists them
    the last 32       sha256 of all before

Numbers are little-endian. A file is written beside its place, brought to the disk and renamed: at
its path there is always a whole one, the old or the new.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import ml_dtypes
import numpy as np

from minfer_jax import whole_file

MAGIC = b"MINFERST"
VERSION = 1
_FIXED = struct.Struct("<8sIIQ")
_MOST_HEADER = 1 << 16
_MOST_AXES = 8
_MOST_MESSAGE = 1000  # characters
_DIGEST = 32
_HASH = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 20
_DTYPES = {
    "int8": np.dtype("<i1"),
    "uint8": np.dtype("<u1"),
    "int32": np.dtype("<i4"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

T = TypeVar("T")
Listed = list[tuple[tuple[int, ...], np.dtype]]  # shape and dtype of each array


class StateError(ValueError):
    """A saved state cannot be written, or is not what it should be. One line."""


def write(
    path: str | Path,
    identity: dict[str, str],
    header: dict[str, Any],
    arrays: Sequence[np.ndarray],
) -> None:
    """Write a file; what was at the path before stays there until the new one is whole.

    Args:
        path: where to; its folder must be there.
        identity: what it belongs to; `read` wants the same.
        header: values that JSON can hold.
        arrays: of the dtypes that the layout knows.

    Raises:
        StateError: it cannot be written there.
    """
    path = Path(path)
    listed = [[a.dtype.name, list(a.shape)] for a in arrays]
    text = json.dumps({"identity": identity, "header": header, "arrays": listed}).encode()
    size = _FIXED.size + len(text) + sum(a.nbytes for a in arrays) + _DIGEST
    if len(text) > _MOST_HEADER:
        raise StateError(
            f"{_line(path)}: the header takes {len(text)} bytes, more than {_MOST_HEADER}"
        )
    digest = hashlib.sha256()
    try:
        with whole_file.replacing(path) as file:
            for part in _parts(_FIXED.pack(MAGIC, VERSION, len(text), size) + text, arrays):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
    except (OSError, ValueError) as e:  # ValueError: a path that no file can have
        raise StateError(f"{_line(path)}: cannot be written ({_why(e)})") from e


def _line(text: object) -> str:
    """A path, or another's text, in a message of one line."""
    return str(text) if str(text).isprintable() else repr(str(text))


def _why(e: OSError | ValueError) -> str:
    return (isinstance(e, OSError) and e.strerror) or _line(e)


def _parts(begin: bytes, arrays: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    yield begin
    for array in arrays:
        if array.size:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read(
    path: str | Path,
    identity: dict[str, str],
    check: Callable[[dict[str, Any], Listed], None],
    build: Callable[[dict[str, Any], list[np.ndarray]], T],
) -> T:
    """Read a file back. Nothing is allocated that its bytes, and `check`, do not vouch for.

    Args:
        path: of the file.
        identity: as it was written with.
        check: given the header, and shapes and dtypes of the arrays: raises StateError where they
            are not wanted.
        build: given the header and the arrays: makes what is returned, or raises StateError.

    Raises:
        StateError: there is no such file; it is none of these, cut short, altered, of another
            identity, or refused by `check` or `build`.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise StateError("not a file")  # a pipe would be waited for
        with open(path, "rb") as file:
            return build(*_read(file, identity, check))
    except StateError as e:
        # A forged file may have put anything into it.
        raise StateError(f"{_line(path)}: {_line(str(e)[:_MOST_MESSAGE])}") from None
    except (OSError, ValueError) as e:  # ValueError: a path that no file can have
        raise StateError(f"{_line(path)}: cannot be read ({_why(e)})") from e


def _read(
    file: BinaryIO, identity: dict[str, str], check: Callable[[dict[str, Any], Listed], None]
) -> tuple[dict[str, Any], list[np.ndarray]]:
    there = os.fstat(file.fileno()).st_size
    begin = file.read(_FIXED.size)
    if not begin.startswith(MAGIC) or len(begin) < _FIXED.size:
        raise StateError("not a saved state")
    _, version, n_text, size = _FIXED.unpack(begin)
    if version != VERSION:
        raise StateError(f"a saved state of version {version}, expected {VERSION}: save it anew")
    if there != size:
        raise StateError(f"damaged: it has {there} bytes, expected {size}")
    if n_text > min(_MOST_HEADER, size - _FIXED.size - _DIGEST):
        raise StateError(f"damaged: a header of {n_text} bytes")
    _check_digest(file, size)

    file.seek(_FIXED.size)
    found, header, listed = _parsed(file.read(n_text))
    for name, wanted in identity.items():
        if found.get(name) != wanted:
            raise StateError(_other(name, found.get(name), wanted))
    n_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in listed)
    if n_bytes != size - _FIXED.size - n_text - _DIGEST:
        raise StateError(f"damaged: its arrays take {n_bytes} bytes, which it does not have")
    check(header, listed)
    arrays = []
    for shape, dtype in listed:
        array = np.empty(shape, dtype)
        if array.size and file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:  # pyright: ignore
            raise StateError("damaged: it ends early")
        arrays.append(array)
    return header, arrays


def _other(name: str, found: object, wanted: str) -> str:
    """What is said of an identity that is not the one wanted; two digests would tell nothing."""
    (own, added, _), (theirs, more, _) = (text.partition(" + ") for text in (wanted, str(found)))
    if own == theirs and (added or more):
        return (
            f"saved with the same {name} file, but not with the adapters and scales of now: "
            "load it as it was then"
        )
    if _HASH.fullmatch(own):
        return (
            f"saved with another {name} file, or before this one was changed: "
            "give that one to go on from there"
        )
    return f"saved with {name} {found}, but this is {wanted}"


def _check_digest(file: BinaryIO, size: int) -> None:
    file.seek(0)
    digest, left = hashlib.sha256(), size - _DIGEST
    while left and (part := file.read(min(left, _BLOCK))):
        digest.update(part)
        left -= len(part)
    if file.read(_DIGEST) != digest.digest():
        raise StateError("damaged: its sha256 is another than when it was written")


def _parsed(text: bytes) -> tuple[dict[str, Any], dict[str, Any], Listed]:
    """(identity, header, arrays), of the kinds that they should be."""
    try:
        value = json.loads(text)
        identity, header = value["identity"], value["header"]
        listed = [(tuple(shape), _DTYPES[name]) for name, shape in value["arrays"]]
        if not isinstance(identity, dict) or not isinstance(header, dict):
            raise TypeError
        if any(len(shape) > _MOST_AXES for shape, _ in listed):
            raise TypeError
        for size in (s for shape, _ in listed for s in shape):
            if type(size) is not int or not 0 <= size < 2**40:
                raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise StateError("damaged: its header is not that of a saved state") from None
    return identity, header, listed
