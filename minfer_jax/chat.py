"""`python -m minfer_jax.chat [MODEL] [FIRST WORDS]`: a conversation.

Standard output carries the answers alone; everything else goes to standard error.
"""

import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # what a start makes stays: to search it for garbage takes 0.2 s, and finds none

from absl import app

from minfer_jax import chat_input
from minfer_jax.chat_commands import COMMANDS, split
from minfer_jax.chat_flags import Options, help_all, help_text, parse
from minfer_jax.chat_session import SessionError, SessionFile
from minfer_jax.chat_template import ChatTemplate, ChatTemplateError
from minfer_jax.chat_turns import Turns, note, on_signal, remind
from minfer_jax.command import guarded, keep_arguments, leave, say, with_flags
from minfer_jax.conversation import Conversation, Message
from minfer_jax.model.config import MAX_POSITIONS
from minfer_jax.model_command import loaded, opened
from minfer_jax.nearest import did_you_mean
from minfer_jax.prompt import template_of
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.usage import UsageError

_LONGEST_TEMPLATE = 1 << 20  # bytes
_TERMINATED = 128 + signal.SIGTERM  # exit status


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and positional arguments.

    Returns:
        The exit status: 0 where the conversation was ended, 1 for a model that cannot be run or a
        single turn that fails, 2 for wrong usage, 130 for Ctrl-C, 143 where it was terminated.
    """
    return guarded(lambda: with_flags(argv, help_text, parse, run, help_all))


def run(options: Options) -> int:
    """Hold a conversation; see `main`."""
    common = options.common
    file, _ = opened(common)
    tokenizer = Tokenizer.from_gguf(file)
    template = _read_template(options, tokenizer) or template_of(file, tokenizer)
    session = SessionFile(options.session) if options.session else None
    messages = _load(session, options) if session else []
    model = loaded(file, tokenizer, common, common.n_ctx)
    conversation = Conversation(
        model,
        messages=messages,
        template=template,
        template_kwargs=options.template_kwargs,
        max_tokens=MAX_POSITIONS if common.max_tokens is None else common.max_tokens,
        stop=common.stop,
        **dataclasses.asdict(common.sampling),
    )
    if common.system is not None:
        _set_system(conversation, common.system)
    if session and messages and (came := session.restore_state(conversation)):
        note("session", came)
    remind(messages, color=_has_color(options.color))
    gc.freeze()
    gc.enable()
    return _converse(conversation, options, session)


def _converse(conversation: Conversation, options: Options, session: SessionFile | None) -> int:
    interactive, color = chat_input.is_interactive(), _has_color(options.color)
    turns = Turns(conversation, session=session, color=color, interactive=interactive)
    try:
        # Ctrl-C is a key where a line is typed, and stops an answer; between the two it is nothing.
        with (
            on_signal(signal.SIGTERM, _unwind),
            on_signal(signal.SIGINT, lambda number, frame: None, interactive),
        ):
            if interactive:
                say("Ctrl-D ends the conversation, /help lists commands.")
                if options.multiline:
                    say("An empty line ends what you say.")
                read = chat_input.terminal(multiline=options.multiline, color=color)
            else:
                stream = sys.stdin.buffer if sys.stdin else None
                read = chat_input.lines(stream, multiline=options.multiline)
            text = options.common.prompt if options.common.prompt is not None else read()
            while text is not None and _goes_on(turns, text, options.single_turn):
                text = read()
    except SystemExit:
        return _TERMINATED
    finally:
        turns.end()
    return int(options.single_turn and turns.failed)


def _goes_on(turns: Turns, text: str, single_turn: bool) -> bool:
    """Do what the user has typed; whether there may be more."""
    name, rest = split(text)
    if name is None:
        if rest.strip():
            turns.say(rest)
        return not (single_turn and rest.strip())
    if name not in COMMANDS:
        meant = did_you_mean(f"/{name}", [f"/{known}" for known in COMMANDS])
        say(f"no command /{name}{meant}: /help lists them, and //{name} says it")
        return True
    command = COMMANDS[name]
    if rest and not command.takes_text:
        say(f"/{name} takes no words: without them it is a command, and //{name} ... says it")
        return True
    if command.run is None:
        return False
    command.run(turns, rest)
    return not (single_turn and command.is_turn)


def _load(session: SessionFile, options: Options) -> list[Message]:
    """The messages of the session, as far as there are any."""
    try:
        messages = session.load()
    except SessionError as e:
        note("session", f"ignoring unreadable {session.path}: {e}")
        return []
    if messages is None:
        return []
    note("session", f"loaded {len(messages)} message(s) from {session.path}")
    if messages and messages[-1]["role"] == "user":
        note("session", "the last one has no answer: /regen gives one")
    if options.common.system is not None and any(m["role"] == "system" for m in messages):
        note("session", "--system takes the place of its system message")
    return messages


def _read_template(options: Options, tokenizer: Tokenizer) -> ChatTemplate | None:
    path = options.template_file
    if path is None:
        return None
    if not path.is_file():
        raise UsageError(f"--chat-template-file is {str(path)!r}, expected a file that is there")
    with open(path, "rb") as file:
        source = file.read(_LONGEST_TEMPLATE + 1)
    if not source.strip() or len(source) > _LONGEST_TEMPLATE:
        raise UsageError(f"{path} has {len(source)} bytes, expected 1 to {_LONGEST_TEMPLATE}")
    return ChatTemplate(
        source.decode("utf-8", "replace"),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def _set_system(conversation: Conversation, text: str) -> None:
    try:
        conversation.set_system(text)
    except ChatTemplateError as e:
        note("error", f"no system message: {e}")


def _has_color(wanted: str) -> bool:
    if wanted != "auto":
        return wanted == "on"
    return sys.stdout.isatty() and sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    """On SIGTERM: the terminal is put right and the conversation kept."""
    raise SystemExit(_TERMINATED)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.run(lambda argv: leave(lambda: main(argv)), flags_parser=keep_arguments)
