"""A file that is there whole or not at all: written beside its place, then given its name."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Opens a new file beside `path`, which takes that name at the end of the block.

    Whatever ends the block early, Ctrl-C too, leaves `path` as it was and nothing beside it.

    Args:
        path: the file to make, or to replace.
        durable: what was written, and then the name, are on the disk when the block is left.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # it has its name already
                os.unlink(file.name)
            raise
    if durable:
        _sync_folder(path.parent)


def check_writable(path: Path) -> None:
    """See whether `replacing` could begin, before the work that leads to it.

    Raises:
        OSError: the folder is not there or cannot be written to, or `path` is there and no file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there, and no file", str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="."):
        pass


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk too, where the system lets a folder be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
