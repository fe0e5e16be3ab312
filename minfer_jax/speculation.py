"""Guessing the tokens to come, so that one call checks several: when that pays, and for how many.

A call that runs T tokens reads the weights once, and costs less than T calls of one. So if what
follows is guessed, and the guesses are mostly right, a text comes faster (Leviathan et al. 2023).

It is the same text, at any temperature: a guess counts only if it is what is drawn, and a draw
follows from the logits, the seed, the number of draws and the latest tokens. With the kernels the
logits are those of single tokens to the bit, but where heads are normed together (OLMo 2, OLMoE):
there, and in plain XLA, sums are taken in another order, and two tokens that are as good as equally
likely may change places.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from minfer_jax.context import EngineError, whole
from minfer_jax.quant.matmul import NATIVE_ROWS, few_rows

MOST = (
    NATIVE_ROWS - 1
)  # guesses that a call checks at most: with more rows, products differ in bits
USUAL = 7  # guesses, unless told


class Drafter(Protocol):
    """Where guesses come from.

    Attributes:
        most: guesses that one call checks at most, 1 to MOST.
    """

    most: int

    def begin(self, tokens: Sequence[int]) -> None:
        """Follow this text from here on, in place of any before it."""
        ...

    def push(self, token: int) -> None:
        """The next token of the text."""
        ...

    def chances(self, most: int) -> list[float]:
        """Of each of so many guesses, how likely it and all before it are right; [] for no guess.

        It costs next to nothing: what is not worth checking is not guessed.
        """
        ...

    def draft(self, most: int) -> list[int]:
        """The next tokens, as far as can be guessed."""
        ...


def checked_most(most: int) -> int:
    """A number of guesses that one call may check.

    Raises:
        EngineError: it is no integer, or out of range.
    """
    number = whole("the number of draft tokens", most)
    if not 1 <= number <= MOST:
        raise EngineError(f"the number of draft tokens is {number}, expected 1 to {MOST}")
    return number


class Plan:
    """Decides, token by token, whether to check guesses or to draw as ever.

    It compares what was measured in this run: seconds of a token without guesses, and of a call
    that checks some. Where calls that check have lost more than they have won, they are left out
    for a while, each time for twice as long.

    Attributes:
        sizes: tokens of a call that checks guesses: of one guess, or of as many as there may be.
            Empty where no call has room for two tokens.
        stretch: tokens to draw before guesses are thought of again.
    """

    MARGIN = 1.05  # by which a call must be expected to be faster
    STRETCH = 32  # tokens, at most: what comes in between is seen late
    STAKE = 4.0  # tokens' time that may be lost before guesses pause
    PAUSE = 64  # tokens, the first time
    _ROW = 0.3  # what a row of a call is taken to add, in tokens' time, before one was measured
    _NEWS = 0.3  # what a measurement counts for

    def __init__(self, drafter: Drafter, longest: int, kernels: str = "auto") -> None:
        """Knows nothing of the run yet.

        Args:
            drafter: where guesses come from.
            longest: tokens that a call may have.
            kernels: of the model, one of `quant.kernels.CHOICES`.
        """
        longest = min(drafter.most + 1, longest, few_rows(kernels))
        self.sizes = tuple(sorted({2, longest})) if longest > 1 else ()
        self.stretch = 1
        self._drafter = drafter
        self._token = 0.0  # seconds; 0 before any was measured
        self._calls: dict[int, float] = {}
        self._won = 0.0  # tokens' time, since the last pause
        self._pause, self._paused = self.PAUSE, 0
        self._then = time.perf_counter()

    def begin(self, tokens: Sequence[int]) -> None:
        """A text, or what a shift has left of it; its next token is drawn without a guess."""
        self._drafter.begin(tokens)
        self.stretch = 1
        self._then = time.perf_counter()

    def draft(self, most: int) -> list[int]:
        """What is worth checking now; [] for nothing.

        Args:
            most: guesses that there is room for.
        """
        if self._paused or not self._token or most < 1 or not self.sizes:
            return []
        most = min(most, self.sizes[-1] - 1)
        chances = self._drafter.chances(most)
        best, count = self.MARGIN, 0
        for size in self.sizes if chances else ():
            drawn = 1 + sum(chances[: size - 1])
            if drawn * self._token > best * self._cost(size):
                best, count = drawn * self._token / self._cost(size), min(size - 1, most)
        return self._drafter.draft(count) if count else []

    def size(self, n_guesses: int) -> int:
        """Of the call that checks so many."""
        return next(size for size in self.sizes if size > n_guesses)

    def drew(self, tokens: Sequence[int], size: int = 0) -> None:
        """Note what was drawn since the last time.

        Args:
            tokens: them.
            size: of the call that checked guesses; 0 where none were.
        """
        now = time.perf_counter()
        took, self._then = now - self._then, now
        for token in tokens:
            self._drafter.push(token)
        if not tokens:
            return
        if size:
            self._checked(len(tokens), size, took)
        else:
            self._drawn(len(tokens), took)

    def _drawn(self, n: int, took: float) -> None:
        each = took / n
        news = n / (n + 16) if self._token else 1.0
        self._token += news * (_tamed(each, self._token) - self._token)
        self.stretch = min(self.STRETCH, 2 * self.stretch)
        self._paused = max(0, self._paused - n)
        for size, cost in self._calls.items():  # it may have been slow for once
            self._calls[size] = min(cost, cost + 0.02 * (self._expected(size) - cost))

    def _checked(self, n: int, size: int, took: float) -> None:
        before = self._cost(size)
        self._calls[size] = before + self._NEWS * (_tamed(took, before) - before)
        self.stretch = 1
        self._won = min(self._won + n - took / self._token, self.STAKE)
        if self._won < -self.STAKE:
            self._won, self._paused, self._pause = 0.0, self._pause, 2 * self._pause

    def _cost(self, size: int) -> float:
        return self._calls.get(size, self._expected(size))

    def _expected(self, size: int) -> float:
        return self._token * (1 + self._ROW * (size - 1))


def _tamed(measured: float, before: float) -> float:
    """A measurement, that the machine or the consumer may have held up, after what was known."""
    return min(max(measured, before / 2), 2 * before) if before else measured
