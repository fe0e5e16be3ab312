"""Guesses from a second, smaller model with the same vocabulary."""

import logging
from collections.abc import Sequence

from minfer_jax.context import EngineError
from minfer_jax.engine import Engine
from minfer_jax.speculation import checked_most

log = logging.getLogger("minfer_jax")

USUAL = 4  # guesses, unless told: each costs a token of the smaller model
BELIEF = 0.7  # how likely a guess is taken to be right before any was seen
WEIGHT = 8.0  # guesses that this stands for
FORGET = 0.98  # what a guess still counts for after another, or after a token without one
PADDING = 128  # tokens by which vocabularies may differ at their end, as in llama.cpp


class DraftModel:
    """A `speculation.Drafter`: what another engine finds likeliest.

    Its keys and values follow the text by its own reuse of prefixes: what was accepted is not run
    again.
    """

    def __init__(self, engine: Engine, most: int = USUAL) -> None:
        """Takes an engine, which runs nothing else meanwhile.

        Args:
            engine: of the smaller model. That its tokens are those of the larger one is the
                caller's to see to, as `LanguageModel.drafter` does.
            most: guesses that one call checks at most.

        Raises:
            EngineError: that is no number from 1 to 15.
        """
        self.most = checked_most(most)
        self.engine = engine
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> None:
        """Follow this text, learned anew."""
        self._seen = [BELIEF * WEIGHT, WEIGHT]  # right, of all
        self._tokens = list(tokens)
        self._known = max(tokens, default=0) < self.engine.cfg.n_vocab
        self._guesses: list[int] = []  # those that are still to be judged

    def push(self, token: int) -> None:
        """The next token of the text."""
        if self._guesses:
            right = self._guesses.pop(0) == token
            self._seen = [self._seen[0] * FORGET + right, self._seen[1] * FORGET + 1]
            if not right:
                self._guesses = []
        else:  # back to what is believed, or a model that was useless once would be so for ever
            missing = (1 - FORGET) * WEIGHT
            self._seen = [
                n * FORGET + b * missing for n, b in zip(self._seen, (BELIEF, 1), strict=True)
            ]
        self._tokens.append(token)
        self._known = self._known and token < self.engine.cfg.n_vocab

    def chances(self, most: int) -> list[float]:
        """See `speculation.Drafter`."""
        room = self.engine.n_ctx - len(self._tokens) + 1
        if not self._known or room < 1:
            return []
        each = self._seen[0] / self._seen[1]
        return [each ** (i + 1) for i in range(min(most, room))]

    def draft(self, most: int) -> list[int]:
        """The next tokens, as far as its context allows; of a model that fails, none any more."""
        try:
            self._guesses = list(self.engine.generate_tokens(self._tokens, most, temperature=0.0))
        except EngineError as e:  # the text does not need it
            log.warning("the draft model is left alone: %s", e)
            self._guesses, self._known = [], False
        return list(self._guesses)


def check_same_vocabulary(
    tokens: Sequence[str], drafts: Sequence[str], name: str = "the draft model"
) -> None:
    """Refuse a draft model, or another that is held against a first, that speaks of other tokens.

    Vocabularies may differ at the end by some rows of padding, as they do between the sizes of one
    model.

    Args:
        tokens: of the model, by id.
        drafts: of the draft model.
        name: what to call that in the message.

    Raises:
        EngineError: says the first token that differs, or both sizes.
    """
    n = min(len(tokens), len(drafts))
    if tokens[:n] != drafts[:n]:
        i = next(i for i in range(n) if tokens[i] != drafts[i])
        raise EngineError(
            f"{name} has another vocabulary: its token {i} is {drafts[i]!r}, expected {tokens[i]!r}"
        )
    if abs(len(tokens) - len(drafts)) > PADDING:
        raise EngineError(
            f"{name} has another vocabulary: {len(drafts)} tokens, expected {len(tokens)}"
        )
