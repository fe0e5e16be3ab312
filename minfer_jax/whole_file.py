"""A file that is there whole or not at all: written beside its place, then given its name."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO


def check_apart(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuse to write over what is read, or twice into one file: asked before anything long begins.

    Args:
        outputs: files to be written.
        inputs: files that are read.

    Raises:
        OSError: one line with the name.
    """
    for number, path in enumerate(outputs):
        if path.exists() and any(path.samefile(other) for other in inputs if other.exists()):
            raise OSError(f"{path} is read here, and would be lost: write to another file")
        if path.resolve() in [other.resolve() for other in outputs[:number]]:
            raise OSError(f"{path} would be written twice: give each its own file")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True, shared: bool = False) -> Iterator[IO[bytes]]:
    """Opens a new file beside `path`, which takes that name at the end of the block.

    Whatever ends the block early, Ctrl-C too, leaves `path` as it was and nothing beside it.

    Args:
        path: the file to make, or to replace.
        durable: what was written, and then the name, are on the disk when the block is left.
        shared: others may read it, as any file that is made plainly; else its owner alone.

    Raises:
        OSError: the folder cannot be written to, or is full; `path` is a folder or a device. It
            names `path`.
    """
    with _naming(path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise FileExistsError(errno.EEXIST, "is a pipe, socket or device")  # and is to stay one
        made = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False)
    with made as file:
        try:
            yield file
            with _naming(path):
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                if shared:
                    _let_others_read(file)
                os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # it has its name already
                os.unlink(file.name)
            raise
    if durable:
        _sync_folder(path.parent)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What the system refuses is told of the file that was asked for, not of the one beside it."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e


def _let_others_read(file: IO[bytes]) -> None:
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    os.chmod(file.name, 0o666 & ~mask)


def check_writable(path: Path) -> None:
    """See whether `replacing` could begin, before the work that leads to it.

    Raises:
        OSError: the folder is not there or cannot be written to, or `path` is there and no file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is there, and no file", str(path))
    with _naming(path), tempfile.NamedTemporaryFile(dir=path.parent, prefix="."):
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
