"""Telling a model's thoughts from its answer, while both arrive in pieces."""

from minfer_jax.stop_strings import overlap

OPEN, CLOSE = "<think>", "</think>"


class ThinkingSplitter:
    """Marks the block of thoughts that an answer may begin with, its tags included.

        "\\n<th", "ink>Hm", "m</think>", "Yes"
        ->  [("\\n", False)], [("<think>Hm", True)], [("m</think>", True)], [("Yes", False)]

    What could still become a tag is held back. A tag further on in the answer is text.
    """

    def __init__(self, *, begun: bool = False) -> None:
        """Begins an answer.

        Args:
            begun: whether the prompt has opened the block already.
        """
        self._awaited: str | None = CLOSE if begun else OPEN  # None: the answer is all that is left
        self._held = ""

    def push(self, piece: str) -> list[tuple[str, bool]]:
        """The parts of text that are certain now that `piece` has arrived: (text, is thought)."""
        text, self._held = self._held + piece, ""
        parts: list[tuple[str, bool]] = []
        if self._awaited == OPEN:
            tag = text.lstrip()
            if not tag.startswith(OPEN):
                if OPEN.startswith(tag):  # white space alone, or a tag that is begun
                    self._held = text
                    return []
                self._awaited = None
            else:
                self._awaited = CLOSE
                before = len(text) - len(tag)
                parts, text = [(text[:before], False)], text[before:]
        if self._awaited == CLOSE:
            thought, closed, rest = text.partition(CLOSE)
            if closed:
                self._awaited = None
                parts.append((thought + closed, True))
                text = rest
            else:
                keep = len(text) - overlap(text, CLOSE)
                parts.append((text[:keep], True))
                self._held = text[keep:]
                text = ""
        parts.append((text, False))
        return [(part, thought) for part, thought in parts if part]

    def flush(self) -> list[tuple[str, bool]]:
        """What is still held back, at the end of the answer."""
        held, self._held = self._held, ""
        return [(held, self._awaited == CLOSE)] if held else []


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside of a block of thoughts."""
    return prompt.rstrip().endswith(OPEN)
