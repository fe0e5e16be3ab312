"""`python -m minfer_jax.chat` through pipes: what goes to which stream, and the exit statuses."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minfer_jax import chat, chat_input, chat_session, conversation
from minfer_jax.chat_commands import COMMANDS, split
from minfer_jax.chat_flags import help_text
from minfer_jax.conversation import Conversation
from minfer_jax.language_model import LanguageModel, load
from minfer_jax.usage import UsageError
from tests.helpers import tiny_models
from tests.helpers.ran import Ran

pytestmark = pytest.mark.usefixtures("one_compile_cache", "logging_as_it_was")
COMMAND = (sys.executable, "-m", "minfer_jax.chat")
RATE = r"prefill \d+ tokens, generated \d+ tokens in \d+\.\d\ds \(\d+\.\d tok/s\)"
SMALL = ("--n-ctx", "256")  # one size, so that what is compiled serves all
SHORT = (*SMALL, "--greedy", "-n", "8")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """It never ends by itself, and writes what is seen on a screen."""
    data = tiny_models.endless_text_model(n_layer=2, n_ctx=4096)
    return str(tiny_models.save(tmp_path_factory.mktemp("models"), data).path)


@pytest.fixture(scope="module")
def model(path) -> LanguageModel:
    return load(path, n_ctx=256)


@pytest.fixture
def run(capsys, monkeypatch, path):
    """Runs the command in this process, with what is typed in."""

    def call(typed: str | bytes, *argv: str, model: str = path) -> Ran:
        data = typed.encode() if isinstance(typed, str) else typed
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        capsys.readouterr()
        status = chat.main(["chat", model, *argv])
        return Ran(status, *capsys.readouterr())

    return call


@pytest.fixture
def answers(model):
    """What a conversation answers, on its own."""

    def call(*texts: str, **options) -> list[str]:
        model.engine.forget()
        conversation = Conversation(model, **{"max_tokens": 8, "temperature": 0.0, **options})
        return ["".join(conversation.say(text)) for text in texts]

    return call


def lines(*texts: str) -> str:
    return "".join(f"{text}\n" for text in texts)


# Answers


def test_every_line_is_a_turn(run, answers):
    ran = run("hello\n\nworld\r\nhello world", *SHORT)
    assert (ran.status, ran.out) == (0, lines(*answers("hello", "world", "hello world")))
    for n in (1, 2, 3):
        assert len(re.findall(rf"^\[turn {n}\] {RATE}$", ran.err, re.MULTILINE)) == 1
        assert f"[turn {n}] stopped by n_predict\n" in ran.err
    assert ran.err.endswith("---\nconversation ended after 3 turn(s)\n")
    assert "> " not in ran.out
    assert "> " not in ran.err.replace("-> ", "")


def test_flags_count(run, answers):
    options = {"system": "Brief.", "temperature": 1.5, "seed": 5, "stop": ["e"]}
    argv = "--system Brief. --temp 1.5 --seed 5 --stop e -n 8".split()
    assert run("hello\nworld\n", *SMALL, *argv).out == lines(*answers("hello", "world", **options))


def test_the_first_words_and_a_single_turn(run, answers):
    first, second = answers("hello you", "world")
    assert run("world\n", "hello", "you", *SHORT).out == lines(first, second)
    assert run("world\n", "hello", "you", *SHORT, "-st").out == lines(first)
    assert run("\n/help\nhello you\nworld\n", *SHORT, "-st").out == lines(first)


def test_several_lines_make_a_turn(run, answers):
    typed = "\nhello\nworld\n\n\nhello\n"
    assert run(typed, *SHORT, "-mli").out == lines(*answers("hello\nworld", "hello"))


@pytest.mark.parametrize("typed", ["", "\n", " \n", "/exit\nhello\n", "/quit"])
def test_nothing_to_answer(run, typed):
    ran = run(typed, *SHORT)
    assert (ran.status, ran.out) == (0, "")
    assert ran.err.endswith("---\nconversation ended after 0 turn(s)\n")


def test_without_a_standard_input(run, monkeypatch, path, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert chat.main(["chat", path]) == 0
    assert capsys.readouterr().out == ""


def test_bytes_that_are_no_text(run, answers):
    assert run(b"caf\xe9\n", *SHORT).out == lines(*answers("caf\ufffd"))


def test_more_than_can_be_read(monkeypatch):
    monkeypatch.setattr(chat_input, "_LONGEST", 10)
    for multiline in (False, True):
        with pytest.raises(UsageError, match="more than 10 bytes"):
            chat_input.lines(io.BytesIO(b"hello\n" * 3 + b"x" * 11), multiline=multiline)()
            chat_input.lines(io.BytesIO(b"x" * 11), multiline=multiline)()


# Commands


@pytest.mark.parametrize(
    ("typed", "name", "rest"),
    [
        ("hello", None, "hello"),
        ("/exit", "exit", ""),
        ("/quit", "exit", ""),
        (" /CLEAR ", "clear", ""),
        ("/system Be  brief. ", "system", "Be  brief."),
        ("/system two\nlines", "system", "two\nlines"),
        ("/etc", "etc", ""),
        ("/etc/hosts", None, "/etc/hosts"),
        ("/etc/hosts is?", None, "/etc/hosts is?"),
        ("//clear", None, "/clear"),
        ("/", None, "/"),
        ("/ a", None, "/ a"),
        ("1/2", None, "1/2"),
        ("/2x", None, "/2x"),
    ],
)
def test_what_is_a_command(typed, name, rest):
    assert split(typed) == (name, rest)


def test_commands(run, answers):
    first, second, third = answers("hello", "world", "/regen")
    ran = run("hello\n/help\n/nonsense\n/stat\nworld\n/stats\n//regen\n/regen\n", *SHORT)
    assert ran.out == lines(first, second, third, third)
    for command in COMMANDS.values():
        assert command.usage in ran.err
    assert all(len(line) < 80 for line in ran.err.splitlines() if line.startswith("  "))
    assert "no command /nonsense: /help lists them, and //nonsense says it\n" in ran.err
    assert "no command /stat (did you mean '/stats'?): /help lists them" in ran.err
    assert re.search(r"^\[stats\] latest answer: 8 tokens in ", ran.err, re.MULTILINE)
    assert re.search(rf"^\[turn 3\] regen: {RATE}$", ran.err, re.MULTILINE)
    assert "ended after 3 turn(s)" in ran.err
    ran = run("hello\n/clear\nhello\n/system\n/system Brief.\nhello\n/system -\n", *SHORT)
    (other,) = answers("hello", system="Brief.")[:1]
    assert ran.out.startswith(lines(first, first))
    assert ran.err.count("[history cleared]\n") == 1
    assert [line for line in ran.err.splitlines() if line.startswith("[system]")] == [
        "[system] none",
        "[system] Brief.",
        "[system] none",
    ]
    assert run("/system Brief.\nhello\n", *SHORT).out == lines(other)


def test_nothing_to_regenerate(run):
    ran = run("/regen\n", *SHORT)
    assert (ran.status, ran.out) == (0, "")
    assert "[error] there is no answer yet that could be regenerated\n" in ran.err
    assert "Compiling" not in ran.err


def test_words_after_a_command_are_not_lost(run, answers):
    ran = run("/exit strategies?\n/clear it\n//exit strategies?\n", *SHORT)
    assert ran.out == lines(*answers("/exit strategies?"))
    for name in ("exit", "clear"):
        assert f"/{name} takes no words: without them it is a command, and //{name} " in ran.err


# Templates and contexts


def test_a_template_from_a_file(run, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}"
        "{% if messages[-1].content == word %}{{ raise_exception('Not this word.') }}{% endif %}"
        + tiny_models.CHAT_TEMPLATE
    )
    argv = ("--chat-template-file", str(template), "--chat-template-kwargs", '{"word": "world"}')
    ran = run("hello\nworld\n/system x\nhello\n", *SHORT, *argv, "--system", "Brief.")
    assert (ran.status, ran.out.count("\n")) == (0, 2)
    assert [line for line in ran.err.splitlines() if line.startswith("[error]")] == [
        "[error] no system message: No system role.",
        "[error] Not this word.",
        "[error] No system role.",
    ]
    assert "ended after 2 turn(s)" in ran.err
    assert run("world\n", *SHORT, *argv, "-st").status == 1
    template.write_text("{% if %}")
    assert "error: chat template, line 1" in run("hello\n", *argv).err
    template.write_text("")
    assert (run("hello\n", *argv).status, run("hello\n", *argv[:1], "/no/such").status) == (2, 2)


def test_variables_may_have_any_name(run):
    """Those of the functions on the way to the template too."""
    names = {"self": 1, "template": 1, "tokenizer": 1, "tools": 1}
    ran = run("hello\n", *SHORT, "--chat-template-kwargs", json.dumps(names))
    assert (ran.status, ran.out) == (0, "")
    assert "[error] tools is a int; a list of dicts is expected\n" in ran.err
    del names["tools"]
    ran = run("hello\n", *SHORT, "--chat-template-kwargs", json.dumps(names))
    assert ran.out.count("\n") == 1


def test_thoughts_are_gray_where_there_is_color(run, tmp_path):
    template = tmp_path / "thinking.jinja"
    template.write_text(
        tiny_models.CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>' }}")
    )
    argv = (*SHORT, "--chat-template-file", str(template))
    plain = run("hello\n", *argv).out
    assert run("hello\n", *argv, "--color", "off").out == plain
    colored = run("hello\n", *argv, "--color", "on").out
    assert colored != plain
    assert re.sub(r"\x1b\[(90|0)m", "", colored) == plain
    assert colored.startswith("\x1b[90m")
    assert colored.endswith("\x1b[0m\n")


def test_oldest_turns_are_dropped(run):
    ran = run("hello world\n" * 12, *SMALL, "--greedy", "-n", "40")
    assert (ran.status, ran.out.count("\n")) == (0, 12)
    assert re.search(r"^\[turn \d+\] <<context full: dropped oldest \d turn\(s\)>>$", ran.err, re.M)
    ran = run("hello\n" + "x" * 300 + "\nhello\n", *SHORT)
    assert (ran.status, ran.out.count("\n")) == (0, 2)
    assert re.search(r"^\[error\] context full: \d+ tokens are needed and 256", ran.err, re.M)


# The session


def test_a_session_is_taken_up(run, answers, tmp_path):
    path = tmp_path / "talk.json"
    argv = (*SHORT, "--session", str(path))
    ran = run("hello\n", *argv, "--system", "Brief.")
    assert ran.err.endswith(f"[session] saved 3 message(s) to {path}\n---\n" + LEAVE)
    assert Path(f"{path}.state").exists()
    ran = run("world\n", *argv)
    assert ran.out == lines(answers("hello", "world", system="Brief.")[1])
    assert f"[session] loaded 3 message(s) from {path}\n" in ran.err
    assert [m["role"] for m in json.loads(path.read_text())] == [
        "system",
        *("user", "assistant") * 2,
    ]
    ran = run("", *argv, "--system", "Other.")
    assert re.search(r"\[session\] you said: world\n\[session\] answered: .+\n", ran.err)
    assert "[session] --system takes the place of its system message\n" in ran.err
    assert json.loads(path.read_text())[0]["content"] == "Other."
    assert Path(f"{path}.state").exists(), "what was not used is not thrown away"
    Path(f"{path}.state").unlink()
    assert run("/regen\n", *argv).status == 0
    assert Path(f"{path}.state").exists()
    ran = run("/clear\n", *argv)
    assert [m["role"] for m in json.loads(path.read_text())] == ["system"]
    assert not Path(f"{path}.state").exists()


LEAVE = "conversation ended after 1 turn(s)\n"


def test_what_is_dropped_from_the_context_stays_in_the_session(run, tmp_path):
    path = tmp_path / "talk.json"
    argv = (*SHORT, "--session", str(path))
    run("hello world\n" * 12, *argv, "--system", "Brief.")
    messages = json.loads(path.read_text())
    assert [m["role"] for m in messages] == ["system", *("user", "assistant") * 12]
    dropped = [m.get("dropped", False) for m in messages]
    n = sum(dropped)
    assert dropped == [False] + [True] * n + [False] * (24 - n)
    assert 0 < n < 24
    ran = run("hello\n", *argv)
    found = re.search(r"\[session\] (\d+) of (\d+) tokens need not be ", ran.err)
    assert found and int(found[1]) > int(found[2]) // 2, "the state fits what is left"
    assert len(json.loads(path.read_text())) == 27
    run("/clear\n", *argv)
    assert len(json.loads(path.read_text())) == 1


def test_a_long_session_in_a_short_context(run, tmp_path, monkeypatch):
    """Thousands of turns are not dropped one by one."""
    path, rendered = tmp_path / "talk.json", []
    turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    path.write_text(json.dumps(turn * 3000))
    render = conversation.render_messages
    monkeypatch.setattr(
        conversation, "render_messages", lambda *a, **o: rendered.append(0) or render(*a, **o)
    )
    ran = run("hello\n", *SHORT, "--session", str(path))
    assert re.search(r"<<context full: dropped oldest 29\d\d turn\(s\)>>", ran.err)
    assert len(rendered) < 20
    assert len(json.loads(path.read_text())) == 6002


def test_a_session_that_ends_with_a_question(run, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text('[{"role": "user", "content": "hello"}]')
    ran = run("/regen\n", *SHORT, "--session", str(path))
    assert "[session] the last one has no answer: /regen gives one\n" in ran.err
    assert [m["role"] for m in json.loads(path.read_text())] == ["user", "assistant"]
    assert "/regen" not in run("", *SHORT, "--session", str(path)).err


def test_another_program_writes_to_the_session(run, tmp_path, monkeypatch):
    path = tmp_path / "talk.json"

    def typed(stream, *, multiline):
        def read():
            path.write_text("[]")
            return next(texts, None)

        return read

    texts = iter(["hello", "world"])
    monkeypatch.setattr(chat_input, "lines", typed)
    ran = run("", *SHORT, "--session", str(path))
    told = f"[session] another program has written to {path}: from here on {path}.2\n"
    assert ran.err.count(told) == 1
    assert f"[session] saved 4 message(s) to {path}.2\n" in ran.err
    assert (path.read_text(), len(json.loads(Path(f"{path}.2").read_text()))) == ("[]", 4)
    assert sorted(os.listdir(tmp_path)) == ["talk.json", "talk.json.2", "talk.json.2.state"]


def test_a_damaged_session_is_not_lost(run, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text("[{]")
    Path(f"{path}.state").write_text("")
    ran = run("", *SHORT, "--session", str(path))
    assert ran.status == 0
    assert "saved" not in ran.err
    assert Path(f"{path}.state").exists()
    assert f"[session] ignoring unreadable {path}: " in ran.err
    assert path.read_text() == "[{]"
    run("hello\n", *SHORT, "--session", str(path))
    assert len(json.loads(path.read_text())) == 2
    assert Path(f"{path}.bad").read_text() == "[{]"


def test_a_session_that_cannot_be_written(run, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(chat_session.whole_file, "replacing", _full)
    ran = run("hello\nworld\n", *SHORT, "--session", str(folder / "talk.json"))
    assert (ran.status, ran.out.count("\n")) == (0, 2)
    assert "talk.json cannot be written (No space left on device)\n" in ran.err
    assert "saved" not in ran.err


def _full(*_, **__):
    raise OSError(28, "No space left on device")


# Ctrl-C


def test_ctrl_c_keeps_the_session(run, monkeypatch, tmp_path):
    path, texts = tmp_path / "talk.json", ["hello"]

    def lines(stream, *, multiline):
        def read():
            if texts:
                return texts.pop()
            raise KeyboardInterrupt

        return read

    monkeypatch.setattr(chat_input, "lines", lines)
    ran = run("", *SHORT, "--session", str(path))
    assert (ran.status, ran.out.count("\n")) == (130, 1)
    assert len(json.loads(path.read_text())) == 2
    assert ran.err.endswith(f"---\n{LEAVE}\ninterrupted\n")


# Wrong usage, and the rest


def test_help_and_wrong_usage(run):
    assert run("", "--help") == Ran(0, help_text(), "")
    ran = run("", "--nonsense")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert run("", model="/no/such/model.gguf").status == 1


def test_ctrl_c_between_prompt_and_answer_is_nothing(run, monkeypatch):
    """As where a line was just typed, or a command answers."""
    typed = iter(["hello", "/stats", "/nonsense", "hello", None])

    def read() -> str | None:
        signal.raise_signal(signal.SIGINT)
        return next(typed)

    monkeypatch.setattr(chat_input, "is_interactive", lambda: True)
    monkeypatch.setattr(chat_input, "terminal", lambda **_: read)
    before = signal.getsignal(signal.SIGINT)
    ran = run("", *SHORT)
    assert ran.status == 0 and "conversation ended after 2 turn(s)" in ran.err
    assert signal.getsignal(signal.SIGINT) is before


def test_no_editing_where_nobody_types(path):
    """A process of its own: a pipe in, a closed pipe out; the terminal's library is not loaded."""
    code = (
        "import sys; from minfer_jax import chat\n"
        f"status = chat.main(['chat', {path!r}, '-n', '2', '--n-ctx', '256'])\n"
        "assert 'prompt_toolkit' not in sys.modules\n"
        "sys.exit(status)"
    )
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(1), "an answer comes while the pipe is open"
        process.stdout.close()
        process.stdin.write(b"hello\n" * 5)
        process.stdin.close()
        err = process.stderr.read()
        assert process.wait(60) == 0, err
    assert b"Traceback" not in err
    assert b"error" not in err
    assert b"conversation ended after" in err
    assert os.environ.get("MINFER_CHAT_HISTORY") is None
