"""What the user says next: from a terminal, or from a pipe."""

import sys
from collections.abc import Callable
from typing import BinaryIO

from minfer_jax.command import say
from minfer_jax.usage import UsageError

Reader = Callable[[], str | None]  # None at the end

_LONGEST = 64 << 20  # bytes of what is said at once
_CYAN = "ansicyan"


def is_interactive() -> bool:
    """Whether someone types and sees it."""
    outputs = (sys.stdout, sys.stderr)
    return bool(sys.stdin and sys.stdin.isatty()) and any(s.isatty() for s in outputs)


def terminal(*, multiline: bool, color: bool) -> Reader:
    """Reads from the terminal, with editing and a history.

    Args:
        multiline: Enter begins another line, and ends the text only on an empty one; Alt-Enter ends
            it anywhere. Otherwise the two keys do the opposite.
        color: whether the prompt is colored.
    """
    # Not needed elsewhere, and 0.1 s to import.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.output.defaults import create_output

    from minfer_jax.prompt_history import open_history

    keys = KeyBindings()

    def end(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    def line_or_end(event: KeyPressEvent) -> None:
        empty = not event.current_buffer.document.current_line.strip()
        (end if empty else another_line)(event)

    keys.add("enter")(line_or_end if multiline else end)
    keys.add("escape", "enter")(end if multiline else another_line)
    session: PromptSession[str] = PromptSession(
        [(_CYAN if color else "", "> ")],
        multiline=True,
        key_bindings=keys,
        history=open_history(),
        enable_history_search=True,
        enable_suspend=True,
        color_depth=None if color else ColorDepth.DEPTH_1_BIT,
        output=create_output(always_prefer_tty=True),
    )

    def read() -> str | None:
        interrupted = 0
        while True:
            try:
                text = session.prompt()
            except KeyboardInterrupt:  # the line is given up
                interrupted += 1
                if interrupted > 1:
                    say("(Ctrl-D or /exit ends the conversation)")
            except EOFError:
                return None
            else:
                return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    return read


def lines(stream: BinaryIO | None, *, multiline: bool) -> Reader:
    """Reads from a pipe or a file.

    Args:
        stream: of UTF-8; None is at its end already.
        multiline: a text goes on up to an empty line; otherwise every line is one.
    """

    def read() -> str | None:
        block: list[str] = []
        left = _LONGEST
        while raw := stream.readline(left + 1) if stream else b"":
            left -= len(raw)
            if left < 0:
                raise UsageError(f"more than {_LONGEST} bytes on standard input at once; give less")
            line = raw.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
            if not multiline:
                return line
            if line.strip():
                block.append(line)
            elif block:
                break
        return "\n".join(block) if block else None

    return read
