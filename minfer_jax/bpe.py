"""Byte pair encoding with a list of merges, `tokenizer.ggml.model` = "gpt2" or "gemma4".

`pretokenizer.py` cuts the text; `tokenizers` joins neighbours within each piece, the pair that is
first in the list of merges first, the leftmost of equals.

Most vocabularies are written in GPT-2's alphabet: one printable character for each of the 256
bytes, those that are printable for themselves, the others from U+0100 on. "Ġ" is the space.
"""

import re
from collections.abc import Iterable, Mapping

from tokenizers import Tokenizer, models

from minfer_jax.pretokenizer import PreTokenizer, cutter
from minfer_jax.vocab import SPACE


def _byte_characters() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# GPT-2's alphabet, by byte; and the byte that each character of it stands for.
BYTE_CHARACTERS = _byte_characters()
CHARACTER_BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


class BytePairEncoder:
    """Text to ids by a list of merges."""

    def __init__(
        self,
        ids: Mapping[str, int],
        merges: Iterable[str],
        row: PreTokenizer,
        blocked: frozenset[str],
    ):
        """Builds the model inside `tokenizers`.

        Args:
            ids: id of every token, by its text.
            merges: what may be joined, the first first: "left right".
            row: how to cut text.
            blocked: texts of the tokens that text never becomes.
        """
        vocab = {text: index for text, index in ids.items() if text not in blocked}
        if not _is_utf8(vocab):
            vocab = {text: index for text, index in vocab.items() if _is_utf8([text])}
        self._row = row
        self._whole = vocab if row.whole_breaks else {}

        alphabet = BYTE_CHARACTERS if row.byte_level else [f"<0x{b:02X}>" for b in range(256)]
        split = (merge.partition(" ") for merge in merges)
        pairs = list(dict.fromkeys((left, right) for left, _, right in split if left and right))
        needed = {left for left, _ in pairs}
        needed.update(alphabet, (right for _, right in pairs), (a + b for a, b in pairs))
        missing = needed - vocab.keys()
        unusable = {text for text in missing if text in blocked or not _is_utf8([text])}
        if unusable:
            pairs = [(a, b) for a, b in pairs if unusable.isdisjoint((a, b, a + b))]

        # `tokenizers` wants an id for all that its merges mention, and drops characters without
        # one so that their neighbours meet. What the vocabulary lacks gets an id past its end,
        # and becomes the tokens of its characters, as far as there are any.
        self._first_extra = max(ids.values(), default=-1) + 1
        extra = sorted(missing - unusable)
        self._extra = [[vocab[c] for c in text if c in vocab] for text in extra]
        places = {text: self._first_extra + index for index, text in enumerate(extra)}
        self._tokenizer = Tokenizer(
            models.BPE(
                vocab=vocab | places,
                merges=pairs,
                ignore_merges=row.ignore_merges,
                byte_fallback=not row.byte_level,
            )
        )
        self._tokenizer.pre_tokenizer = cutter(row)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text in which no special token is looked for."""
        if self._row.byte_level:
            return self._encode(text)
        ids: list[int] = []
        for line in re.findall(r"[^\n]+|\n+", text.replace(" ", SPACE)):
            whole = self._whole.get(line) if line[0] == "\n" else None
            ids += self._encode(line) if whole is None else [whole]
        return ids

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if max(ids, default=0) < self._first_extra:
            return ids
        known: list[int] = []
        for token_id in ids:
            extra = token_id - self._first_extra
            known += [token_id] if extra < 0 else self._extra[extra]
        return known


def _is_utf8(texts: Iterable[str]) -> bool:
    """Whether all of the texts can be written in UTF-8: not so where a file's bytes were not."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
