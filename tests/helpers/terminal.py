"""A program on a terminal of its own: keys are typed into it, and what it shows is read."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

# Makes its standard input the controlling terminal, so that Ctrl-C is a signal, and becomes the
# program.
_LAUNCH = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")
CTRL_C, CTRL_D, ENTER, ESCAPE, UP = "\x03", "\x04", "\r", "\x1b", "\x1b[A"


class Terminal:
    """A running program.

    Attributes:
        process: the program.
        raw: all that it has shown, escape sequences included.
    """

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], *, stdout: int | None = None
    ) -> None:
        """Starts it; its standard output may go elsewhere."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.settings = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *argv],
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
            start_new_session=True,
        )
        self._slave = slave
        self.raw = ""
        self._seen = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def type(self, *keys: str) -> None:
        """Type text or keys."""
        os.write(self._master, "".join(keys).encode())

    def expect(self, pattern: str, timeout: float = 30) -> re.Match[str]:
        """Wait until something is shown, after what was expected last; without escapes."""
        end = time.monotonic() + timeout
        while True:
            new = _ESCAPES.sub("", self.raw[self._seen :]).replace("\r", "")
            if found := re.search(pattern, new):
                # The rest may be expected next: find where it begins among the escapes.
                self._seen += _raw_length(self.raw[self._seen :], new[: found.end()])
                return found
            left = end - time.monotonic()
            assert left > 0 and self._read(left), f"{pattern!r} was not shown, but {new!r}"

    def ends(self, timeout: float = 60) -> int:
        """Wait for the program's end; its exit status."""
        end = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < end:
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.wait(0)

    def settings_now(self) -> list:
        """Of the terminal, as `settings` were at the start."""
        return termios.tcgetattr(self._slave)

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], timeout)
        if ready:
            self.raw += os.read(self._master, 1 << 16).decode("utf-8", "replace")
        return bool(ready)


def _raw_length(raw: str, shown: str) -> int:
    """How much of `raw` it takes to show this."""
    low, high = len(shown), len(raw)
    while low < high:
        middle = (low + high) // 2
        if len(_ESCAPES.sub("", raw[:middle]).replace("\r", "")) < len(shown):
            low = middle + 1
        else:
            high = middle
    return low
