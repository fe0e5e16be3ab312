"""What the user has typed before, kept on disk from one conversation to the next."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from minfer_jax import host, whole_file

VARIABLE = "MINFER_CHAT_HISTORY"
OFF = frozenset({"off", "0", "none"})
_LONGEST = 1 << 20  # bytes; when there are more, the latest half stays


class _Lenient(History):
    """A file's history that outlives the file: a full disk must not end the conversation."""

    def __init__(self, inner: History) -> None:
        super().__init__()
        self._inner = inner

    def load_history_strings(self) -> Iterable[str]:
        with contextlib.suppress(OSError):
            yield from self._inner.load_history_strings()

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            self._inner.store_string(string)


def open_history() -> History:
    """The history in the user's cache; in memory where that cannot be written, or is not wanted.

    $MINFER_CHAT_HISTORY may name another file, or be "off". Only the user may read the file.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() in OFF:
        return InMemoryHistory()
    try:
        path = Path(wanted or f"{host.CACHE}/chat_history").expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600))
        if path.is_file() and path.stat().st_size > _LONGEST:
            _shorten(path)
    except (OSError, RuntimeError):  # RuntimeError: no home folder is known
        return InMemoryHistory()
    return _Lenient(FileHistory(path)) if path.is_file() else InMemoryHistory()


def _shorten(path: Path) -> None:
    with open(path, "rb") as file:
        file.seek(-_LONGEST // 2, os.SEEK_END)
        _, _, latest = file.read().partition(b"\n# ")  # an entry begins with its time
    with whole_file.replacing(path, durable=False) as file:
        file.write(b"\n# " + latest)
