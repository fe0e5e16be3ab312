"""A memory-mapped reader of GGUF models, whole or split into several files.

`gguf_header.py` has the format of one file. A split model is a row of such files,

    NAME-00001-of-00003.gguf   metadata of the model; split.no 0, split.count 3; tensors
    NAME-00002-of-00003.gguf   split.no 1, split.count 3; tensors
    NAME-00003-of-00003.gguf   split.no 2, split.count 3; tensors

and is opened as one through any of them.
"""

import hashlib
import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from minfer_jax.gguf_header import GGUFError, Header, TensorInfo, gguf_error, parse_header, shown
from minfer_jax.gguf_types import GGML_TYPES

__all__ = ["GGUFError", "GGUFFile", "TensorInfo", "open_gguf"]

MAX_PARTS = 65_535  # split.count is a uint16

T = TypeVar("T")


_HASHED = 16 << 20  # bytes at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class GGUFFile:
    """An open GGUF model; its files stay mapped as long as it or an array taken from it lives.

    Attributes:
        path: the path that was opened.
        parts: the files, in order; one unless the model is split.
        version: GGUF version of the first part.
        alignment: what the first part's tensor data is aligned to, in bytes.
        metadata: the first part's keys. Scalars are int, float, bool or str; arrays of numbers are
            read-only numpy views (which may be unaligned), arrays of strings lists of str, arrays
            of arrays lists. Bytes that are not UTF-8 become lone surrogates ("surrogateescape"):
            unlike a replacement character these keep different tokens different, and
            `text.encode("utf-8", "surrogateescape")` gives the bytes back.
        records: key to where it lies in the first part, name and type and value: [start, stop).
        tensors: name to place, in file order, over all parts.
    """

    path: Path
    parts: tuple[Path, ...]
    version: int
    alignment: int
    metadata: dict[str, Any] = field(repr=False)
    records: dict[str, tuple[int, int]] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)
    maps: tuple[mmap.mmap, ...] = field(repr=False)

    def raw(self, name: str) -> np.ndarray:
        """Returns the bytes of a tensor, without a copy.

        Args:
            name: a key of `tensors`.

        Returns:
            A read-only uint8 view of the mapped file, shape [*shape[:-1], bytes of a row].

        Raises:
            KeyError: there is no such tensor.
        """
        tensor = self.tensors[name]
        row_bytes = GGML_TYPES[tensor.ggml_type].nbytes(tensor.shape[-1])
        data = np.frombuffer(self.maps[tensor.part], np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(*tensor.shape[:-1], row_bytes)

    def record(self, key: str) -> bytes:
        """Returns a metadata key as it is in the file: name, type and value; KeyError if absent."""
        start, stop = self.records[key]
        return self.maps[0][start:stop]

    def release(self, name: str) -> None:
        """Lets the system drop a tensor's pages from memory; a later read brings them back.

        Args:
            name: a key of `tensors`.

        Raises:
            KeyError: there is no such tensor.
        """
        tensor = self.tensors[name]
        _release(self.maps[tensor.part], tensor.offset, tensor.offset + tensor.nbytes)

    def sha256(self) -> str:
        """Returns the digest of all files, one after the other, in hex; their pages are let go."""
        digest = hashlib.sha256()
        for mapped in self.maps:
            for start in range(0, len(mapped), _HASHED):
                end = min(start + _HASHED, len(mapped))
                with memoryview(mapped) as view:
                    digest.update(view[start:end])
                _release(mapped, start, end)
        return digest.hexdigest()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a metadata key, or `default` if the file lacks it."""
        return self.metadata.get(key, default)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns the value of a metadata key, checked to be of one type.

        Args:
            key: metadata key.
            kind: int, float, bool, str, list (strings, arrays) or numpy.ndarray (numbers).
            default: what to return if the file lacks the key; None makes the key required.

        Raises:
            GGUFError: the key is missing and has no default, or its value is of another type.
        """
        found = self.metadata.get(key, default)
        if found is None:
            raise gguf_error(
                self.path, f"metadata key '{key}' is missing, expected a value ({kind.__name__})"
            )
        # To Python a bool is an int, but a file that has one where a number belongs is wrong.
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise gguf_error(
                self.path,
                f"metadata key '{key}' is {type(found).__name__} {shown(repr(found))}, "
                f"expected {kind.__name__}",
            )
        return found

    @property
    def architecture(self) -> str:
        """The model's `general.architecture`, such as "llama"; GGUFError if there is none."""
        return self.value("general.architecture", str)


def _release(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Lets the system drop the pages of some bytes from memory."""
    advice = getattr(mmap, "MADV_DONTNEED", None)  # Windows has none
    if advice is not None and stop > start:
        start -= start % mmap.PAGESIZE
        mapped.madvise(advice, start, stop - start)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One file of a model, mapped, and its header."""

    path: Path
    map: mmap.mmap
    header: Header


def open_gguf(path: str | Path) -> GGUFFile:
    """Opens a GGUF model and checks all that its headers say; tensor data is mapped, not read.

    Args:
        path: the file; of a split model any part, and the others are found beside it.

    Raises:
        GGUFError: the file, or one of its other parts, is not there, not GGUF, or damaged.
    """
    opened = _open_part(Path(path), 0)
    number, paths = _part_paths(opened)
    parts = [opened if i == number == 0 else _open_part(p, i) for i, p in enumerate(paths)]
    return GGUFFile(
        path=opened.path,
        parts=tuple(paths),
        version=parts[0].header.version,
        alignment=parts[0].header.alignment,
        metadata=parts[0].header.metadata,
        records=parts[0].header.records,
        tensors=_all_tensors(parts),
        maps=tuple(part.map for part in parts),
    )


def _open_part(path: Path, number: int) -> _Part:
    buffer = _map_file(path)
    return _Part(path=path, map=buffer, header=parse_header(path, buffer, number))


def _map_file(path: Path) -> mmap.mmap:
    expected = "expected a GGUF file"
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode) and status.st_size:
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise gguf_error(path, f"no such file; {expected}") from None
    except OSError as e:
        raise gguf_error(path, f"cannot be read ({e.strerror}); {expected}") from None
    except ValueError as e:  # a NUL in the path; or the file was emptied just now
        raise gguf_error(path, f"cannot be read ({e}); {expected}") from None
    if stat.S_ISDIR(status.st_mode):
        raise gguf_error(path, f"is a directory; {expected}: name one inside it")
    if not stat.S_ISREG(status.st_mode):  # to open a FIFO would be to wait for its writer
        raise gguf_error(path, f"is a pipe, socket or device; {expected}")
    raise gguf_error(path, f"is empty (0 bytes); {expected}: fetch it again")


def _part_paths(opened: _Part) -> tuple[int, list[Path]]:
    """Returns the opened file's index among the parts of its model, and the paths of all parts."""
    path = opened.path
    count = _split_value(opened, "split.count", 1)
    if count <= 1:
        return 0, [path]
    number = _split_value(opened, "split.no")
    if count > MAX_PARTS or not 0 <= number < count:
        raise gguf_error(
            path,
            f"split.no is {number} and split.count {count}, "
            f"expected no < count <= {MAX_PARTS}, counted from 0",
        )
    ending = _part_ending(number, count)
    if not path.name.endswith(ending):
        raise gguf_error(
            path,
            f"is part {number + 1} of {count} of a split model, so expected a name that ends in "
            f"{ending}: give the parts their names back",
        )
    prefix = path.name.removesuffix(ending)
    paths = [path.with_name(prefix + _part_ending(i, count)) for i in range(count)]
    missing = [p.name for p in paths if not os.path.exists(p)]
    if missing:
        raise gguf_error(
            path,
            f"is part {number + 1} of {count}, and {len(missing)} of the others are missing, "
            f"the first {shown(missing[0])}: put all parts into one folder",
        )
    return number, paths


def _part_ending(number: int, count: int) -> str:
    return f"-{number + 1:05d}-of-{count:05d}.gguf"


def _split_value(part: _Part, key: str, default: int | None = None) -> int:
    found = part.header.metadata.get(key, default)
    if type(found) is not int:
        raise gguf_error(part.path, f"{key} is {shown(repr(found))}, expected an integer")
    return found


def _all_tensors(parts: list[_Part]) -> dict[str, TensorInfo]:
    """Returns the tensors of all parts, once these are known to be the parts of one model."""
    tensors: dict[str, TensorInfo] = {}
    for index, part in enumerate(parts):
        if len(parts) > 1:
            found = _split_value(part, "split.no"), _split_value(part, "split.count")
            if found != (index, len(parts)):
                raise gguf_error(
                    part.path,
                    f"split.no is {found[0]} and split.count {found[1]}, "
                    f"expected {index} and {len(parts)}: it is a part of another model",
                )
        for name, tensor in part.header.tensors.items():
            if name in tensors:
                other = parts[tensors[name].part].path.name
                raise gguf_error(
                    part.path,
                    f"tensor '{shown(name)}' is in {shown(other)} too, "
                    f"expected it once: the parts are not of one model",
                )
            tensors[name] = tensor
    if len(parts) > 1:
        total = _split_value(parts[0], "split.tensors.count", len(tensors))
        if total != len(tensors):
            raise gguf_error(
                parts[0].path,
                f"split.tensors.count is {total}, but the {len(parts)} parts hold {len(tensors)} "
                f"tensors: they are not of one model",
            )
    return tensors
