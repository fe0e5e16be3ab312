"""`python -m minfer_jax.chat` on a terminal: keys, Ctrl-C, Ctrl-D, colors and the history."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import tiny_models
from tests.helpers.terminal import CTRL_C, CTRL_D, ENTER, ESCAPE, UP, Terminal

pytestmark = [
    pytest.mark.usefixtures("one_compile_cache"),
    pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals"),
]
COMMAND = (sys.executable, "-m", "minfer_jax.chat")
RATE = r"prefill \d+ tokens, generated (\d+) tokens in \d+\.\d\ds \(\d+\.\d tok/s\)"
PROMPT = r">[ \x08]*$"
TALK = r"\n\[turn {}\] " + RATE


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """It never ends by itself; a long context makes time for Ctrl-C."""
    data = tiny_models.endless_text_model(n_layer=2, n_ctx=1 << 17)
    return str(tiny_models.save(tmp_path_factory.mktemp("terminal"), data).path)


def test_a_conversation(path, tmp_path):
    """From the first key to Ctrl-D, and the next day's conversation with its history."""
    session, home = tmp_path / "talk.json", {"HOME": str(tmp_path)}
    argv = [*COMMAND, path, "-n", "8", "--greedy", "--session", str(session), "--color", "off"]
    with Terminal(argv, home) as terminal:
        terminal.expect("Ctrl-D ends the conversation")
        terminal.expect(PROMPT)
        terminal.type("helo", "\x1b[D", "l", ENTER)  # edited: the cursor goes left
        terminal.expect(r"\n(.+)" + TALK.format(1) + r"\n\[turn 1\] stopped by n_predict\n")
        terminal.expect(PROMPT)
        assert json.loads(session.read_text())[0] == {"role": "user", "content": "hello"}

        terminal.type("two", ESCAPE, ENTER, "lines", ENTER)  # Alt-Enter
        terminal.expect(TALK.format(2))
        terminal.expect(PROMPT)
        assert json.loads(session.read_text())[2]["content"] == "two\nlines"

        terminal.type("given up", CTRL_C)
        terminal.expect(PROMPT)
        terminal.type(CTRL_C)
        terminal.expect(r"Ctrl-D or /exit ends the conversation")
        terminal.type("/regen", ENTER)
        terminal.expect(r"\[turn 2\] regen: " + RATE)
        terminal.type("/nonsense", ENTER)
        terminal.expect("no command /nonsense")
        terminal.type(UP, UP, UP, ENTER)
        terminal.expect(TALK.format(3))
        terminal.expect(PROMPT)
        assert json.loads(session.read_text())[4]["content"] == "two\nlines"
        terminal.type(CTRL_D)
        assert terminal.ends() == 0
        terminal.expect(rf"\[session\] saved 6 message\(s\) to {re.escape(str(session))}\n---\n")
        terminal.expect(r"conversation ended after 3 turn\(s\)\n")
        assert terminal.settings_now() == terminal.settings
        assert "Traceback" not in terminal.raw
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.raw), "no colors"

    kept = tmp_path / ".cache/minfer/chat_history"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "given up" not in kept.read_text()
    with Terminal(argv, home) as terminal:
        terminal.expect(r"\[session\] loaded 6 message")
        terminal.expect(
            r"\[session\] (\d+) of \d+ tokens need not be run again: .*\.state has them"
        )
        terminal.expect(r"\[session\] you said: two lines\n\[session\] answered: ")
        terminal.expect(PROMPT)
        terminal.type(UP, ENTER)
        terminal.expect(r"\[turn 1\] prefill \d\d tokens")
        terminal.expect(PROMPT)
        assert len(json.loads(session.read_text())) == 8
        terminal.type("/exit", ENTER)
        assert terminal.ends() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(path, tmp_path):
    """The answer stays as far as it came, and the next turn goes on from there."""
    session = tmp_path / "talk.json"
    argv = [*COMMAND, path, "-n", "-1", "--n-ctx", "100000", "--session", str(session)]
    with Terminal(argv, {"HOME": f"{path}/none", "NO_COLOR": ""}) as terminal:
        terminal.expect(PROMPT)
        terminal.type("hello", ENTER)
        terminal.expect(r"earlier run compiled \.\.\.\n.{20}")
        terminal.type(CTRL_C)
        found = terminal.expect(TALK.format(1) + r"\n\[turn 1\] stopped by Ctrl-C\n")
        terminal.expect(PROMPT)
        assert 0 < int(found[1]) < 90000
        said = json.loads(session.read_text())[1]["content"]
        assert 20 <= len(said) < 500000
        assert said[:20] in terminal.raw
        terminal.type("/stats", ENTER)
        terminal.expect(r"\[stats\] context: \d+ of 100000 tokens")
        terminal.expect(PROMPT)  # or the terminal shows what is typed before the program does
        terminal.type("hello", ENTER)
        terminal.expect(r"hello\s*\n.{20}")
        terminal.type(CTRL_C)
        terminal.expect(r"\[turn 2\] prefill \d\d tokens")  # not all of the first answer
        assert re.search(r"\x1b\[[0-9;]*36m>", terminal.raw), "the prompt is cyan"

        terminal.expect(PROMPT)
        time.sleep(0.2)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ends() == 143
        terminal.expect(r"conversation ended after 2 turn\(s\)")
        assert terminal.settings_now() == terminal.settings, "it can be typed into"
    assert len(json.loads(session.read_text())) == 4


def test_several_lines_and_answers_that_go_elsewhere(path, tmp_path):
    """With -mli an empty line ends the text; the prompt is shown though answers go to a file."""
    answers = tmp_path / "answers.txt"
    argv = [*COMMAND, path, "-n", "8", "--greedy", "-mli", "-st", "--system", "Brief."]
    with open(answers, "wb") as file:
        with Terminal(argv, {"MINFER_CHAT_HISTORY": "off"}, stdout=file.fileno()) as terminal:
            terminal.expect("An empty line ends what you say")
            terminal.expect(PROMPT)
            terminal.type("hello", ENTER, "world", ENTER)
            time.sleep(0.2)
            assert os.path.getsize(answers) == 0
            terminal.type(ENTER)
            terminal.expect(TALK.format(1))
            assert terminal.ends() == 0
    assert re.fullmatch(rb".{8,}\n", answers.read_bytes(), re.DOTALL)
    assert not Path(tmp_path / ".cache").exists()
