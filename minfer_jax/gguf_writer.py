"""Writes GGUF version 3; `gguf_header.py` has the format.

The header is made first, as the sizes of all tensors are known; their data follows a piece at a
time. A file takes its name only when it is complete.
"""

import contextlib
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from minfer_jax import whole_file
from minfer_jax.gguf_header import MAGIC, padded
from minfer_jax.gguf_types import GGML_TYPES, UINT32

VERSION = 3


def header(
    records: Iterable[bytes], tensors: Iterable[tuple[str, tuple[int, ...], int]], alignment: int
) -> bytes:
    """Makes all of a file that comes before its tensor data.

    Args:
        records: the metadata keys, each its name, type and value as bytes: `GGUFFile.record` has
            those of a file, `uint32_record` makes one.
        tensors: name, shape in numpy's order, and type (a key of GGML_TYPES) of each.
        alignment: what tensor data is aligned to, in bytes; `general.alignment` if there is one.

    Returns:
        The bytes; they are to be padded, as is the data of each tensor.
    """
    records, tensors = list(records), list(tensors)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(records)), *records]
    offset = 0
    for name, shape, ggml_type in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += (_string(name), dims, struct.pack("<IQ", ggml_type, offset))
        offset = padded(offset + GGML_TYPES[ggml_type].nbytes(math.prod(shape)), alignment)
    return b"".join(parts)


def pad(target: IO[bytes], alignment: int) -> None:
    """Goes on to the next multiple of the alignment; what is passed over reads as zeros."""
    target.seek(padded(target.tell(), alignment))


def uint32_record(key: str, value: int) -> bytes:
    """Makes the bytes of a metadata key whose value is a uint32."""
    return _string(key) + struct.pack("<II", UINT32, value)


def let_others_read(file: IO[bytes]) -> None:
    """Gives a file of `whole_file.replacing` the permissions of one that was made plainly."""
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    os.chmod(file.name, 0o666 & ~mask)


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


@contextlib.contextmanager
def written(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Opens a new file of known size, as `whole_file.replacing` does.

    Args:
        path: the file to make, or to replace.
        size: bytes that it will have.

    Raises:
        OSError: there is no room for it, or the folder cannot be written to.
    """
    try:
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise OSError(0, f"{size / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")
        with whole_file.replacing(path) as file:
            yield file
            file.truncate(size)
            let_others_read(file)
    except OSError as e:
        raise OSError(f"{path} cannot be written: {e.strerror or e}") from e
