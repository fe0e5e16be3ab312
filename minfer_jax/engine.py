"""The engine: owns weights, KV state and compiled programs. Tokens in, tokens or logits out.

Every program has a fixed shape. A prompt runs through one prefill bucket (padded), long ones in
chunks of the largest; further tokens run through decode, several a call. What differs from run to
run is data: positions, sampler values.

The engine holds the text of its latest run (`Session`) and its keys and values (`KVStore`): a
prompt that begins alike prefills only the rest, and the run can be continued, or saved for that.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from minfer_jax import state_file
from minfer_jax.batch import checked_rows, draw_rows
from minfer_jax.context import (
    CHUNK,
    MAX_TOKENS,
    N_CTX,
    EngineError,
    check_prompt_fits,
    checked_ids,
    common_prefix,
    whole,
)
from minfer_jax.logit_rows import logit_parts, logit_rows
from minfer_jax.model.config import MAX_POSITIONS, ModelConfig
from minfer_jax.model.params import Params
from minfer_jax.model.patches import Patch
from minfer_jax.programs import Compile, Recipe
from minfer_jax.prompt_lookup import drafter_of
from minfer_jax.run_options import Drawn, TokenConstraint, Watch, checked_options
from minfer_jax.run_stats import RunStats
from minfer_jax.runner import Runner
from minfer_jax.sampling import SamplingParams
from minfer_jax.session import Expected, Session, Snapshot, identity_of, latest, to_parts
from minfer_jax.speculation import Drafter
from minfer_jax.tracing import Patched, Trace, Tracer

T = TypeVar("T")


class Engine:
    """One model on one device, one prompt at a time.

    Attributes:
        params: the weights; usable with `minfer_jax.model.forward`.
        cfg: the model's configuration.
        n_ctx: positions that the KV state holds, fixed.
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        *,
        n_ctx: int = N_CTX,
        prefill_chunk: int = CHUNK,
        steps_per_dispatch: int | None = None,
        n_known: int | None = None,
    ) -> None:
        """Allocates nothing yet: the KV state is made by the first run.

        Args:
            params: weights.
            cfg: their configuration.
            n_ctx: positions wanted; the model's own maximum bounds it.
            prefill_chunk: tokens that one prefill call takes at most. Working memory and the rings
                of sliding layers grow with it.
            steps_per_dispatch: tokens that one call draws, 1 to BURST, but at most half a prefill;
                None for as many as take some 40 ms. The tokens are the same.
            n_known: tokens of the vocabulary that stand for something: those from there on are
                padding, and never drawn. None for all.

        Raises:
            EngineError: n_ctx, prefill_chunk, steps_per_dispatch or n_known is no integer, or out
                of its range.
        """
        n_ctx = whole("n_ctx", n_ctx, 1)
        self.params = params
        self.cfg = cfg
        self.n_ctx = min(n_ctx, cfg.n_ctx_train, MAX_POSITIONS)
        known = cfg.n_vocab if n_known is None else whole("n_known", n_known, 1)
        self._runner = Runner(
            params,
            cfg,
            n_ctx=self.n_ctx,
            prefill_chunk=prefill_chunk,
            steps_per_dispatch=steps_per_dispatch,
            n_known=known,
        )
        self._tracer = Tracer(cfg, self.n_ctx, self._runner.buckets, self.compiles)
        self._session: Session | None = None

    def generate_tokens(
        self,
        token_ids: Sequence[int],
        max_tokens: int = MAX_TOKENS,
        *,
        stop_ids: Sequence[int] | frozenset[int] = (),
        context_shift: bool = False,
        n_keep: int = 0,
        reuse: bool = True,
        smallest_bucket: bool = False,
        logit_bias: Mapping[int, float] | None = None,
        constraint: TokenConstraint | None = None,
        n_logprobs: int = 0,
        on_drawn: Callable[[Drawn], None] | None = None,
        dry_breakers: np.ndarray | None = None,
        draft_ngram: bool | int = False,
        draft: Drafter | None = None,
        repeat_penalty: float = 1.0,
        **sampling: float,
    ) -> Iterator[int]:
        """Tokens that follow a prompt, one by one; a fast model draws some 40 ms of them at a time.

        Args:
            token_ids: the prompt, at least one token, at most n_ctx.
            max_tokens: how many to draw at most; fewer where the context ends.
            stop_ids: tokens that end the run; they are not yielded.
            context_shift: when the context is full, go on: half of it is dropped and the rest is
                run anew from position 0, so that what follows is what it would be for that text.
            n_keep: tokens at the beginning that no shift drops; all of the prompt if negative.
            reuse: take over what the KV state holds of the prompt's beginning. The numbers are the
                same but for rounding: chunks are cut elsewhere.
            smallest_bucket: run what is left of a prompt through the smallest bucket that holds it,
                and compile that if need be. Otherwise reuse compiles nothing that a cold run would
                not, which is better where no more such prompts follow.
            logit_bias: added to the logits of these tokens; -inf forbids one.
            constraint: which tokens may come next; it moves on with the run. One that ends the text
                should be among `stop_ids`.
            n_logprobs: how many of the likeliest tokens `on_drawn` is told, 20 at most.
            on_drawn: called with each token and how likely it was, before it is yielded.
            dry_breakers: tokens that break a sequence of DRY, as `sampling.dry.breaker_tokens`
                gives them; None for none.
            draft_ngram: guess what follows from where the text went so before, and check several
                guesses in one call, where that is faster; a number is the most guesses that one
                call checks, 7 otherwise. The tokens are the same: `speculation` says how exactly.
                It does nothing for runs that need the extended form of decode.
            draft: guesses by other means, such as a `DraftModel`.
            repeat_penalty: as in SamplingParams, but off unless given: tokens are what the model
                says.
            **sampling: further fields of SamplingParams.

        Raises:
            EngineError: the prompt is empty, too long, or holds ids outside the vocabulary;
                max_tokens is negative; it, n_keep or a stop id is no integer; a bias is no number;
                draft_ngram is out of range, or given beside draft; n_logprobs is, or given without
                on_drawn; the model gives no finite logits; another run has begun meanwhile.
            ValueError: a sampling value is out of its range; no token meets the constraint.
        """
        if on_drawn is None and n_logprobs:
            raise EngineError(f"n_logprobs is {n_logprobs}, but nobody is told: give on_drawn")
        session = self._new(
            token_ids,
            SamplingParams(repeat_penalty=repeat_penalty, **sampling),  # pyright: ignore
            constraint,
            None if on_drawn is None else Watch(n_top=n_logprobs, tell=on_drawn),
            stop_ids=stop_ids,
            context_shift=context_shift,
            n_keep=n_keep,
            logit_bias=logit_bias,
            dry_breakers=dry_breakers,
        )
        drafter = drafter_of(draft_ngram, draft)
        most = whole("max_tokens", max_tokens, 0)
        draw = partial(
            self._runner.run,
            max_tokens=most,
            drafter=drafter,
            smallest_bucket=smallest_bucket,
        )
        return self._begin(session, draw, most, reuse)

    def generate_with_logprobs(
        self,
        token_ids: Sequence[int],
        max_tokens: int = MAX_TOKENS,
        *,
        n_logprobs: int = 0,
        **options: Any,
    ) -> Iterator[Drawn]:
        """As `generate_tokens`, with how likely each token was.

        Args:
            token_ids, max_tokens, n_logprobs, **options: as there.
        """
        told = deque[Drawn](maxlen=1)  # a run that goes on later tells it still
        tokens = self.generate_tokens(
            token_ids, max_tokens, n_logprobs=n_logprobs, on_drawn=told.append, **options
        )
        return (told.pop() for _ in tokens)

    def generate_batch(
        self,
        token_ids: Sequence[int],
        n: int,
        max_tokens: int = MAX_TOKENS,
        *,
        stop_ids: Sequence[int] | frozenset[int] = (),
        reuse: bool = True,
        logit_bias: Mapping[int, float] | None = None,
        constraint: TokenConstraint | None = None,
        dry_breakers: np.ndarray | None = None,
        ended: set[int] | None = None,
        repeat_penalty: float = 1.0,
        **sampling: float,
    ) -> Iterator[tuple[int, int]]:
        """Several texts that follow one prompt, drawn side by side: (row, token), as they come.

        The prompt is run once. Row i is, but for rounding, what `generate_tokens` draws with the
        seed plus i. Afterwards the engine holds the prompt alone, and `stats.finish_reasons` says
        how each row ended. Rows end where the context does.

        Args:
            token_ids, max_tokens, stop_ids, reuse, logit_bias, dry_breakers, repeat_penalty: as for
                `generate_tokens`; max_tokens is of each row.
            n: rows, up to 16. Each takes as much memory for its keys and values as a run of one.
            constraint: copied for each row.
            ended: rows that the caller has enough of, and may add to at any time; they are left
                alone from the next call on.
            **sampling: further fields of SamplingParams.

        Raises:
            EngineError: n is out of range; there is no memory for so many; else as for
                `generate_tokens`.
            ValueError: as there.
        """
        session = self._new(
            token_ids,
            SamplingParams(repeat_penalty=repeat_penalty, **sampling),  # pyright: ignore
            constraint,
            None,
            stop_ids=stop_ids,
            logit_bias=logit_bias,
            dry_breakers=dry_breakers,
        )
        n, most = checked_rows(n), whole("max_tokens", max_tokens, 0)
        ended = set() if ended is None else ended
        draw = partial(draw_rows, self._runner, n=n, max_tokens=most, ended=ended)
        return self._begin(session, draw, most, reuse, n)

    def continue_tokens(
        self,
        max_tokens: int = MAX_TOKENS,
        *,
        draft_ngram: bool | int = False,
        draft: Drafter | None = None,
    ) -> Iterator[int]:
        """Tokens that the latest run, or the one that was restored, would have yielded next.

        It goes on as it was begun: with the same sampling values, draws, stop ids and policy.

        Args:
            max_tokens: how many more to draw at most.
            draft_ngram, draft: as for `generate_tokens`.

        Raises:
            EngineError: there is no run to continue, or as for `generate_tokens`.
        """
        self._continuable()
        drafter = drafter_of(draft_ngram, draft)
        return self._continue(whole("max_tokens", max_tokens, 0), drafter)

    def logits(
        self, token_ids: Sequence[int], chunk: int | None = None
    ) -> Float[np.ndarray, "T V"]:
        """What the model says after each token of a text. It runs all of it, and nothing is held.

        Args:
            token_ids: at most n_ctx.
            chunk: tokens that one call runs; None for the largest prefill, 1 for the decode
                program.

        Returns:
            float32 [len(token_ids), V].

        Raises:
            EngineError: as for generate_tokens, or chunk is out of range.
        """
        ids, longest = self._checked(token_ids), self._runner.buckets[-1]
        if chunk is not None and not 1 <= (chunk := whole("chunk", chunk)) <= longest:
            raise EngineError(f"chunk is {chunk}, expected 1 to {longest}")
        self.forget()
        return logit_rows(self._runner, ids, chunk)

    def logit_parts(
        self, token_ids: Sequence[int], first: int = 0
    ) -> Iterator[Float[np.ndarray, "n V"]]:
        """As `logits`, from position `first` on, call by call; see `logit_rows.logit_parts`."""
        ids = self._checked(token_ids)
        self.forget()
        return logit_parts(self._runner, ids, None, first)

    def trace(self, token_ids: Sequence[int], names: str | Iterable[str]) -> Trace:
        """A text's intermediate values, and its logits; what the engine holds is left alone.

        Args:
            token_ids: at most n_ctx.
            names: what to keep, such as "blk.*.attn_out": one pattern or several, as of fnmatch.
                The names, and what each value is, are in `model.names`.

        Raises:
            EngineError: as for `logits`; a pattern matches nothing; the values are too large.
        """
        return self.patch({}).trace(token_ids, names)

    def patch(self, patches: Mapping[str, Patch]) -> Patched:
        """This model with some of its values replaced, or edited: see `tracing.Patched`.

        Args:
            patches: by patterns, as for `trace`: arrays, functions, `Replace` or `Add`.

        Raises:
            EngineError: a pattern matches nothing, or two match one name.
        """
        return self._tracer.patched(lambda: self.params, patches, self._checked)

    @property
    def stats(self) -> RunStats:
        """Of the latest run: of `generate_tokens`, `generate_batch` or `continue_tokens`."""
        return self._runner.stats

    @property
    def tokens(self) -> list[int]:
        """The text that is held: prompt and what was yielded, less what shifts have dropped."""
        return [] if self._session is None else list(self._session.tokens)

    def forget(self) -> None:
        """Hold no text: the next run prefills all of its prompt. A run in progress is over."""
        self._runner.begin(self.params)
        self._session = None

    def snapshot(self) -> Snapshot:
        """The state as a value: what is needed to go on from here, copied to the host.

        Raises:
            EngineError: nothing was run yet.
        """
        session = self._held()
        n = session.n_rows if self.params is self._runner.params else 0  # of other weights
        return Snapshot(session=session.copy(), rows=self._runner.kv.rows(n))

    def restore(self, snapshot: Snapshot) -> None:
        """Put a state back, of an engine with the same weights; then `continue_tokens` goes on.

        Its n_ctx and prefill_chunk may have been others, as for `load_state`.

        Raises:
            EngineError: it is longer than this context, or there is no memory for the KV state.
        """
        n = len(snapshot.session.tokens)
        if n > self.n_ctx + 1:  # the last token is not in the context yet
            raise EngineError(f"the state has {n} tokens, but the context holds {self.n_ctx}")
        self.forget()
        self._runner.kv.put(snapshot.rows)
        self._session = snapshot.session.copy()

    def save_state(self, path: str | Path, identity: str) -> None:
        """Write the state into a file, in place of one that is there: see `state_file`.

        Args:
            path: where to.
            identity: of the weights, such as their file's digest.

        Raises:
            EngineError: nothing was run yet.
            StateError: the file cannot be written.
        """
        state_file.write(
            path, identity_of(self.cfg, self.n_ctx, identity), *to_parts(self.snapshot())
        )

    def load_state(self, path: str | Path, identity: str) -> None:
        """Restore the state that a file holds; where it is refused, all stays as it is.

        Args:
            path: a file that `save_state` wrote.
            identity: as it was given then. n_ctx and prefill_chunk may be others, n_ctx unless RoPE
                depends on it.

        Raises:
            StateError: the file is none of these, damaged, of another model, cache type or
                precision, or longer than the context.
            EngineError: there is no memory for the KV state.
        """
        expected = Expected(self._runner.kv, self.n_ctx, self.cfg.n_vocab)
        identities = identity_of(self.cfg, self.n_ctx, identity)
        self.restore(state_file.read(path, identities, expected.check, expected.build))

    @property
    def compiles(self) -> list[Compile]:
        """Every program that was compiled, in order."""
        return self._runner.programs.compiles

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        return self._runner.programs.seconds

    def recipes(self) -> dict[str, Recipe]:
        """The programs of one text without guesses, by name: what makes each anew."""
        watch = Watch(n_top=0, tell=lambda drawn: None)
        runs = [self._new([0], SamplingParams(), None, who) for who in (None, watch)]
        return self._runner.recipes(self.params, runs)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV state, whether or not it is allocated yet."""
        return self._runner.kv.nbytes

    def kv_layers(self, kind: int) -> tuple[int, int, int]:
        """(layers, slots, bytes of keys and values) of kv_state.FULL or kv_state.SLIDING."""
        return self._runner.kv.layers(kind)

    def _new(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        constraint: TokenConstraint | None,
        watch: Watch | None,
        **options: Any,
    ) -> Session:
        """A session that begins with a prompt; options as of `checked_options`."""
        ids = self._checked(token_ids)
        return Session(
            options=checked_options(
                self.cfg.n_vocab,
                len(ids),
                sampling,
                constrained=constraint is not None,
                **options,
            ),
            tokens=ids.tolist(),
            recent=latest(ids.tolist()),
            constraint=constraint,
            watch=watch,
        )

    def _begin(
        self,
        session: Session,
        draw: Callable[[Session], Iterator[T]],
        max_tokens: int,
        reuse: bool,
        n_rows: int = 0,
    ) -> Iterator[T]:
        """A run from a prompt, or several; it begins with its first token."""
        held, ids = self._session, session.tokens
        n = common_prefix(held.tokens[: held.n_rows], ids) if held and reuse else 0
        session.n_rows = min(n, len(ids) - 1)
        yield from self._go_on(session, draw, max_tokens, n_rows)

    def _continue(self, max_tokens: int, drafter: Drafter | None) -> Iterator[int]:
        """The run that is held when the first token is asked for."""
        draw = partial(self._runner.run, max_tokens=max_tokens, drafter=drafter)
        yield from self._go_on(self._continuable(), draw, max_tokens)

    def _go_on(
        self,
        session: Session,
        draw: Callable[[Session], Iterator[T]],
        max_tokens: int,
        n_rows: int = 0,
    ) -> Iterator[T]:
        self._runner.begin(self.params)
        if max_tokens:
            self._session = session
            yield from draw(session)
        else:
            reasons = ["length"] * n_rows
            self._runner.stats = RunStats(n_prompt=len(session.tokens), finish_reasons=reasons)

    def _continuable(self) -> Session:
        session = self._held()
        if session.options.constrained and session.constraint is None:
            raise EngineError(
                "the run that was saved had a constraint, which a file does not hold: begin it anew"
            )
        return session

    def _held(self) -> Session:
        if self._session is None:
            raise EngineError("there is no run to continue or to save: generate something first")
        return self._session

    def _checked(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = checked_ids(token_ids, self.cfg.n_vocab)
        check_prompt_fits(len(ids), self.n_ctx, self.cfg.n_ctx_train)
        return ids
