"""Ids to text as they come."""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns one id after the other into text, each at a cost that does not depend on those before.

    A character may take several tokens; it is given out when its last byte is there. Bytes that
    are not UTF-8 become U+FFFD. All that `push` and `flush` return, joined, is the text that the
    bytes of all ids would make at once.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_space: bool):
        """Begins a text.

        Args:
            token_bytes: the bytes that an id stands for.
            strip_space: whether the first byte of the text is left out if it is a space.
        """
        self._token_bytes = token_bytes
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Takes the next id and returns what text is now certain, perhaps none."""
        data = self._token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    @property
    def is_whole(self) -> bool:
        """Whether the ids so far end with a whole character."""
        return not self._decoder.getstate()[0]

    def flush(self) -> str:
        """Ends the text: returns U+FFFD for a character of which some bytes are missing."""
        return self._decoder.decode(b"", final=True)
