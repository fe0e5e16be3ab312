"""The turns of a conversation as a user sees them: answers on standard output, the rest beside it.

[turn 2] <<context full: dropped oldest 3 turn(s)>>
[turn 2] prefill 30 tokens, generated 12 tokens in 0.05s (240.0 tok/s)
[turn 2] stopped by n_predict
"""

import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from minfer_jax.chat_session import SessionError, SessionFile
from minfer_jax.command import say, shown
from minfer_jax.conversation import Conversation, Message
from minfer_jax.gguf_header import one_line
from minfer_jax.thinking import CLOSE, ThinkingSplitter

_GRAY, _PLAIN = "\033[90m", "\033[0m"
_REMINDED = 60  # characters of what was said


class Turns:
    """Answers, reports, and keeps the conversation.

    Attributes:
        conversation: what is talked about.
        n: answers to what the user has said.
        failed: whether the latest turn has.
    """

    def __init__(
        self,
        conversation: Conversation,
        *,
        session: SessionFile | None,
        color: bool,
        interactive: bool,
    ) -> None:
        """Answers nothing yet.

        Args:
            conversation: what is talked about.
            session: where it is kept, or None.
            color: whether thoughts are gray.
            interactive: whether Ctrl-C stops an answer and not the program. Whoever asks for turns
                then says what it does between them.
        """
        self.conversation = conversation
        self.n = 0
        self.failed = False
        self._session = session
        self._color = color
        self._interactive = interactive
        self._told = False

    def say(self, text: str) -> None:
        """Answer what the user says."""
        done = self.conversation.n_turns
        try:
            self._turn(self.n + 1, "", lambda: self.conversation.say(text))
        finally:  # one that SIGTERM cuts counts too, as it is kept
            self.n += self.conversation.n_turns - done

    def regenerate(self) -> None:
        """Answer once more what the user said last."""
        self._turn(max(self.n, 1), "regen: ", self.conversation.regenerate)

    def end(self) -> None:
        """Keep what there is to keep, and take leave."""
        session, conversation = self._session, self.conversation
        if session is not None and self._save() and session.saved is not None:
            nothing_said = all(m["role"] == "system" for m in conversation.history)
            if conversation.n_turns or nothing_said:
                try:
                    session.save_state(conversation)
                except ValueError as e:
                    note("session", str(e))
            note("session", f"saved {len(session.saved)} message(s) to {session.path}")
        say("---")
        say(f"conversation ended after {self.n} turn(s)")

    def _save(self) -> bool:
        """Write the messages where they are kept; whether they are there."""
        if (session := self._session) is None:
            return False
        path = session.path
        try:
            session.save(self.conversation.history)
        except SessionError as e:
            note("session", str(e))
            return False
        if session.path != path:
            note("session", f"another program has written to {path}: from here on {session.path}")
        return True

    def _turn(self, n: int, label: str, begin: Callable[[], Iterator[str]]) -> None:
        """One answer, and the report on it."""
        conversation, name = self.conversation, f"turn {n}"
        done = conversation.n_turns
        self.failed = True
        try:
            with on_signal(signal.SIGINT, signal.default_int_handler, self._interactive):
                pieces = begin()
                if not self._told:
                    say("Compiling, or loading what an earlier run compiled ...")
                    self._told = True
                if conversation.n_dropped:
                    dropped = f"dropped oldest {conversation.n_dropped} turn(s)"
                    note(name, f"<<context full: {dropped}>>")
                self._show(pieces)
        except ValueError as e:
            note("error", str(e))
            return
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        if conversation.n_turns == done:
            note(name, "stopped before there was an answer: as if nothing was said")
            return
        stats = conversation.model.stats
        note(
            name,
            f"{label}prefill {stats.n_prefilled} tokens, generated {stats.n_generated} tokens "
            f"in {stats.decode_seconds:.2f}s ({stats.decode_rate:.1f} tok/s)",
        )
        if conversation.stopped_by:
            note(name, f"stopped by {conversation.stopped_by}")
        self.failed = False
        self._save()

    def _show(self, pieces: Iterator[str]) -> None:
        """Write an answer as it comes, and a line break after it."""
        splitter = ThinkingSplitter(begun=self.conversation.thinks) if self._color else None

        def end() -> None:
            _write((_gray(splitter.flush()) if splitter else "") + "\n")

        try:
            first = next(pieces, "")
            with _ctrl_c_waits() as asked:
                for piece in itertools.chain([first], pieces):
                    _write(_gray(splitter.push(piece)) if splitter else shown(piece))
                    if asked:
                        raise KeyboardInterrupt
        except BaseException as e:
            pieces.close()  # pyright: ignore  # a generator: what was said until now is recorded
            if not isinstance(e, OSError):  # then nobody reads it
                end()
            raise
        end()


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[list[int]]:
    """While in it, the first Ctrl-C is noted and no more.

    Raised in the middle of a call, it would cost the engine all that it has run of the text, and
    the next piece is near. The second one is raised.
    """
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with on_signal(signal.SIGINT, handle):
        yield asked


@contextlib.contextmanager
def on_signal(
    number: int, handler: Callable[[int, FrameType | None], object], wanted: bool = True
) -> Iterator[None]:
    """While in it, a signal is handled so, if that is wanted; then as before."""
    if not wanted:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def note(name: str, text: str) -> None:
    """Say something about the conversation, in one line on standard error."""
    say(f"[{name}] {one_line(text)}")


def remind(messages: Sequence[Message], *, color: bool) -> None:
    """Say where a conversation was left: the last question, and how its answer begins.

    Args:
        messages: of the conversation.
        color: whether it is said in gray.
    """
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return
    n = len(roles) - 1 - roles[::-1].index("user")
    last = [("you said", messages[n])]
    last += [("answered", m) for m in messages[n:] if m["role"] == "assistant"][-1:]
    for name, message in last:
        text = message["content"].rpartition(CLOSE)[2].lstrip()[: 2 * _REMINDED]
        text = one_line(" ".join(text.split()))
        line = f"[session] {name}: {text[:_REMINDED]}{'...' * (len(text) > _REMINDED)}"
        say(f"{_GRAY}{line}{_PLAIN}" if color else line)


def _gray(parts: list[tuple[str, bool]]) -> str:
    return "".join(
        f"{_GRAY}{shown(text)}{_PLAIN}" if thought else shown(text) for text, thought in parts
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
