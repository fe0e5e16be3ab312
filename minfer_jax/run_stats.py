"""What a run did, and how long it took."""

import time
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class RunStats:
    """What one run did.

    Attributes:
        n_prompt: tokens that the run began with: of the prompt, or of all that it continued.
        n_reused: tokens of those that an earlier run had left in the KV state: not prefilled.
        n_generated: tokens that were yielded, of all rows.
        n_dropped: tokens that shifts of the context have dropped.
        n_drafted: guesses that were checked, see `speculation`.
        n_accepted: those that were right.
        prefill_seconds: until the first token was drawn; compiling and allocating are not in it.
        decode_seconds: of all decode steps, the one that drew the first token included, shifts of
            the context, and what the consumer did in between.
        total_seconds: until the latest token was drawn. That first step is in both of the others.
        compile_seconds: spent on programs that this run needed first.
        seed: of its draws; None where nothing was to be drawn.
        finish_reason: "length" (max_tokens or the context was reached), "stop", or
            "interrupted" where whoever consumes the run says so. Of several rows, "stop" where all
            of them have stopped.
        finish_reasons: of several rows, why each of them ended.
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_generated: int = 0
    n_dropped: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    compile_seconds: float = 0.0
    seed: int | None = None
    finish_reason: str = "length"
    finish_reasons: list[str] = field(default_factory=list)

    @property
    def n_prefilled(self) -> int:
        """Tokens that the run began with and had to run itself."""
        return self.n_prompt - self.n_reused

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right; 0 where none was checked."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def prefill_rate(self) -> float:
        """Prefilled tokens a second."""
        return self.n_prefilled / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second."""
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0


class Clock:
    """Writes a run's seconds into its stats. Time spent compiling does not count."""

    def __init__(self, stats: RunStats) -> None:
        self._stats = stats
        self._begin = self._decode_begin = 0.0

    def prefill_begins(self) -> None:
        """To be called before the first prefill, or what takes its place."""
        self._begin = self._begin or self._now()

    def decode_begins(self) -> None:
        """To be called before the first token is run to draw another."""
        self._decode_begin = self._decode_begin or self._now()

    def drawn(self) -> None:
        """To be called when a token was drawn."""
        if not self._stats.n_generated:
            self._stats.prefill_seconds = self._now() - self._begin

    def yielding(self) -> None:
        """To be called when it is about to be yielded."""
        now = self._now()
        self._stats.n_generated += 1
        self._stats.decode_seconds = now - self._decode_begin
        self._stats.total_seconds = now - self._begin

    def _now(self) -> float:
        return time.perf_counter() - self._stats.compile_seconds


class Pace:
    """How many tokens a call should draw: what takes about as long as a frame on the screen.

    Tokens then come as if one by one, while the host's part of a call, some tenths of a
    millisecond, is shared among them. A large model draws one a call.

    Attributes:
        steps: for the next call.
    """

    FRAME = 0.04  # seconds

    def __init__(self, most: int, least: int = 1) -> None:
        """Begins with the least.

        Args:
            most: steps at most.
            least: steps at least; as many as `most` for a number that time does not change.
        """
        self.steps = self._least = least
        self._most = most
        self._then = time.perf_counter()

    def read(self, steps: int) -> None:
        """To be called when the tokens of a call of so many steps were read."""
        now = time.perf_counter()
        each = max((now - self._then) / steps, 1e-6)
        self.steps = max(self._least, min(self._most, int(self.FRAME / each)))
        self._then = now
