"""Conversations on disk: messages, the state beside them, and files that are damaged."""

import os
import re
from pathlib import Path

import pytest

from minfer_jax import chat_session
from minfer_jax.chat_session import SessionError, SessionFile
from minfer_jax.conversation import Conversation
from minfer_jax.language_model import LanguageModel
from minfer_jax.language_model import load as load_model
from minfer_jax.state_file import StateError
from minfer_jax.usage import UsageError
from tests.helpers import tiny_models

pytestmark = pytest.mark.usefixtures("shared_compiles")
MESSAGES = [
    {"role": "system", "content": "Brief."},
    {"role": "user", "content": '東京 "?"\n'},
    {"role": "assistant", "content": ""},
]


def load(path: Path):
    return SessionFile(path).load()


def save(path: Path, messages) -> SessionFile:
    file = SessionFile(path)
    file.load()
    file.save(messages)
    return file


def damaged(text: bytes, path: Path) -> str:
    path.write_bytes(text)
    with pytest.raises(SessionError) as caught:
        load(path)
    assert path.read_bytes() == text
    return str(caught.value)


def test_messages_come_back(tmp_path):
    path = tmp_path / "talk.json"
    assert load(path) is None
    save(path, MESSAGES)
    assert load(path) == MESSAGES
    assert path.read_text(encoding="utf-8").startswith('[\n  {\n    "role": "system",\n    "con')
    assert "東京" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o600
    save(path, [{"role": "user", "content": "\ud800"}])
    assert load(path) == [{"role": "user", "content": "?"}]
    assert os.listdir(tmp_path) == ["talk.json"]


def test_what_others_have_written(tmp_path):
    path = tmp_path / "talk.json"
    path.write_text('[{"role": "user", "content": null, "name": "x"}, {"role": "tool"}]')
    assert load(path) == [
        {"role": "user", "content": "", "name": "x"},
        {"role": "tool", "content": ""},
    ]
    path.write_text("[]")
    assert load(path) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b"[{", "Expecting property name"),
        (b"\xff\xfe", "codec can't decode"),
        (b"[" * 100_000, "recursion"),
        (b"{}", "it holds a dict, expected a list"),
        (b"[1]", "message 0 has no role"),
        (b'[{"role": 1}]', "message 0 has no role"),
        (b'[{"role": "user"}, {"role": "user", "content": 1}]', "the content of message 1 is no"),
    ],
)
def test_what_cannot_be_read_is_kept(tmp_path, text, why):
    path = tmp_path / "talk.json"
    message = damaged(text, path)
    assert why in message
    assert message.endswith(f"a copy is {path}.bad")
    assert Path(f"{path}.bad").read_bytes() == text
    assert damaged(text + b" ", path).endswith(f"a copy is {path}.bad1")
    assert Path(f"{path}.bad").read_bytes() == text


def test_what_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "talk.json"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="cannot be read, nor copied"):
        load(path)
    path.unlink()
    monkeypatch.setattr(chat_session, "_LONGEST", 10)
    assert "more than 10 bytes" in damaged(b"[" + b" " * 10 + b"]", path)


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(SessionError, match="cannot be written"):
        save(tmp_path / "none" / "talk.json", MESSAGES)
    path = tmp_path / "talk.json"
    path.write_text("[]")
    path.chmod(0o400)
    with pytest.raises(SessionError, match="is read-only"):
        save(path, MESSAGES)
    assert path.read_text() == "[]"


def test_what_is_as_it_was_is_not_written(tmp_path):
    path = tmp_path / "talk.json"
    file = save(path, [])
    assert not path.exists()
    file.save(MESSAGES)
    path.unlink()
    file.save(MESSAGES)
    assert not path.exists()
    file.save([])
    assert load(path) == []


def test_a_link_stays_one(tmp_path):
    (tmp_path / "far").mkdir()
    link, path = tmp_path / "talk.json", tmp_path / "far" / "real.json"
    link.symlink_to(path)
    for messages in (MESSAGES, MESSAGES[:1]):
        save(link, messages)
        assert link.is_symlink()
        assert load(path) == messages
    assert os.listdir(tmp_path / "far") == ["real.json"]


def test_what_another_program_has_written_stays(tmp_path):
    """Two conversations on one file: the second to write goes on beside it, both are kept."""
    path = tmp_path / "talk.json"
    one, other = save(path, MESSAGES[:1]), SessionFile(path)
    other.load()
    one.save(MESSAGES[:2])
    other.save(MESSAGES[1:])
    assert (one.path, other.path) == (path, Path(f"{path}.2"))
    one.save(MESSAGES)
    other.save(MESSAGES[:1])
    assert (load(path), load(other.path)) == (MESSAGES, MESSAGES[:1])
    fresh = SessionFile(tmp_path / "new.json")
    fresh.load()
    save(fresh.path, MESSAGES)
    fresh.save(MESSAGES[:1])
    assert load(tmp_path / "new.json") == MESSAGES


# The state


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    data = tiny_models.endless_text_model(n_layer=1, n_ctx=512)
    return tiny_models.save(tmp_path_factory.mktemp("session"), data)


@pytest.fixture(scope="module")
def model(file) -> LanguageModel:
    return load_model(file.path)


def talk(model: LanguageModel, *texts: str, **options) -> Conversation:
    conversation = Conversation(model, max_tokens=20, temperature=1.0, **options)
    for text in texts:
        "".join(conversation.say(text))
    return conversation


def test_the_state_spares_another_process_the_prefill(file, model, tmp_path):
    path = tmp_path / "talk.json"
    model.engine.forget()
    conversation = talk(model, "hello", "world")
    SessionFile(path).save_state(conversation)
    other = load_model(file.path)
    again = Conversation(other, messages=conversation.messages)
    said = SessionFile(path).restore_state(again)
    held, n = (int(word) for word in said.split()[:3:2])
    # Bytes are drawn, and some of them are a word when read again: from there on it is run.
    assert 20 < held <= n
    "".join(again.say("hello"))
    assert other.stats.n_reused >= min(held, len(model.engine.tokens) - 1)


def test_a_state_that_does_not_fit(file, model, tmp_path):
    path, state = tmp_path / "talk.json", tmp_path / "talk.json.state"
    kept = SessionFile(path)
    conversation = talk(model, "hello")
    assert kept.restore_state(conversation) == ""
    kept.save_state(conversation)
    data = state.read_bytes()
    state.write_bytes(data[:-1])
    assert "will be run again: " in kept.restore_state(conversation)
    assert "damaged" in kept.restore_state(conversation)
    state.write_bytes(data)
    other = tmp_path / "other.gguf"
    other.write_bytes(file.path.read_bytes())
    elsewhere = Conversation(load_model(other), messages=conversation.messages)
    said = kept.restore_state(elsewhere)
    assert "saved with another model file, or before this one was changed" in said
    assert not re.search("[0-9a-f]{64}", said)
    assert "".join(elsewhere.say("hello"))

    changed = Conversation(model, messages=[{"role": "user", "content": "another text"}])
    said = kept.restore_state(changed)
    held, n = (int(word) for word in said.split()[:3:2])
    assert held < n


def test_a_state_of_something_else_is_removed(model, tmp_path, monkeypatch):
    path, state = tmp_path / "talk.json", tmp_path / "talk.json.state"
    kept = SessionFile(path)
    conversation = talk(model, "hello")
    kept.save_state(conversation)
    assert state.exists()
    conversation.clear()
    kept.save_state(conversation)
    assert not state.exists()
    conversation = talk(model, "hello")
    monkeypatch.setattr(chat_session, "_MOST_STATE", 10)
    kept.save_state(conversation)
    assert not state.exists()
    with pytest.raises(StateError):
        monkeypatch.undo()
        SessionFile(tmp_path / "none" / "talk.json").save_state(conversation)
