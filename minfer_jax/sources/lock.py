"""Of several processes that fetch the same file, one does, and the others wait."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from minfer_jax.sources.transfer import say

_MAX_NAME = 200  # bytes of a lock's name; files that share one wait for each other


def lock_of(path: Path, folder: Path) -> Path:
    """Where the lock of a file is that is kept below the cache folder."""
    name = "--".join(path.relative_to(folder).parts)[-_MAX_NAME:]
    return folder / ".locks" / f"{name}.lock"


@contextlib.contextmanager
def exclusive(lock: Path, name: str) -> Iterator[None]:
    """Keeps other processes out, by a lock that ends with the process; waits for its turn.

    Args:
        lock: The file that is locked; made if need be.
        name: What is fetched, for the line that says what is waited for.

    Raises:
        OSError: The lock cannot be made.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = filelock.FileLock(lock, mode=0o664)  # as huggingface_hub's: a cache may be shared
    try:
        held.acquire(timeout=0)
    except filelock.Timeout:
        say(f"another process fetches {name}; waiting for it")
        held.acquire()
    try:
        yield
    finally:
        held.release()
