"""Guesses from the text itself: what followed the last time that it went as it does now.

Prompt lookup (Saxena 2023): an answer that repeats its prompt, such as an edited program or a
summary with quotations, is guessed from there, without a second model.

    the text     .. the light can be seen .. and the light can
                                 ^ what is guessed: "be", then what follows it
"""

from collections.abc import Sequence

from minfer_jax.context import EngineError
from minfer_jax.speculation import USUAL, Drafter, checked_most

GRAMS = (3, 2)  # latest tokens that are looked for, the longest first
# How likely the next guess is to be right after so many in a row, before any was seen. Before the
# first of a row, what is known is the length of the gram that was found: -2 and -3.
BELIEFS = {-2: 0.3, -3: 0.5, 1: 0.7, 3: 0.85, 8: 0.95}
BELIEF = 4.0  # guesses that this stands for
FORGET = 0.98  # what a guess still counts for after another of its kind


class PromptLookup:
    """A `speculation.Drafter`. It follows the text in step, right or wrong.

    How likely a guess is to be right is learned from all tokens of a text, whether or not a guess
    was checked: so it is known when checking would pay. It depends on how long the text has
    followed its earlier place, in these steps.
    """

    def __init__(self, most: int = USUAL) -> None:
        """Follows an empty text.

        Args:
            most: guesses that one call checks at most.

        Raises:
            EngineError: that is no number from 1 to 15.
        """
        self.most = checked_most(most)
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Follow this text, learned anew."""
        self._seen = {step: [p * BELIEF, BELIEF] for step, p in BELIEFS.items()}  # right, of all
        self._tokens: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in GRAMS]  # gram: what follows
        self._source: int | None = None  # index of the token that is the next guess
        self._right = 0  # guesses in a row that were; before the first, minus the gram's length
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The next token of the text."""
        tokens = self._tokens
        if self._source is not None:
            right = tokens[self._source] == token
            self._learn(right)
            self._source = self._source + 1 if right else None
            self._right = max(self._right, 0) + 1
        n = len(tokens)
        for length, after in zip(GRAMS, self._after, strict=True):
            if n >= length:  # not the last gram of all, which would find itself
                after[tuple(tokens[n - length :])] = n
        tokens.append(token)
        if self._source is None:
            self._find()

    def chances(self, most: int) -> list[float]:
        """See `speculation.Drafter`."""
        if self._source is None:
            return []
        chances, chance, right = [], 1.0, self._right
        for _ in range(most):
            hits, tries = self._seen[_step(right)]
            chance *= hits / tries
            chances.append(chance)
            right = max(right, 0) + 1
        return chances

    def draft(self, most: int) -> list[int]:
        """The next tokens; a text that has run into its own end is taken to go round in circles."""
        if self._source is None:
            return []
        period = len(self._tokens) - self._source
        return [self._tokens[self._source + i % period] for i in range(most)]

    def _find(self) -> None:
        """Where the text went as it does now."""
        for length, after in zip(GRAMS, self._after, strict=True):
            self._source = after.get(tuple(self._tokens[-length:]))
            if self._source is not None:
                self._right = -length
                return

    def _learn(self, right: bool) -> None:
        seen = self._seen[_step(self._right)]
        seen[0] = seen[0] * FORGET + right
        seen[1] = seen[1] * FORGET + 1


def _step(right: int) -> int:
    """The key of BELIEFS for so many right guesses."""
    if right < 0:
        return right
    return 8 if right >= 8 else 3 if right >= 3 else 1


def drafter_of(draft_ngram: bool | int, draft: Drafter | None) -> Drafter | None:
    """Where guesses come from; None for nowhere.

    Args:
        draft_ngram: whether from the text itself; a number is the most that one call checks.
        draft: where else.

    Raises:
        EngineError: both are given, or the number is out of range.
    """
    if draft_ngram is False:
        return draft
    if draft is not None:
        raise EngineError("draft_ngram and draft are both given: choose one")
    return PromptLookup() if draft_ngram is True else PromptLookup(draft_ngram)
