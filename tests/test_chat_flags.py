"""The command line of `chat`: what each flag comes to, and how wrong ones are refused."""

import dataclasses
from pathlib import Path

import pytest

from minfer_jax import presets
from minfer_jax.chat_flags import CHAT_FLAGS, FLAGS, Options, help_all, help_text, parse
from minfer_jax.flag_table import HELP_ALL
from minfer_jax.model_flags import ModelOptions
from minfer_jax.usage import UsageError


def options(*argv: str) -> Options:
    return parse(["chat", *argv])


DEFAULTS = options()


def test_without_flags():
    assert isinstance(DEFAULTS.common, ModelOptions)
    assert (DEFAULTS.single_turn, DEFAULTS.multiline, DEFAULTS.color) == (False, False, "auto")
    assert (DEFAULTS.session, DEFAULTS.template_file, DEFAULTS.template_kwargs) == (None, None, {})


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("-st", "single_turn", True),
        ("--single-turn", "single_turn", True),
        ("-mli", "multiline", True),
        ("--multiline-input", "multiline", True),
        ("--color on", "color", "on"),
        ("--color=off", "color", "off"),
        ("--session talk.json", "session", Path("talk.json")),
        ("--chat-template-file t.jinja", "template_file", Path("t.jinja")),
        ('--chat-template-kwargs {"a":[1]}', "template_kwargs", {"a": [1]}),
        ("--enable-thinking", "template_kwargs", {"enable_thinking": True}),
        ("--no-enable-thinking", "template_kwargs", {"enable_thinking": False}),
        ("--noenable-thinking", "template_kwargs", {"enable_thinking": False}),
        (
            '--enable-thinking --chat-template-kwargs {"a":1}',
            "template_kwargs",
            {"a": 1, "enable_thinking": True},
        ),
    ],
)
def test_each_flag_changes_its_field_alone(argv, field, value):
    assert options(*argv.split()) == dataclasses.replace(DEFAULTS, **{field: value})


def test_the_flags_of_every_command():
    found = options(
        "m.gguf", "--temp", "0.5", "-n", "-1", "hello", "--system", "Brief.", "you"
    ).common
    assert (found.model, found.prompt, found.system) == ("m.gguf", "hello you", "Brief.")
    assert (found.sampling.temperature, found.max_tokens) == (0.5, None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no-template"], "there is no flag '--no-template'"),
        (["--color", "maybe"], "expected one of on, off, auto"),
        (["--session", "/dev/null/none/talk.json"], "expected a file in a folder that exists"),
        (["--session", "/"], "expected a file"),
        (["--session", "/dev/null"], "expected a file"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs is no JSON"),
        (["--chat-template-kwargs", "[" * 100000], "--chat-template-kwargs is no JSON"),
        (["--chat-template-kwargs", "[1]"], "is no JSON object"),
        (["--chat-template-kwargs", '{"messages": []}'], "sets messages"),
        (["--chat-template-kwargs", '{"add_generation_prompt": 1}'], "sets add_generation_prompt"),
        (["--enable-thinking", "--no-enable-thinking"], "give one of them"),
        (["-n", "-2"], "--n-predict is -2"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(argv, message):
    with pytest.raises(UsageError) as caught:
        options(*argv)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_help_fits_a_terminal():
    lines = help_text().splitlines()
    assert lines[0] == "usage: python -m minfer_jax.chat [flags] [MODEL] [FIRST WORDS]"
    assert len(lines) <= 40
    assert max(map(len, [*lines, *help_all().splitlines()])) <= 80


def test_help_names_every_flag():
    short = [*CHAT_FLAGS, *(flag for flag in FLAGS if flag.main), HELP_ALL]
    for text, flags in ((help_text(), short), (help_all(), FLAGS)):
        rows = [line for line in text.splitlines() if line.startswith("  -")]
        assert len(rows) == len(flags)
        for flag in flags:
            assert [row for row in rows if f"--{flag.name} " in row and flag.text in row], flag


def test_a_preset_and_first_words_from_a_file(tmp_path):
    (tmp_path / "first.txt").write_bytes(b"Good\r\nmorning.\r\n")
    found = options("--config", "chat", "-f", str(tmp_path / "first.txt"), "--top-p", "1").common
    preset = presets.load("chat")
    assert found.prompt == "Good\nmorning."
    assert found.sampling.temperature == preset.generate["temperature"]
    assert (found.sampling.top_p, found.n_ctx) == (1.0, preset.load["n_ctx"])
    with pytest.raises(UsageError, match="no preset 'talk'"):
        options("--config", "talk")
