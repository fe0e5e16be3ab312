"""Several texts that go on from one prompt, decoded side by side.

The prompt is run once, for one sequence; its keys and values are then repeated. Each row is at the
same position as the others: what a call costs is shared, and so are the weights that it reads. Rows
that have ended are idle, at position -1. Numbers of rows are rounded up to those of `SIZES`, so
that few programs serve all.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from minfer_jax import memory
from minfer_jax.burst import Burst, burst
from minfer_jax.context import EngineError, whole
from minfer_jax.decode_form import Form
from minfer_jax.model.kv_state import KVState, repeated
from minfer_jax.programs import platform_of
from minfer_jax.run_stats import Clock, Pace, RunStats
from minfer_jax.runner import Runner
from minfer_jax.sampling.args import all_tokens
from minfer_jax.session import Session

SIZES = (1, 2, 4, 8, 16)
_repeat = jax.jit(repeated, static_argnames="batch")


def checked_rows(n: object) -> int:
    """A number of rows; EngineError if it is none, or too large."""
    rows = whole("n", n, 1)
    if rows > SIZES[-1]:
        raise EngineError(f"n is {rows}, expected 1 to {SIZES[-1]}: ask again, with another seed")
    return rows


def draw_rows(
    runner: Runner, session: Session, n: int, max_tokens: int, ended: set[int]
) -> Iterator[tuple[int, int]]:
    """Draw texts that go on from a session, which stays as it is: (row, token), as they come.

    Args:
        runner: after `begin`.
        session: the prompt.
        n: rows, 1 to 16.
        max_tokens: of each row, 1 or more.
        ended: rows that are to be left alone; looked at before each call.

    Raises:
        EngineError: no memory, no finite logits, or another run has begun meanwhile.
    """
    stats = runner.stats = RunStats(
        n_prompt=len(session.tokens),
        seed=session.options.sampling.seed,
        finish_reasons=["length"] * n,
    )
    batch = next(size for size in SIZES if size >= n)
    _check_memory(runner, batch)
    clock, form = Clock(stats), runner.form(session, batch)
    runner.prefill(session, clock, form, batch=batch)
    assert runner.kv.state is not None
    rows = _Rows(runner, session, form, n, batch, _repeated(runner, batch))
    room = min(max_tokens, runner.n_ctx - len(session.tokens) + 1)
    clock.decode_begins()
    pace, sent, steps = Pace(1) if rows.constraints else runner.pace(), 1, 1
    rows.leave(ended)
    tokens = rows.send(burst(1)) if rows.live.any() else None
    while tokens is not None:
        following, after = None, min(pace.steps, room - sent)
        if after and not rows.constraints:
            following = rows.send(burst(after, session.options.stop_ids), sent)
        drawn = np.asarray(tokens)[:n, :steps]
        pace.read(steps)
        for row in (r for column in drawn.T for r in rows.took(column)):
            clock.drawn()
            clock.yielding()
            yield row
            runner.check_current(rows.number)
        rows.leave(ended)
        if after and rows.constraints and rows.live.any():
            following = rows.send(burst(1), sent)
        tokens = following if rows.live.any() else None
        sent, steps = sent + after, after
    stats.finish_reason = "stop" if set(stats.finish_reasons) == {"stop"} else "length"


class _Rows:
    """Rows in progress.

    Attributes:
        live: bool [B], rows that go on.
        constraints: one of each row, or none.
        number: of the run.
    """

    def __init__(
        self, runner: Runner, session: Session, form: Form, n: int, batch: int, state: KVState
    ) -> None:
        first = session.constraint
        self.live = np.arange(batch) < n
        self.number = runner.number
        self.constraints = [first.copy() for _ in range(n)] if first is not None else []
        self._runner, self._session, self._form, self._state = runner, session, form, state
        self._sampler = form.sampler
        self._last: Any = np.full((batch, 1), session.tokens[-1], np.int32)
        for row, constraint in enumerate(self.constraints):
            if constraint.finished:
                self._end(row)

    def send(self, burst: Burst, sent: int = 0) -> Array:
        """Have the rows that are live go on, after `sent` tokens: what they draw, [B, BURST]."""
        form, runner = self._form, self._runner
        place = len(self._session.tokens) - 1 + sent
        places = np.where(self.live, place, -1).astype(np.int32)[:, None]
        args = form.args
        if self.constraints:
            everything = all_tokens(runner.n_vocab)
            live = self.live[: len(self.constraints)]
            masks = [
                constraint.mask() if on else everything
                for constraint, on in zip(self.constraints, live, strict=True)
            ]
            args = form.masked(*masks, *[everything] * (len(self.live) - len(masks)))
        self._state, tokens, self._last, _, self._sampler = runner.programs.call(
            form.function,
            runner.params,
            self._last,
            places,
            self._state,
            self._sampler,
            args,
            burst,
        )
        return tokens

    def took(self, tokens: Int[np.ndarray, " n"]) -> Iterator[tuple[int, int]]:
        """Of a token of each row, those that are to be yielded; the others end their row."""
        for row, token in enumerate(tokens.tolist()):
            if not self.live[row]:
                continue
            if token < 0:
                raise self._runner.nothing_drawn(self._session)
            if token in self._session.options.stop_ids:
                self._end(row)
                continue
            if self.constraints:
                self.constraints[row].accept(token)
                if self.constraints[row].finished:
                    self._end(row)
            yield row, token

    def leave(self, ended: set[int]) -> None:
        """Go on without these rows."""
        for row in ended:
            if 0 <= row < len(self.live) and self.live[row]:
                self._end(row)

    def _end(self, row: int) -> None:
        self.live[row] = False
        self._runner.stats.finish_reasons[row] = "stop"


def _repeated(runner: Runner, batch: int) -> KVState:
    """The KV state of as many rows, all as the one that was prefilled."""
    try:
        return jax.block_until_ready(_repeat(runner.kv.state, batch=batch))
    except jax.errors.JaxRuntimeError as e:
        raise _no_memory(runner, batch) from e


def _check_memory(runner: Runner, batch: int) -> None:
    """Refuse what the machine has no memory for: a system may promise it all the same."""
    free = memory.available()
    if platform_of(runner.params) == "cpu" and free is not None and batch * runner.kv.nbytes > free:
        raise _no_memory(runner, batch)


def _no_memory(runner: Runner, batch: int) -> EngineError:
    return EngineError(
        f"no memory for {batch} rows of {runner.n_ctx} positions "
        f"({batch * runner.kv.nbytes / 1e6:.0f} MB): ask for fewer, or lower n_ctx"
    )
