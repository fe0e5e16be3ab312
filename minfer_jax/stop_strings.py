"""Cutting streamed text at stop strings."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of the strings appears, however it is split into pieces.

    The string that is complete first counts; of several that end together, the longest.
    Text that could still turn into a stop string is held back, so what was passed on never has to
    be taken back:

        stop "END", pieces "one E", "N", "D two"   ->   "one ", "", "" and stopped
        stop "END", pieces "one E", "N", "OUGH"    ->   "one ", "", "ENOUGH"
    """

    def __init__(self, stops: Sequence[str] | str) -> None:
        """One string or several; empty ones are ignored."""
        self._stops = [s for s in ([stops] if isinstance(stops, str) else stops) if s]
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is safe to show now that `piece` has arrived; nothing once stopped."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
