"""Runs a session: prefills what is not held yet, then draws token after token.

The one place that calls the compiled programs with a text: `Engine` says what to run.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array

from minfer_jax.context import EngineError, buckets, common_prefix, shifted
from minfer_jax.kv_store import KVStore
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Params
from minfer_jax.programs import BURST, Programs, burst, decode, prefill, verify
from minfer_jax.run_stats import Clock, Pace, RunStats
from minfer_jax.sampling import SamplerArgs, SamplerState, SamplingParams, init_state
from minfer_jax.session import Session
from minfer_jax.speculation import Drafter, Plan

# So many tokens that follow what is held go through decode. A prefill of 32 takes as long as 6 of
# SmolLM2's, and as 2 of Gemma's, whose output layer it leaves out.
SHORT = 2


class Runner:
    """One sequence at a time on one KV state.

    Attributes:
        n_ctx: positions that the KV state holds.
        buckets: numbers of tokens that prefills are compiled for, ascending.
        programs: compiled so far.
        kv: the KV state.
        params: the weights of the latest run.
        stats: of the latest run.
    """

    def __init__(self, params: Params, cfg: ModelConfig, *, n_ctx: int, prefill_chunk: int) -> None:
        """Compiles and allocates nothing yet.

        Raises:
            EngineError: prefill_chunk is no integer, or below 1.
        """
        self.n_ctx = n_ctx
        self.buckets = buckets(n_ctx, prefill_chunk)
        self.kv = KVStore(cfg, n_ctx, self.buckets[-1])
        self.programs = Programs(cfg, self.kv.shape)
        self.params = params
        self.stats = RunStats()
        # Decode is ahead of what is yielded by two calls at most. A ring has `chunk` slots more
        # than its window: it still holds what the last token yielded must see.
        self._most_steps = max(1, min(BURST, self.buckets[-1] // 2))
        self._run = 0
        self._args: tuple[SamplingParams, SamplerArgs] | None = None  # those of the latest run

    def begin(self, params: Params) -> None:
        """Use these weights from here on. A run in progress is over."""
        self._run += 1
        if params is not self.params:
            self.kv.drop()
            self.params = params

    def run(self, session: Session, max_tokens: int, drafter: Drafter | None) -> Iterator[int]:
        """Tokens that follow a session's, which they are added to.

        Args:
            session: after `begin`; `n_rows` of its tokens are in the KV state, if that is not lost.
            max_tokens: how many to draw at most, 1 or more.
            drafter: guesses what follows, to be checked several at once; the tokens are the same.

        Raises:
            EngineError: the model gives no finite logits; another run has begun meanwhile.
        """
        stats = self.stats = RunStats(n_prompt=len(session.tokens))
        clock = Clock(stats)
        # Wrong guesses lie in a ring's slots too, of which there are `chunk` beyond the window.
        plan = None if drafter is None else Plan(drafter, self.buckets[-1])
        while stats.n_generated < max_tokens:
            if len(session.tokens) > self.n_ctx:
                if not session.options.context_shift:
                    return
                self._shift(session)
            room = min(max_tokens - stats.n_generated, self.n_ctx - len(session.tokens) + 1)
            self._prefill(session, clock, () if plan is None else plan.sizes)
            if plan is None:
                yield from self._decode(session, room, clock)
            else:
                yield from self._speculate(session, room, clock, plan)
            if stats.finish_reason == "stop":
                return

    def call(
        self, function: Callable, tokens: np.ndarray | Array, positions: np.ndarray, *rest: object
    ) -> list:
        """Run a compiled program on the KV state, which it replaces; its other results."""
        return self.kv.call(self.programs, function, self.params, tokens, positions, *rest)

    def bucket(self, n_tokens: int) -> int:
        """The smallest bucket that holds the tokens, or the largest."""
        return next((b for b in self.buckets if b >= n_tokens), self.buckets[-1])

    def _shift(self, session: Session) -> None:
        """Make room in a context that is full."""
        before = len(session.tokens)
        session.n_rows = 0
        session.tokens = shifted(session.tokens, self.n_ctx, session.options.n_keep)
        self.stats.n_dropped += before - len(session.tokens)

    def _prefill(self, session: Session, clock: Clock, verified: Sequence[int]) -> None:
        """Run all tokens but the last; compile first what this run needs.

        The last goes through decode, as every later one does: so the prefill needs neither the
        output layer nor the sampler. A few that follow what is held go that way too.

        Args:
            session: the text.
            clock: of the run.
            verified: tokens of the calls that will check guesses.
        """
        stats, compiled = self.stats, self.programs.seconds
        session.n_rows = self.kv.usable(session.n_rows)
        if not stats.n_generated:
            stats.n_reused = session.n_rows
        ids = np.array(session.tokens[:-1], np.int32)
        short = session.n_rows > 0 and len(ids) - session.n_rows <= SHORT
        bucket = 1 if short else self._bucket_after(session.n_rows, len(ids))
        if session.n_rows < len(ids) and not short:
            self.programs.compile(prefill, self.params, bucket)
        rest = self._sampler(session)
        self.programs.compile(decode, self.params, 1, *rest, burst(1))
        for size in verified:
            self.programs.compile(verify, self.params, size, *rest)
        stats.compile_seconds += self.programs.seconds - compiled
        self.kv.keep(session.n_rows)

        clock.prefill_begins()
        for start in range(session.n_rows, len(ids), bucket):
            part = ids[start : start + bucket]
            if short:  # what it draws is of no use
                self.call(decode, part[None], at(start), *rest, burst(1))
            else:
                self.call(prefill, *padded(part, start, bucket))
            session.n_rows = start + len(part)
        with self.kv.dropped_on_failure():
            jax.block_until_ready(self.kv.state)

    def _decode(self, session: Session, room: int, clock: Clock) -> Iterator[int]:
        """Yield up to `room` tokens after those of the session."""
        stats = self.stats
        sampler, args = self._sampler(session)
        stop_ids = session.options.stop_ids
        n_last = len(session.tokens) - 1
        last = np.array([session.tokens[-1:]], np.int32)
        clock.decode_begins()
        # A call is sent off before the tokens that it continues are read: the device never waits
        # for the host.
        first = burst(1)  # the prompt's last token may be one that stops: it does not stop here
        pace, asked, steps = Pace(self._most_steps), 1, 1
        tokens, last, _, sampler = self.call(decode, last, at(n_last), sampler, args, first)
        while steps:
            after, following = min(pace.steps, room - asked), tokens
            if after:
                place, more = at(n_last + asked), burst(after, stop_ids)
                following, last, _, sampler = self.call(decode, last, place, sampler, args, more)
            with self.kv.dropped_on_failure():
                drawn = np.asarray(tokens)[0, :steps].tolist()
            pace.read(steps)
            yield from self._take(drawn, session, clock)
            if stats.finish_reason == "stop":
                return
            asked, steps, tokens = asked + after, after, following

    def _take(self, drawn: Sequence[int], session: Session, clock: Clock) -> Iterator[int]:
        """Yield tokens that were drawn, up to one that stops."""
        run, stats = self._run, self.stats
        for token in drawn:
            if token < 0:
                where = len(session.tokens) - 1
                self.kv.drop()
                raise EngineError(f"the model gave no finite logits at position {where}")
            clock.drawn()
            if token in session.options.stop_ids:
                stats.finish_reason = "stop"
                return
            session.take(token)
            clock.yielding()
            yield token
            if run != self._run:
                raise EngineError("this run was overtaken by another on the same engine")

    def _speculate(self, session: Session, room: int, clock: Clock, plan: Plan) -> Iterator[int]:
        """As `_decode`; guesses of what comes are checked, several at once, while that pays."""
        stats = self.stats
        end = stats.n_generated + room
        plan.begin(session.tokens)
        clock.decode_begins()
        while stats.n_generated < end and stats.finish_reason != "stop":
            left, n = end - stats.n_generated, len(session.tokens)
            guesses = plan.draft(left - 1)
            size = plan.size(len(guesses)) if guesses else 0
            if size:
                yield from self._take(self._verify(session, guesses, size), session, clock)
            else:
                yield from self._decode(session, min(left, plan.stretch), clock)
            plan.drew(session.tokens[n:], size)

    def _verify(self, session: Session, guesses: Sequence[int], size: int) -> list[int]:
        """The tokens that follow, of one call of that size: as many as the guesses were right."""
        n_last = len(session.tokens) - 1
        ids = np.array([session.tokens[-1], *guesses], np.int32)
        (tokens,) = self.call(verify, *padded(ids, n_last, size), *self._sampler(session))
        with self.kv.dropped_on_failure():
            drawn = np.asarray(tokens)[0].tolist()
        n_right = common_prefix(drawn, guesses)
        self.stats.n_drafted += len(guesses)
        self.stats.n_accepted += n_right
        return drawn[: n_right + 1]

    def _sampler(self, session: Session) -> tuple[SamplerState, SamplerArgs]:
        sampling = session.options.sampling
        if self._args is None or self._args[0] != sampling:
            self._args = sampling, sampling.arrays()
        return init_state(sampling, session.recent, session.n_drawn), self._args[1]

    def _bucket_after(self, n_reused: int, n_tokens: int) -> int:
        """The bucket for what is left of a prompt.

        Reuse compiles nothing that the whole prompt would not have: a program that there is serves
        up to that one's size.
        """
        least, most = self.bucket(n_tokens - n_reused), self.bucket(n_tokens)
        able = [b for b in self.buckets if least <= b <= most]
        return next((b for b in able if self.programs.has(prefill, b)), least)


def padded(ids: np.ndarray, start: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, positions), int32 [1, bucket] each; padding is token 0 at position -1."""
    tokens = np.zeros((1, bucket), np.int32)
    positions = np.full((1, bucket), -1, np.int32)
    tokens[0, : len(ids)] = ids
    positions[0, : len(ids)] = np.arange(start, start + len(ids))
    return tokens, positions


def at(position: int) -> np.ndarray:
    """One position, int32 [1, 1]."""
    return np.array([[position]], np.int32)
