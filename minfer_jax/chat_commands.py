"""The commands of a conversation: what a line that begins with / does."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from minfer_jax.chat_turns import Turns, note
from minfer_jax.command import say

_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
_NONE = "-"  # for no system message


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        usage: how it is written.
        text: what it does.
        run: does it, given what follows its name; None ends the conversation.
        is_turn: whether it is answered by the model.
        takes_text: whether anything may follow its name.
    """

    usage: str
    text: str
    run: Callable[[Turns, str], None] | None
    is_turn: bool = False
    takes_text: bool = False


def _clear(turns: Turns, argument: str) -> None:
    turns.conversation.clear()
    say("[history cleared]")


def _system(turns: Turns, argument: str) -> None:
    conversation = turns.conversation
    if argument:
        try:
            conversation.set_system("" if argument == _NONE else argument)
        except ValueError as e:
            note("error", str(e))
            return
    found = [m["content"] for m in conversation.messages if m["role"] == "system"]
    note("system", found[0] if found else "none")


def _stats(turns: Turns, argument: str) -> None:
    engine, stats = turns.conversation.model.engine, turns.conversation.model.stats
    note("stats", f"{len(turns.conversation.messages)} messages, {turns.n} turn(s) answered here")
    note("stats", f"context: {len(engine.tokens)} of {engine.n_ctx} tokens")
    note(
        "stats",
        f"latest prompt: {stats.n_prompt} tokens, {stats.n_reused} of them reused, "
        f"{stats.n_prefilled} run in {stats.prefill_seconds:.2f}s ({stats.prefill_rate:.1f} tok/s)",
    )
    note(
        "stats",
        f"latest answer: {stats.n_generated} tokens in {stats.decode_seconds:.2f}s "
        f"({stats.decode_rate:.1f} tok/s)",
    )
    note("stats", f"{len(engine.compiles)} programs compiled in {engine.compile_seconds:.2f}s")


def _help(turns: Turns, argument: str) -> None:
    for command in COMMANDS.values():
        say(f"  {command.usage:<16}{command.text}")
    say(_KEYS)


_KEYS = """\
  //...           say what follows the first slash; /etc/hosts needs none more
  Alt-Enter       another line; with --multiline-input it ends what you say,
                  as an empty line does
  Ctrl-C          stops the answer, or gives the line up
  Ctrl-D          ends the conversation"""

COMMANDS = {
    "exit": Command(usage="/exit, /quit", text="end the conversation", run=None),
    "clear": Command(usage="/clear", text="forget all but the system message", run=_clear),
    "regen": Command(
        usage="/regen",
        text="answer once more",
        run=lambda turns, _: turns.regenerate(),
        is_turn=True,
    ),
    "system": Command(
        usage="/system [TEXT]",
        text="show or change the system message; - for none",
        run=_system,
        takes_text=True,
    ),
    "stats": Command(usage="/stats", text="what the latest answer took", run=_stats),
    "help": Command(usage="/help", text="this", run=_help),
}
_ALIASES = {"quit": "exit"}


def split(text: str) -> tuple[str | None, str]:
    """Tell a command from words.

        "/system Be brief."  ->  "system", "Be brief."
        "/etc/hosts is?"     ->  None, "/etc/hosts is?"
        "//clear"            ->  None, "/clear"

    Args:
        text: what the user has typed.

    Returns:
        The name of a command, known or not, and what follows it; or None and what the user says.
    """
    text = text.strip("\n")
    if found := _COMMAND.fullmatch(text.strip()):
        name = found[1].lower()
        return _ALIASES.get(name, name), (found[2] or "").strip()
    return None, text[1:] if text.startswith("//") else text
