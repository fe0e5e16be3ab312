"""A child process that answers each line of JSON with one; it cannot hang us, and never stays."""

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any

_LONGEST_ANSWER = 1 << 20  # bytes
_LONGEST_QUOTE = 300  # characters


class PeerError(ValueError):
    """The peer cannot run. One line."""


class Process:
    """A child that answers each line of JSON with one."""

    def __init__(self, name: str, command: list[str]) -> None:
        """Start it.

        Args:
            name: of the peer, for errors.
            command: the program and its arguments.

        Raises:
            PeerError: there is no such program.
        """
        self._name = name
        self._rest = b""
        self._errors = tempfile.TemporaryFile()
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
            )
        except OSError as e:
            self._errors.close()
            raise PeerError(f"{name}: cannot run {command[0]}: {e.strerror or e}") from None

    def ask(self, request: Mapping[str, Any], *, time_limit: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            request: becomes a line of JSON; short, so that writing it never waits for the child.
            time_limit: seconds to wait at most.

        Raises:
            PeerError: the child has ended, answers no JSON object, or not in time.
        """
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end shows when the answer is read
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
        line = self._line(time_limit)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"{self._name}: expected a JSON object, and it says {line[:200]!r}")
        return answer

    def close(self) -> None:
        """End the child, whatever it does, and wait for it."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _line(self, time_limit: float) -> bytes:
        out = self._child.stdout
        assert out is not None
        deadline = time.monotonic() + time_limit
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if len(self._rest) > _LONGEST_ANSWER:
                    raise PeerError(f"{self._name}: an answer without end")
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise PeerError(f"{self._name}: no answer within {time_limit:.0f} s")
                piece = os.read(out.fileno(), 1 << 16)
                if not piece:
                    raise PeerError(f"{self._name}: its process ended{self._last_words()}")
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """How the child ended, and the last line of what it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(5)
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
        return f" with status {self._child.poll()}{last_line(self._errors.read())}"


def last_line(printed: bytes) -> str:
    """ ": " and the last line that says something, abridged; empty where none does."""
    lines = printed.decode("utf-8", "replace").splitlines()
    said = [" ".join(line.split()) for line in lines if line.strip()]
    return f": {said[-1][:_LONGEST_QUOTE]}" if said else ""
