"""A conversation on disk: its messages as JSON, and beside them what the engine has computed.

    talk.json          [{"role": "user", "content": "Hi"}, ...]
    talk.json.state    keys and values, so that nothing of it has to be run again (`state_file`)
    talk.json.bad      a copy of what was at talk.json and could not be read
    talk.json.2        the conversation, where another program has written to talk.json meanwhile

Messages that were dropped from the context stay in the file, marked "dropped". The state is bound
to the model's file as it is on this machine; where it does not fit, or is not there, the messages
are run again.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minfer_jax import adapters, whole_file
from minfer_jax.conversation import Conversation, Message
from minfer_jax.language_model import LanguageModel
from minfer_jax.state_file import StateError
from minfer_jax.usage import UsageError

_LONGEST = 64 << 20  # bytes of a file that is read
_MOST_STATE = 4 << 30  # bytes of keys and values that are written
_MOST_COPIES = 100


class SessionError(ValueError):
    """The messages cannot be read or written. One line."""


class SessionFile:
    """Where a conversation is kept.

    Attributes:
        path: of the messages.
        saved: the messages that are there; None where there are none that can be read.
    """

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path
        self.saved: list[Message] | None = None
        self._seen: tuple[int, ...] | None = None

    def load(self) -> list[Message] | None:
        """The messages of the file; None where there is no such file.

        Raises:
            SessionError: they cannot be read. What is there is kept as a copy.
            UsageError: nor can it be copied: so it must not be replaced.
        """
        self._seen = _version(self.path)
        if self._seen is None:
            return None
        try:
            if not self.path.is_file():
                raise ValueError("not a file")  # a pipe would be waited for
            if self.path.stat().st_size > _LONGEST:
                raise ValueError(f"more than {_LONGEST} bytes")
            self.saved = _messages(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as e:
            raise SessionError(f"{e}; {_keep_copy(self.path)}") from None
        return list(self.saved)

    def save(self, messages: Sequence[Message]) -> None:
        """Write the messages, if they are others than those that are there.

        What is there stays until they are whole. What another program has put there stays too:
        then they go to another file, which `path` names from here on.

        Raises:
            SessionError: they cannot be written.
        """
        if list(messages) == (self.saved or []):
            return
        text = json.dumps(list(messages), indent=2, ensure_ascii=False) + "\n"
        try:
            if _version(self.path) not in (None, self._seen):
                self.path = _free(self.path, "", 2)
            place = self.path.resolve()  # a link stays one
            if place.exists() and not place.stat().st_mode & 0o222:
                raise SessionError(f"{self.path} is read-only")
            with whole_file.replacing(place) as file:
                file.write(text.encode("utf-8", "replace"))
            self._seen = _version(self.path)
        except OSError as e:
            raise SessionError(f"{self.path} cannot be written ({e.strerror})") from None
        self.saved = list(messages)

    def restore_state(self, conversation: Conversation) -> str:
        """Take up what the engine had computed of a conversation that was loaded.

        Args:
            conversation: with these messages, and nothing run yet.

        Returns:
            What came of it, for the user; "" where there is no state.
        """
        state, model = self._state, conversation.model
        if not state.exists():
            return ""
        try:
            model.engine.load_state(state, _identity(model))
            held, n = conversation.n_held()
        except ValueError as e:
            return f"the messages will be run again: {e}"
        return f"{held} of {n} tokens need not be run again: {state} has them"

    def save_state(self, conversation: Conversation) -> None:
        """Write what the engine has computed of a conversation, or remove what is of another.

        Raises:
            StateError: it cannot be written.
        """
        state, engine = self._state, conversation.model.engine
        tokens = engine.tokens
        size = engine.kv_bytes * len(tokens) // engine.n_ctx
        known = conversation.transcript.tokens
        belongs = bool(known) and tuple(tokens[: len(known)]) == known
        try:
            if belongs and size <= _MOST_STATE:
                engine.save_state(state, _identity(conversation.model))
            else:
                state.unlink(missing_ok=True)
        except OSError as e:
            raise StateError(f"{state}: cannot be removed ({e.strerror})") from None

    @property
    def _state(self) -> Path:
        return self.path.with_name(f"{self.path.name}.state")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"it holds a {type(value).__name__}, expected a list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has no role")
        if not isinstance(message.get("content"), str | None):
            raise ValueError(f"the content of message {i} is no text")
    return [{**message, "content": message.get("content") or ""} for message in value]


def _version(path: Path) -> tuple[int, ...] | None:
    """Changes whenever the file does; None where there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _free(path: Path, word: str, first: int) -> Path:
    """A name beside `path` that nothing has."""
    for i in range(first, _MOST_COPIES):
        name = path.with_name(f"{path.name}.{word}{i or ''}")
        if not name.exists():
            return name
    raise FileExistsError(errno.EEXIST, f"there are {_MOST_COPIES} copies already")


def _keep_copy(path: Path) -> str:
    try:
        copy = _free(path, "bad", 0)
        shutil.copyfile(path, copy)
    except OSError as e:
        raise UsageError(f"{path} cannot be read, nor copied ({e.strerror or e})") from None
    return f"a copy is {copy}"


def _identity(model: LanguageModel) -> str:
    """Of the model's file on this machine, whose digest would take long, and of its adapters."""
    digest = hashlib.sha256()
    for part in model.file.parts:
        stat = part.stat()
        digest.update(f"{part.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest() + adapters.identity(model.adapters)
