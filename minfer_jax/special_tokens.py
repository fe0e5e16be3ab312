"""Finds special tokens in a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WHITE_SPACE = " \t\n\v\f\r"


@dataclass(frozen=True, kw_only=True)
class SpecialToken:
    """A token that is looked for in text as it stands.

    Attributes:
        text: what to look for, not empty.
        token_id: the token's id.
        control: whether it steers the model, so that what a user wrote must not become it.
        strip_right: whether white space after it belongs to it.
    """

    text: str
    token_id: int
    control: bool
    strip_right: bool


def sort_special(tokens: Iterable[SpecialToken]) -> list[SpecialToken]:
    """Puts tokens in the order in which they are looked for: the longest in UTF-8 first."""
    return sorted(tokens, key=lambda token: -len(token.text.encode("utf-8", "surrogateescape")))


def split_special(
    text: str, tokens: Sequence[SpecialToken], literal: Iterable[tuple[int, int]] = ()
) -> list[str | int]:
    """Splits a text at the special tokens in it.

    A token is searched from left to right in what those before it have left, so that a long one
    goes before a short one even if that begins further left.

    Args:
        text: any text.
        tokens: what to look for, in this order.
        literal: stretches of the text, (start, stop), in no part of which a control token is found.

    Returns:
        Pieces of text, none of them empty, and ids of tokens, in the order of the text.
    """
    found: list[tuple[int, int, int]] = []  # start, where the text goes on, id
    taken = bytearray(len(text))  # 1 where the text belongs to a token
    closed = bytearray(len(text))  # 1 where the text belongs to no control token
    for start, stop in literal:
        closed[start:stop] = b"\1" * len(closed[start:stop])
    heads = {head for head in {token.text[:4] for token in tokens} if head in text}
    for token in tokens:
        if token.text[:4] not in heads:
            continue
        start = text.find(token.text)
        while start >= 0:
            stop = start + len(token.text)
            last = taken.rfind(1, start, stop)
            if token.control:
                last = max(last, closed.rfind(1, start, stop))
            if last >= 0:  # in the way: go on where the text is free again
                free = taken.find(0, last + 1)
                start = text.find(token.text, free) if free >= 0 else -1
                continue
            if token.strip_right:
                while stop < len(text) and text[stop] in WHITE_SPACE and not taken[stop]:
                    stop += 1
            taken[start:stop] = b"\1" * (stop - start)
            found.append((start, stop, token.token_id))
            start = text.find(token.text, stop)

    pieces: list[str | int] = []
    position = 0
    for start, stop, token_id in sorted(found):
        if position < start:
            pieces.append(text[position:start])
        pieces.append(token_id)
        position = stop
    if position < len(text):
        pieces.append(text[position:])
    return pieces
