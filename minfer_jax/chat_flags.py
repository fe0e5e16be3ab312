"""The flags of `python -m minfer_jax.chat`, and what they come to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_jax.adapter_flags import ADAPTER_FLAGS
from minfer_jax.flag_table import HELP_ALL, Flag, help_rows
from minfer_jax.model_flags import (
    ANSWER_FLAGS,
    LOAD_FLAGS,
    MODEL_FLAGS,
    ModelOptions,
    grouped_help,
    help_of,
    model_options,
    read,
)
from minfer_jax.sampling_flags import SAMPLING_FLAGS
from minfer_jax.usage import UsageError

COLORS = ("on", "off", "auto")
_TAKEN = ("messages", "add_generation_prompt")  # variables that are the conversation's own

CHAT_FLAGS = (
    Flag(name="single-turn", kind=bool, text="leave after one answer", default=False, short="st"),
    Flag(
        name="multiline-input",
        kind=bool,
        text="an empty line ends what you say, not each line",
        default=False,
        short="mli",
    ),
    Flag(name="session", kind=str, text="keep the conversation in this file, and take it up"),
    Flag(
        name="color",
        kind=str,
        text="on, off or auto: where both outputs are terminals",
        default="auto",
        choices=COLORS,
    ),
    Flag(name="chat-template-file", kind=str, text="a jinja template in place of the model's"),
    Flag(name="chat-template-kwargs", kind=str, text="variables for the template, a JSON object"),
    Flag(name="enable-thinking", kind=bool, text="the template's variable, true"),
    Flag(name="no-enable-thinking", kind=bool, text="the same, false", default=False),
)
FLAGS = (*CHAT_FLAGS, *MODEL_FLAGS)

_TEXT = """\
usage: python -m minfer_jax.chat [flags] [MODEL] [FIRST WORDS]

A conversation. On a terminal, lines can be edited and recalled, Alt-Enter
begins another line, Ctrl-C stops an answer and Ctrl-D ends; /help lists the
commands. Otherwise each line of standard input is answered on standard output.
MODEL is a GGUF file, a cached name, or an alias ({aliases}) [{default}].

  python -m minfer_jax.chat smollm2 --system "Be brief."
  python -m minfer_jax.chat ./model.gguf --session talk.json "Good morning."
  python -m minfer_jax.chat smollm2 --greedy < questions.txt > answers.txt

{flags}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        common: the model, and how to draw from it; `prompt` is what the user says first.
        single_turn: leave after one answer.
        multiline: an empty line ends what the user says.
        session: where the conversation is kept, or None.
        color: one of COLORS.
        template_file: a chat template in place of the model's, or None.
        template_kwargs: variables for the template.
    """

    common: ModelOptions
    single_turn: bool
    multiline: bool
    session: Path | None
    color: str
    template_file: Path | None
    template_kwargs: Mapping[str, Any]


def help_text() -> str:
    """Usage, examples and the flags that most people want."""
    flags = [*CHAT_FLAGS, *(flag for flag in MODEL_FLAGS if flag.main), HELP_ALL]
    return help_of(_TEXT, help_rows(flags))


def help_all() -> str:
    """Usage, examples, all flags and the presets."""
    groups = (
        ("The conversation", CHAT_FLAGS),
        ("The answers", ANSWER_FLAGS),
        ("Sampling", SAMPLING_FLAGS),
        ("The model", LOAD_FLAGS),
        ("Adapters", ADAPTER_FLAGS),
    )
    return help_of(_TEXT, grouped_help(groups))


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the program's name, then flags and positional arguments in any order.

    Raises:
        UsageError: a flag is unknown or a value out of its range.
    """
    value, positional = read(FLAGS, argv)
    session, template_file = _path(value["session"]), _path(value["chat-template-file"])
    if session is not None and not _can_be_file(session):
        raise UsageError(f"--session is {str(session)!r}, expected a file in a folder that exists")
    return Options(
        common=model_options(value, positional),
        single_turn=value["single-turn"],
        multiline=value["multiline-input"],
        session=session,
        color=value["color"],
        template_file=template_file,
        template_kwargs=_template_kwargs(value),
    )


def _can_be_file(path: Path) -> bool:
    return path.is_file() or (not path.exists() and path.parent.is_dir())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


def _template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    text = value["chat-template-kwargs"]
    try:
        found = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"--chat-template-kwargs is no JSON ({e})") from None
    if not isinstance(found, dict):
        raise UsageError('--chat-template-kwargs is no JSON object, such as {"name": true}')
    for name in _TAKEN:
        if name in found:
            raise UsageError(f"--chat-template-kwargs sets {name}, which the conversation sets")
    if value["no-enable-thinking"] and value["enable-thinking"]:
        raise UsageError("--enable-thinking and --no-enable-thinking: give one of them")
    if value["no-enable-thinking"]:
        found["enable_thinking"] = False
    elif value["enable-thinking"] is not None:
        found["enable_thinking"] = value["enable-thinking"]
    return found
