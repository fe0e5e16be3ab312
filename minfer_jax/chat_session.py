"""A conversation on disk: its messages as JSON, and beside them what the engine has computed.

    talk.json          [{"role": "user", "content": "Hi"}, ...]
    talk.json.state    keys and values, so that nothing of it has to be run again (`state_file`)
    talk.json.bad      a copy of what was at talk.json and could not be read

The state is bound to the model's file as it is on this machine; where it does not fit, or is not
there, the messages are run again.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minfer_jax import whole_file
from minfer_jax.conversation import Conversation, Message
from minfer_jax.gguf import GGUFFile
from minfer_jax.state_file import StateError
from minfer_jax.usage import UsageError

_LONGEST = 64 << 20  # bytes of a file that is read
_MOST_STATE = 4 << 30  # bytes of keys and values that are written
_MOST_COPIES = 100


class SessionError(ValueError):
    """The messages cannot be read or written. One line."""


def load(path: Path) -> list[Message] | None:
    """The messages of a file; None where there is no such file.

    Raises:
        SessionError: they cannot be read. What is there is kept as a copy.
        UsageError: nor can it be copied: so it must not be replaced.
    """
    if not path.exists():
        return None
    try:
        if not path.is_file():
            raise ValueError("not a file")  # a pipe would be waited for
        if path.stat().st_size > _LONGEST:
            raise ValueError(f"more than {_LONGEST} bytes")
        return _messages(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as e:
        raise SessionError(f"{e}; {_keep_copy(path)}") from None


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"it holds a {type(value).__name__}, expected a list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has no role")
        if not isinstance(message.get("content"), str | None):
            raise ValueError(f"the content of message {i} is no text")
    return [{**message, "content": message.get("content") or ""} for message in value]


def _keep_copy(path: Path) -> str:
    copies = [path.with_name(f"{path.name}.bad{i or ''}") for i in range(_MOST_COPIES)]
    copy = next((c for c in copies if not c.exists()), copies[-1])
    try:
        shutil.copyfile(path, copy)
    except OSError as e:
        why = e.strerror or e
        raise UsageError(f"{path} cannot be read, nor copied to {copy} ({why})") from None
    return f"a copy is {copy}"


def save(path: Path, messages: Sequence[Message]) -> None:
    """Write the messages, in place of what is there; that stays until they are whole.

    Raises:
        SessionError: they cannot be written.
    """
    text = json.dumps(list(messages), indent=2, ensure_ascii=False) + "\n"
    try:
        with whole_file.replacing(path) as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as e:
        raise SessionError(f"{path} cannot be written ({e.strerror})") from None


def restore_state(path: Path, conversation: Conversation) -> str:
    """Take up what the engine had computed of a conversation that was loaded.

    Args:
        path: of the messages.
        conversation: with these messages, and nothing run yet.

    Returns:
        What came of it, for the user; "" where there is no state.
    """
    state, model = _state_path(path), conversation.model
    if not state.exists():
        return ""
    try:
        model.engine.load_state(state, _identity(model.file))
        held, n = conversation.n_held()
    except ValueError as e:
        return f"the messages will be run again: {e}"
    return f"{held} of {n} tokens are as {state} has them"


def save_state(path: Path, conversation: Conversation) -> None:
    """Write what the engine has computed of a conversation, or remove what does not belong to it.

    Raises:
        StateError: it cannot be written.
    """
    state, engine = _state_path(path), conversation.model.engine
    tokens = engine.tokens
    size = engine.kv_bytes * len(tokens) // engine.n_ctx
    known = conversation.transcript.tokens
    belongs = bool(known) and tuple(tokens[: len(known)]) == known
    try:
        if belongs and size <= _MOST_STATE:
            engine.save_state(state, _identity(conversation.model.file))
        else:
            state.unlink(missing_ok=True)
    except OSError as e:
        raise StateError(f"{state}: cannot be removed ({e.strerror})") from None


def _state_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.state")


def _identity(file: GGUFFile) -> str:
    """Of the model's file on this machine; its digest would take as long as reading all of it."""
    digest = hashlib.sha256()
    for part in file.parts:
        stat = part.stat()
        digest.update(f"{part.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()
