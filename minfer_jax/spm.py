"""SentencePiece's byte pair encoding, `tokenizer.ggml.model` = "llama" (Llama 2, Phi-3, Gemma).

A text begins as its characters, with U+2581 for the space. Of all neighbours that together are a
token, those with the highest score are joined, the leftmost of equals, until no two are left:

    ▁ l o w e r   ->   ▁ lo w e r   ->   ▁ lo w er   ->   ▁lo w er   ->   ▁lo wer   ->   ▁lower

A character that is no token becomes the tokens of its UTF-8 bytes.

Own code rather than `tokenizers`, whose model of this kind wants a list of merges. The file has
none, and to find the 514,847 of Gemma's 262,144 tokens takes 2.2 s and to build the model from
them 1.1 s, where a dictionary of scores takes 0.1 s. Nor would the ids always be the same: a list
ranks pairs of equal score, and llama.cpp goes by their place in the text.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush

from minfer_jax.vocab import SPACE

# The merges of a word are remembered, for as many words as an ordinary long text has.
CACHED_WORDS = 1 << 14
CACHED_WORD_LENGTH = 32


class SentencePieceEncoder:
    """Text to ids by scores."""

    def __init__(
        self,
        scores: Mapping[str, float],
        ids: Mapping[str, int],
        unknown_id: int | None,
    ):
        """Prepares the search for merges.

        Args:
            scores: score of each token that text may become, by its text.
            ids: id of every token, by its text; the byte tokens "<0x00>" to "<0xFF>" among them.
            unknown_id: what a character becomes that has no byte tokens, or None for nothing.
        """
        self._scores = scores
        self._ids = ids
        self._unknown_id = unknown_id
        self._longest = max(map(len, scores), default=0)
        self._words = _word_pattern(scores)
        self._cached = lru_cache(maxsize=CACHED_WORDS)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text in which no special token is looked for."""
        ids: list[int] = []
        for word in self._words.findall(text.replace(" ", SPACE)):
            ids += self._cached(word) if len(word) <= CACHED_WORD_LENGTH else self._merge(word)
        return ids

    def _merge(self, word: str) -> list[int]:
        """Joins neighbours until none are left to join: n log n steps for n characters.

        A symbol is a stretch of the word, known by where it starts; `ends[start]` is where the
        next one starts, -1 once the symbol is part of the one before it.
        """
        scores, longest, size = self._scores, self._longest, len(word)
        ends = list(range(1, size + 1))
        befores = list(range(-1, size - 1))
        heap = [
            (-scores[pair], start, start + 1, start + 2)
            for start in range(size - 1)
            if (pair := word[start : start + 2]) in scores
        ]
        heapify(heap)
        while heap:
            _, start, middle, stop = heappop(heap)
            if ends[start] != middle or ends[middle] != stop:
                continue  # one of the two has been joined with something else
            ends[start], ends[middle] = stop, -1
            before = befores[start]
            if before >= 0 and stop - before <= longest:
                score = scores.get(word[before:stop])
                if score is not None:
                    heappush(heap, (-score, before, start, stop))
            if stop < size:
                befores[stop] = start
                after = ends[stop]
                if after - start <= longest:
                    score = scores.get(word[start:after])
                    if score is not None:
                        heappush(heap, (-score, start, stop, after))

        ids: list[int] = []
        start = 0
        while start < size:
            stop = ends[start]
            symbol = word[start:stop]
            if symbol in scores:
                ids.append(self._ids[symbol])
            else:
                ids += self._bytes(symbol)
            start = stop
        return ids

    def _bytes(self, character: str) -> list[int]:
        names = [f"<0x{byte:02X}>" for byte in character.encode("utf-8")]
        if all(name in self._ids for name in names):
            return [self._ids[name] for name in names]
        return [] if self._unknown_id is None else [self._unknown_id]


def _word_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Makes the pattern of the words of which a text's merges can be found one word at a time.

    A word ends where a space follows something else, since tokens hardly ever go on there. After
    the characters where one of these tokens does, no word ends.
    """
    between = "\ud800"  # in no token
    joined = between.join(tokens)
    inner = "".join(sorted(set(re.findall(rf"[^{SPACE}{between}](?={SPACE})", joined))))
    word = rf"{SPACE}*[^{SPACE}]+"
    if inner:
        word += rf"(?:(?<=[{re.escape(inner)}]){SPACE}+[^{SPACE}]*)*"
    return re.compile(rf"{word}|{SPACE}+")
