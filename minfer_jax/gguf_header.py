"""Parses the header of one GGUF file, versions 2 and 3.

    [b"GGUF"][version u32][n_tensors u64][n_keys u64]
    n_keys    x [key string][value type u32][value]
    n_tensors x [name string][n_dims u32][dims u64 x n_dims][ggml type u32][offset u64]
    [padding to a multiple of the alignment][tensor data, each tensor padded likewise]

    string = [length u64][bytes]        array = [item type u32][count u64][items]

Everything is little-endian. Each number that the file states is compared with the bytes that are
there before anything of that size is made, so that a damaged or hostile file costs no more than a
look at it. The format is specified in `docs/gguf.md` of the ggml repository; where that leaves
room, what llama.cpp accepts is accepted here.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from minfer_jax.gguf_types import (
    ARRAY,
    GGML_TYPES,
    NUMBER_DTYPES,
    REMOVED_TYPES,
    STRING,
    UINT32,
    foreign_format,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ELEMENTS = 2**63 - 1  # what ggml can count

# Bounds on the time and memory that a header can cost, each several times what the largest
# vocabularies (650,000 strings, 15 MB) and models (3,000 tensors) use.
MAX_HEADER_BYTES = 1 << 26
MAX_STRINGS = 1 << 21  # in arrays
MAX_ENTRIES = 1 << 16  # keys, tensors and nested arrays, each
MAX_NESTING = 4

# The least that one of each takes in the file.
MIN_HEADER_BYTES = 4 + 4 + 8 + 8
MIN_KEY_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
MIN_ARRAY_BYTES = 4 + 8
MIN_STRING_BYTES = 8


class GGUFError(ValueError):
    """A file that cannot be used; the message is one line that begins with the file's path."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: its name in the file.
        shape: dimensions in numpy's order (GGUF's reversed): a weight is (out, in).
        ggml_type: a key of GGML_TYPES.
        nbytes: bytes of data.
        offset: where they begin in their file, from its start.
        part: index of that file in `GGUFFile.parts`.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    nbytes: int
    offset: int
    part: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one file says about itself; the fields are those of `GGUFFile`."""

    version: int
    alignment: int
    metadata: dict[str, Any]
    records: dict[str, tuple[int, int]]
    tensors: dict[str, TensorInfo]


def parse_header(path: Path, buffer: mmap.mmap, part: int = 0) -> Header:
    """Parses a file's header and checks that its tensor data is there.

    Args:
        path: the file's path, for messages.
        buffer: the whole file.
        part: what to put into `TensorInfo.part`.

    Raises:
        GGUFError: it is not GGUF, of a version or byte order that is not read, or damaged.
    """
    version = _check_magic(path, buffer)
    cursor = _Cursor(path, buffer)
    cursor.pos = len(MAGIC) + 4
    n_tensors = cursor.integer("<Q")
    n_keys = cursor.integer("<Q")
    cursor.check_count(n_tensors, MIN_TENSOR_BYTES, MAX_ENTRIES, "tensors")
    cursor.check_count(n_keys, MIN_KEY_BYTES, MAX_ENTRIES, "metadata keys")
    metadata, records, alignment = _read_metadata(cursor, n_keys)
    tensors = _read_tensors(cursor, n_tensors, alignment, part)
    return Header(
        version=version, alignment=alignment, metadata=metadata, records=records, tensors=tensors
    )


def shown(text: str) -> str:
    """Makes text from a file fit for a message: short, one line, nothing unprintable in it."""
    return one_line(text if len(text) <= 100 else text[:100] + "...")


def one_line(text: str) -> str:
    """Text with nothing unprintable in it, a line break neither."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def padded(offset: int, alignment: int) -> int:
    """The next multiple of the alignment, or the offset itself where it is one."""
    return (offset + alignment - 1) // alignment * alignment


def gguf_error(path: Path, problem: str) -> GGUFError:
    """Makes the error that says what is wrong with the file at `path`."""
    name = one_line(str(path))
    return GGUFError(f"{name}: {problem}")


def _check_magic(path: Path, buffer: mmap.mmap) -> int:
    """Returns the version, once the file is known to be GGUF of a version that is read here."""
    size, head = len(buffer), buffer[:32]
    if not head.startswith(MAGIC[:size]):
        seems = foreign_format(head, size)
        hint = f"; it seems to be {seems}" if seems else ""
        raise gguf_error(
            path, f"not a GGUF file: it begins with {head[:4]!r}, expected {MAGIC!r}{hint}"
        )
    if size < MIN_HEADER_BYTES:
        raise gguf_error(
            path, f"truncated: {size} bytes, but a GGUF header has at least {MIN_HEADER_BYTES}"
        )
    version = int.from_bytes(head[4:8], "little")
    if version in VERSIONS:
        return version
    expected = "expected version 2 or 3, little-endian: convert the original model again"
    if version and version & 0xFFFF == 0:  # 3 written in the other byte order reads as 0x03000000
        version = int.from_bytes(head[4:8], "big")
        raise gguf_error(path, f"big-endian GGUF (version {version}); {expected}")
    raise gguf_error(path, f"GGUF version {version}; {expected}")


class _Cursor:
    """A position in a header; whatever is read through it is known to be there."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path = path
        self.buffer = buffer
        self.pos = 0
        self.end = min(len(buffer), MAX_HEADER_BYTES)
        self.item = "header"  # what is being read, for messages
        self.strings_left = MAX_STRINGS
        self.arrays_left = MAX_ENTRIES

    def error(self, problem: str) -> GGUFError:
        return gguf_error(self.path, f"{self.item}: {problem}")

    def short(self, nbytes: int, start: int) -> GGUFError:
        where = "the header may take" if self.end < len(self.buffer) else "the file has"
        return self.error(
            f"needs {nbytes} bytes at offset {start}, but {where} only {max(self.end - start, 0)} "
            f"more: it is damaged or truncated"
        )

    def check_count(self, count: int, min_bytes: int, limit: int, things: str) -> None:
        left = self.end - self.pos
        if count * min_bytes > left:
            raise self.error(
                f"claims {count} {things} of at least {min_bytes} bytes each, "
                f"but only {left} bytes follow: it is damaged or truncated"
            )
        if count > limit:
            raise self.error(f"claims {count} {things}, expected at most {limit}")

    def take(self, nbytes: int) -> int:
        """Moves over the next bytes and returns where they begin."""
        start = self.pos
        if nbytes > self.end - start:
            raise self.short(nbytes, start)
        self.pos = start + nbytes
        return start

    def integer(self, layout: str) -> int:
        return struct.unpack_from(layout, self.buffer, self.take(struct.calcsize(layout)))[0]

    def numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        start = self.take(count * dtype.itemsize)
        if dtype == np.bool_:  # any byte but 0 is true, as in llama.cpp
            truths = np.frombuffer(self.buffer, np.uint8, count, start) != 0
            truths.flags.writeable = False
            return truths
        return np.frombuffer(self.buffer, dtype, count, start)

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # The one hot loop: Gemma has 262,144 of these, and 0.3 s for all of its header.
        buffer, pos, end = self.buffer, self.pos, self.end
        unpack = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = pos + 8
            if start > end:
                raise self.short(8, pos)
            stop = start + unpack(buffer, pos)[0]
            if stop > end:
                raise self.short(stop - start, start)
            texts.append(buffer[start:stop].decode("utf-8", "surrogateescape"))
            pos = stop
        self.pos = pos
        return texts


def _read_metadata(
    cursor: _Cursor, n_keys: int
) -> tuple[dict[str, Any], dict[str, tuple[int, int]], int]:
    """Returns the keys with their values, where each lies, and the tensor data's alignment."""
    metadata: dict[str, Any] = {}
    records: dict[str, tuple[int, int]] = {}
    alignment = DEFAULT_ALIGNMENT
    for index in range(n_keys):
        cursor.item = f"metadata key {index + 1} of {n_keys}"
        start = cursor.pos
        key = cursor.string()
        if not key:
            raise cursor.error("its name is empty")
        cursor.item = f"metadata key '{shown(key)}'"
        if key in metadata:
            raise cursor.error("is there twice; names must differ")
        value_type = cursor.integer("<I")
        value = _read_value(cursor, value_type)
        if key == "general.alignment":
            if value_type != UINT32:
                raise cursor.error(f"has value type {value_type}, expected {UINT32} (uint32)")
            if value == 0 or value & (value - 1):
                raise cursor.error(f"is {value}, expected a power of two")
            alignment = value
        metadata[key] = value
        records[key] = start, cursor.pos
    return metadata, records, alignment


def _read_value(cursor: _Cursor, value_type: int, depth: int = 1) -> Any:
    """Returns the value that begins at the cursor; `depth` counts the arrays around it, and it."""
    if value_type in NUMBER_DTYPES:
        return cursor.numbers(NUMBER_DTYPES[value_type], 1)[0].item()
    if value_type == STRING:
        return cursor.string()
    if value_type != ARRAY:
        raise cursor.error(f"has value type {value_type}, expected 0 to {max(NUMBER_DTYPES)}")
    if depth > MAX_NESTING:
        raise cursor.error(f"nests arrays more than {MAX_NESTING} deep")
    item_type = cursor.integer("<I")
    count = cursor.integer("<Q")
    if item_type in NUMBER_DTYPES:
        dtype = NUMBER_DTYPES[item_type]
        cursor.check_count(count, dtype.itemsize, MAX_HEADER_BYTES, f"{dtype.name} items")
        return cursor.numbers(dtype, count)
    if item_type == STRING:
        cursor.check_count(count, MIN_STRING_BYTES, cursor.strings_left, "strings")
        cursor.strings_left -= count
        return cursor.strings(count)
    if item_type == ARRAY:
        cursor.check_count(count, MIN_ARRAY_BYTES, cursor.arrays_left, "arrays")
        cursor.arrays_left -= count
        return [_read_value(cursor, ARRAY, depth + 1) for _ in range(count)]
    raise cursor.error(f"has array item type {item_type}, expected 0 to {max(NUMBER_DTYPES)}")


def _read_tensors(
    cursor: _Cursor, n_tensors: int, alignment: int, part: int
) -> dict[str, TensorInfo]:
    """Returns the tensors, all of whose data is known to be in the file."""
    found: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
    for index in range(n_tensors):
        cursor.item = f"tensor {index + 1} of {n_tensors}"
        name = cursor.string()
        cursor.item = f"tensor '{shown(name)}'"
        if name in found:
            raise cursor.error("is there twice; names must differ")
        n_dims = cursor.integer("<I")
        if n_dims > MAX_DIMS:
            raise cursor.error(f"has {n_dims} dimensions, expected at most {MAX_DIMS}")
        # No dimensions: one element, as in llama.cpp. A dimension of 0 is an empty tensor there.
        dims = struct.unpack_from(f"<{n_dims}q", cursor.buffer, cursor.take(8 * n_dims)) or (1,)
        ggml_type = cursor.integer("<I")
        found[name] = (
            dims[::-1],
            ggml_type,
            _tensor_bytes(cursor, dims, ggml_type),
            cursor.integer("<Q"),
        )

    # The data section has no gaps: each tensor begins where the one before it ends, padded.
    data_start = padded(cursor.pos, alignment)
    expected = 0
    tensors: dict[str, TensorInfo] = {}
    for name, (shape, ggml_type, nbytes, offset) in found.items():
        cursor.item = f"tensor '{shown(name)}'"
        if offset != expected:
            raise cursor.error(
                f"has data offset {offset}, expected {expected} "
                f"(where the tensor before it ends, aligned to {alignment})"
            )
        start = data_start + offset
        size = len(cursor.buffer)
        if start + nbytes > size:
            raise cursor.error(
                f"its data is {nbytes} bytes at offset {start}, but the file has only "
                f"{max(size - start, 0)} of them: it is truncated, fetch it again"
            )
        tensors[name] = TensorInfo(
            name=name, shape=shape, ggml_type=ggml_type, nbytes=nbytes, offset=start, part=part
        )
        expected = padded(offset + nbytes, alignment)
    return tensors


def _tensor_bytes(cursor: _Cursor, dims: tuple[int, ...], ggml_type: int) -> int:
    """Returns the bytes of data that a tensor has, after checks of its dimensions and type."""
    if ggml_type in REMOVED_TYPES:
        name, instead = REMOVED_TYPES[ggml_type]
        raise cursor.error(
            f"has type {ggml_type} ({name}), which ggml has removed; "
            f"expected a file made with {instead} instead"
        )
    if ggml_type not in GGML_TYPES:
        raise cursor.error(
            f"has unknown type {ggml_type}, expected one of ggml's 0 to {max(GGML_TYPES)}"
        )
    kind = GGML_TYPES[ggml_type]
    if min(dims) < 0:
        raise cursor.error(f"has dimensions {dims}, expected none below 0")
    if dims[0] % kind.block_size:
        raise cursor.error(
            f"has rows of {dims[0]} elements, expected a multiple of {kind.block_size} "
            f"for its type {kind.name}"
        )
    if prod(max(d, 1) for d in dims) > MAX_ELEMENTS:
        raise cursor.error(
            f"has dimensions {dims}, whose product overflows; expected at most {MAX_ELEMENTS}"
        )
    return kind.nbytes(prod(dims))
