"""The turns of a conversation on a screen: what an answer must not do there, and Ctrl-C."""

import re
import signal
import sys

import pytest

from minfer_jax.chat_turns import Turns, remind
from minfer_jax.conversation import Conversation
from minfer_jax.language_model import LanguageModel, load
from tests.helpers import tiny_models


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LanguageModel:
    """Its answers are given by the tests."""
    data = tiny_models.tiny_text_model(n_layer=1)
    return load(tiny_models.save(tmp_path_factory.mktemp("turns"), data).path)


@pytest.mark.parametrize(
    ("messages", "lines"),
    [
        ([], []),
        ([("system", "Brief.")], []),
        ([("user", "1"), ("assistant", "2"), ("user", " 3\n4 ")], ["you said: 3 4"]),
        (
            [("user", "1"), ("assistant", "<think>\nHm.\n</think>\n\nYes,\n\x1b[31mit is.")],
            ["you said: 1", r"answered: Yes, \x1b[31mit is."],
        ),
        (
            [("user", "one " * 15), ("assistant", "two " * 10**6)],
            [f"you said: {'one ' * 14}one", f"answered: {'two ' * 15}..."],
        ),
    ],
)
def test_where_a_conversation_was_left(capsys, messages, lines):
    told = [{"role": role, "content": content} for role, content in messages]
    expected = [f"[session] {line}" for line in lines]
    remind(told, color=False)
    assert capsys.readouterr() == ("", "".join(f"{line}\n" for line in expected))
    remind(told, color=True)
    assert capsys.readouterr().err == "".join(f"\x1b[90m{line}\x1b[0m\n" for line in expected)


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_answer_does_not_steer_the_terminal(model, monkeypatch, capsys, color, is_terminal):
    text = "a\x1b[2J\x9b1m\x07\t\r\x7f\nü"
    monkeypatch.setattr(model, "stream_ids", lambda *_, **__: iter(["<think>", "\x1b", text]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    conversation = Conversation(model, max_tokens=3)
    Turns(conversation, session=None, color=color, interactive=False).say("hello")
    out = re.sub(r"\x1b\[(90|0)m", "", capsys.readouterr().out)
    shown = "a␛[2J\ufffd1m␇\t␍␡\nü"
    assert out == ("<think>␛" + shown if is_terminal else "<think>\x1b" + text) + "\n"
    assert conversation.messages[-1]["content"] == "<think>\x1b" + text


def interrupted(*_, **__):
    raise KeyboardInterrupt
    yield


@pytest.mark.parametrize("color", [False, True])
def test_an_answer_that_is_terminated_is_kept_and_counts(model, monkeypatch, capsys, color):
    conversation = Conversation(model, max_tokens=3)

    def pieces(*_, **__):
        yield "<thi"
        raise SystemExit(143)

    monkeypatch.setattr(model, "stream_ids", pieces)
    turns = Turns(conversation, session=None, color=color, interactive=False)
    with pytest.raises(SystemExit):
        turns.say("hello")
    assert (turns.n, capsys.readouterr().out) == (1, "<thi\n"), "nothing is held back then"
    assert conversation.messages[-1]["content"] == "<thi"


@pytest.mark.parametrize("begin", [interrupted, lambda *_, **__: next(interrupted())])
def test_ctrl_c_before_an_answer(model, monkeypatch, capsys, begin):
    """Nobody typing: it ends the command; else the turn alone, which leaves no trace."""
    conversation = Conversation(model, max_tokens=3)
    monkeypatch.setattr(model, "stream_ids", begin)
    options = {"session": None, "color": False}
    with pytest.raises(KeyboardInterrupt):
        Turns(conversation, **options, interactive=False).say("hello")
    turns = Turns(conversation, **options, interactive=True)
    turns.say("hello")
    assert (turns.n, turns.failed, conversation.messages) == (0, True, [])
    assert "[turn 1] stopped before there was an answer" in capsys.readouterr().err


def test_ctrl_c_in_an_answer_waits_for_the_next_piece(model, monkeypatch, capsys):
    """In the middle of a call it would cost the engine all; a second one does not wait."""
    conversation, was_raised = Conversation(model, max_tokens=3), []

    def pieces(*_, **__):
        yield "one "
        for _ in range(n):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                was_raised.append(True)
                raise
        yield "two "
        yield "three"

    monkeypatch.setattr(model, "stream_ids", pieces)
    turns = Turns(conversation, session=None, color=False, interactive=True)
    handler = signal.getsignal(signal.SIGINT)
    n = 1
    turns.say("hello")
    assert (capsys.readouterr().out, was_raised) == ("one two \n", [])
    assert conversation.messages[-1]["content"] == "one two "
    n = 2
    turns.say("hello")
    assert (capsys.readouterr().out, was_raised) == ("one \n", [True])
    assert conversation.messages[-1]["content"] == "one "
    assert (conversation.stopped_by, signal.getsignal(signal.SIGINT)) == ("Ctrl-C", handler)
