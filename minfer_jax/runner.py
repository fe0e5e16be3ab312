"""Runs a session: prefills what is not held yet, then draws token after token.

The one place that calls the compiled programs with a text: `Engine` says what to run.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array

from minfer_jax.burst import BURST, burst
from minfer_jax.context import EngineError, buckets, common_prefix, shifted, smallest_of, whole
from minfer_jax.decode_form import Form, form_of
from minfer_jax.kv_store import KVStore
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.params import Params
from minfer_jax.programs import (
    Programs,
    Recipe,
    all_logits,
    decode,
    prefill,
    program_name,
    verify,
)
from minfer_jax.run_options import Drawn
from minfer_jax.run_stats import Clock, Pace, RunStats
from minfer_jax.session import Session
from minfer_jax.speculation import Drafter, Plan

log = logging.getLogger("minfer_jax")

# So many tokens that follow what is held go through decode. A prefill of 32 takes as long as 6 of
# SmolLM2's, and as 2 of Gemma's, whose output layer it leaves out.
SHORT = 2


class Runner:
    """One sequence at a time on one KV state.

    Attributes:
        n_ctx: positions that the KV state holds.
        n_vocab: V.
        buckets: numbers of tokens that prefills are compiled for, ascending.
        programs: compiled so far.
        kv: the KV state.
        params: the weights of the latest run.
        stats: of the latest run.
        number: of the latest run; another number says that it was overtaken.
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        *,
        n_ctx: int,
        prefill_chunk: int,
        steps_per_dispatch: int | None,
        n_known: int,
    ) -> None:
        """Compiles and allocates nothing yet.

        Args:
            params: weights.
            cfg: their configuration.
            n_ctx: positions wanted.
            prefill_chunk: tokens that one prefill takes at most.
            steps_per_dispatch: tokens that one call of decode draws, 1 to BURST; None for what
                takes about as long as `Pace.FRAME`.
            n_known: tokens of the vocabulary that may be drawn.

        Raises:
            EngineError: prefill_chunk or steps_per_dispatch is no integer, or out of its range.
        """
        self.n_ctx = n_ctx
        self.n_vocab, self._n_known = cfg.n_vocab, n_known
        self._kernels = cfg.arithmetic.kernels
        self.buckets = buckets(n_ctx, prefill_chunk)
        self.kv = KVStore(cfg, n_ctx, self.buckets[-1])
        self.programs = Programs(cfg, self.kv.shape)
        self.params = params
        self.stats = RunStats()
        # Decode is ahead of what is yielded by two calls at most. A ring has `chunk` slots more
        # than its window: it still holds what the last token yielded must see.
        ring = max(1, self.buckets[-1] // 2)
        self._least_steps, self._most_steps = 1, min(BURST, ring)
        if steps_per_dispatch is not None:
            steps = whole("steps_per_dispatch", steps_per_dispatch, 1)
            if steps > BURST:
                raise EngineError(f"steps_per_dispatch is {steps}, expected 1 to {BURST}")
            self._least_steps = self._most_steps = min(steps, ring)
        self.number = 0

    def begin(self, params: Params) -> None:
        """Use these weights from here on. A run in progress is over."""
        self.number += 1
        if params is not self.params:
            self.kv.drop()
            self.params = params

    def run(
        self,
        session: Session,
        max_tokens: int,
        drafter: Drafter | None,
        smallest_bucket: bool = False,
    ) -> Iterator[int]:
        """Tokens that follow a session's, which they are added to.

        Args:
            session: after `begin`; `n_rows` of its tokens are in the KV state, if that is not lost.
            max_tokens: how many to draw at most, 1 or more.
            drafter: guesses what follows, to be checked several at once; the tokens are the same.
                Where the extended form of decode is needed it is left alone.
            smallest_bucket: as for `prefill`.

        Raises:
            EngineError: the model gives no finite logits; another run has begun meanwhile.
        """
        seed = session.options.sampling.seed
        stats = self.stats = RunStats(n_prompt=len(session.tokens), seed=seed)
        clock = Clock(stats)
        # Wrong guesses lie in a ring's slots too, of which there are `chunk` beyond the window.
        plan = None if drafter is None else Plan(drafter, self.buckets[-1], self._kernels)
        if plan is not None and self.form(session).function is not decode:
            log.warning("nothing is guessed: this run needs more than the sampler's usual steps")
        while stats.n_generated < max_tokens:
            if len(session.tokens) > self.n_ctx:
                if not session.options.context_shift:
                    return
                self._shift(session)
            room = min(max_tokens - stats.n_generated, self.n_ctx - len(session.tokens) + 1)
            form = self.form(session)
            if plan is not None and form.function is decode:
                self.prefill(session, clock, form, smallest_bucket, verified=plan.sizes)
                yield from self._speculate(session, room, clock, form, plan)
            else:
                self.prefill(session, clock, form, smallest_bucket)
                draw = self._decode if session.constraint is None else self._constrained
                yield from draw(session, room, clock, form)
            if stats.finish_reason == "stop":
                return

    def call(
        self, function: Callable, tokens: np.ndarray | Array, positions: np.ndarray, *rest: object
    ) -> list:
        """Run a compiled program on the KV state, which it replaces; its other results."""
        return self.kv.call(self.programs, function, self.params, tokens, positions, *rest)

    def pace(self) -> Pace:
        """How many tokens the calls of a run are to draw."""
        return Pace(self._most_steps, self._least_steps)

    def bucket(self, n_tokens: int) -> int:
        """The smallest bucket that holds the tokens, or the largest."""
        return smallest_of(self.buckets, n_tokens)

    def _shift(self, session: Session) -> None:
        """Make room in a context that is full."""
        before = len(session.tokens)
        session.n_rows = 0
        session.tokens = shifted(session.tokens, self.n_ctx, session.options.n_keep)
        self.stats.n_dropped += before - len(session.tokens)

    def form(self, session: Session, batch: int = 1) -> Form:
        """How a session, or several that go on from it, are decoded."""
        return form_of(session, self.n_vocab, self._n_known, batch)

    def prefill(
        self,
        session: Session,
        clock: Clock,
        form: Form,
        smallest_bucket: bool = False,
        *,
        batch: int = 1,
        verified: Sequence[int] = (),
    ) -> None:
        """Run all tokens but the last; compile first what this run needs.

        The last goes through decode, as every later one does: so the prefill needs neither the
        output layer nor the sampler. A few that follow what is held go that way too.

        Args:
            session: the text.
            clock: of the run.
            form: in which it will be decoded.
            smallest_bucket: whether what is left of a prompt goes through the smallest bucket that
                holds it, and not the smallest that is compiled.
            batch: rows that will be decoded.
            verified: tokens of the calls that will check guesses.
        """
        stats, compiled = self.stats, self.programs.seconds
        session.n_rows = self.kv.usable(session.n_rows)
        if not stats.n_generated:
            stats.n_reused = session.n_rows
        ids = np.array(session.tokens[:-1], np.int32)
        short = batch == 1 and session.n_rows > 0 and len(ids) - session.n_rows <= SHORT
        bucket = 1 if short else self._bucket_after(session.n_rows, len(ids), smallest_bucket)
        if session.n_rows < len(ids) and not short:
            self.programs.compile(prefill, self.params, bucket)
        rest = form.sampler, form.args, burst(1)
        self.programs.compile(form.function, self.params, 1, *rest, batch=batch)
        for size in verified:
            self.programs.compile(verify, self.params, size, *rest[:2])
        stats.compile_seconds += self.programs.seconds - compiled
        self.kv.keep(session.n_rows)

        clock.prefill_begins()
        for start in range(session.n_rows, len(ids), bucket):
            part = ids[start : start + bucket]
            if short:  # what it draws is of no use
                self.call(form.function, part[None], at(start), *rest)
            else:
                self.call(prefill, *padded(part, start, bucket))
            session.n_rows = start + len(part)
        with self.kv.dropped_on_failure():
            jax.block_until_ready(self.kv.state)

    def _decode(self, session: Session, room: int, clock: Clock, form: Form) -> Iterator[int]:
        """Yield up to `room` tokens after those of the session."""
        number, sampler = self.number, form.sampler
        stop_ids = session.options.stop_ids
        n_last = len(session.tokens) - 1
        last = np.array([session.tokens[-1:]], np.int32)
        clock.decode_begins()
        # A call is sent off before the tokens that it continues are read: the device never waits
        # for the host.
        first = burst(1)  # the prompt's last token may be one that stops: it does not stop here
        pace, asked, steps = self.pace(), 1, 1
        call, args = partial(self.call, form.function), form.args
        tokens, last, extra, sampler = call(last, at(n_last), sampler, args, first)
        while steps:
            after, following = min(pace.steps, room - asked), (tokens, extra)
            if after:
                place, more = at(n_last + asked), burst(after, stop_ids)
                tokens_after, last, extra_after, sampler = call(last, place, sampler, args, more)
                following = tokens_after, extra_after
            with self.kv.dropped_on_failure():
                drawn = form.read(tokens, extra, steps)
            pace.read(steps)
            for token, mu, told in drawn:
                if not self._take(session, token, mu, told, clock):
                    return
                yield token
                self.check_current(number)
            asked, steps, (tokens, extra) = asked + after, after, following

    def _speculate(
        self, session: Session, room: int, clock: Clock, form: Form, plan: Plan
    ) -> Iterator[int]:
        """As `_decode`; guesses of what comes are checked, several at once, while that pays."""
        stats, number = self.stats, self.number
        end = stats.n_generated + room
        plan.begin(session.tokens)
        clock.decode_begins()
        while stats.n_generated < end and stats.finish_reason != "stop":
            left, n = end - stats.n_generated, len(session.tokens)
            form, size = form.after(session), 0
            if guesses := plan.draft(left - 1):
                size = plan.size(len(guesses))
                for token in self._verify(session, guesses, size, form):
                    if not self._take(session, token, None, None, clock):
                        return
                    yield token
                    self.check_current(number)
            else:
                yield from self._decode(session, min(left, plan.stretch), clock, form)
            plan.drew(session.tokens[n:], size)

    def _verify(self, session: Session, guesses: Sequence[int], size: int, form: Form) -> list[int]:
        """The tokens that follow, of one call of that size: as many as the guesses were right."""
        n_last = len(session.tokens) - 1
        ids = np.array([session.tokens[-1], *guesses], np.int32)
        (tokens,) = self.call(verify, *padded(ids, n_last, size), form.sampler, form.args)
        with self.kv.dropped_on_failure():
            drawn = np.asarray(tokens)[0].tolist()
        n_right = common_prefix(drawn, guesses)
        self.stats.n_drafted += len(guesses)
        self.stats.n_accepted += n_right
        return drawn[: n_right + 1]

    def _constrained(self, session: Session, room: int, clock: Clock, form: Form) -> Iterator[int]:
        """As `_decode`, one token a call: which may come next depends on the last one."""
        constraint, number, sampler = session.constraint, self.number, form.sampler
        assert constraint is not None
        position = len(session.tokens) - 1
        last = np.array([session.tokens[-1:]], np.int32)
        clock.decode_begins()
        for place in range(position, position + room):
            if constraint.finished:
                break
            masked = form.masked(constraint.mask())
            tokens, last, extra, sampler = self.call(
                form.function, last, at(place), sampler, masked, burst(1)
            )
            with self.kv.dropped_on_failure():
                ((token, mu, told),) = form.read(tokens, extra, 1)
            if not self._take(session, token, mu, told, clock):
                return
            yield token
            self.check_current(number)
        if constraint.finished:
            self.stats.finish_reason = "stop"

    def _take(
        self, session: Session, token: int, mu: float | None, told: Drawn | None, clock: Clock
    ) -> bool:
        """Note a token that was drawn; whether it is to be yielded, or ends the run."""
        if token < 0:
            self.kv.drop()
            raise self.nothing_drawn(session)
        clock.drawn()
        if token in session.options.stop_ids:
            self.stats.finish_reason = "stop"
            return False
        session.take(token, mu)
        clock.yielding()
        if told is not None and session.watch is not None:
            session.watch.tell(told)
        return True

    def nothing_drawn(self, session: Session) -> EngineError:
        """Why no token follows those of a session."""
        position, why = len(session.tokens) - 1, ""
        if session.options.bias or session.options.constrained:
            why = ", or logit_bias and the constraint leave no token"
        return EngineError(f"the model gave no finite logits at position {position}{why}")

    def recipes(self, params: Params, runs: Sequence[Session]) -> dict[str, Recipe]:
        """The programs of such sessions without guesses, by name: what makes each anew."""
        forms = [self.form(run) for run in runs]
        programs = [(prefill, n, ()) for n in self.buckets]
        programs += [(form.function, 1, (form.sampler, form.args, burst(BURST))) for form in forms]
        programs += [(all_logits, self.buckets[-1], ())]
        recipe = self.programs.recipe
        return {
            program_name(function, n): recipe(function, params, n, *others, empty=self.kv.empty)
            for function, n, others in programs
        }

    def check_current(self, number: int) -> None:
        """EngineError if another run has begun since that of this number."""
        if number != self.number:
            raise EngineError("this run was overtaken by another on the same engine")

    def _bucket_after(self, n_reused: int, n_tokens: int, smallest: bool) -> int:
        """The bucket for what is left of a prompt.

        Unless the smallest is wanted, reuse compiles nothing that the whole prompt would not have:
        a program that there is serves up to that one's size.
        """
        least, most = self.bucket(n_tokens - n_reused), self.bucket(n_tokens)
        if smallest:
            return least
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
