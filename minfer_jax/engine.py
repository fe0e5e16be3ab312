"""The engine: owns weights, KV state and compiled programs. Tokens in, tokens or logits out.

Every program has a fixed shape. A prompt runs through one prefill bucket (padded), long ones in
chunks of the largest; further tokens run through decode, several a call. What differs from run to
run is data: positions, sampler values.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float

from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.params import Params
from minfer_jax.programs import (
    BURST,
    STOPS,
    Burst,
    Compile,
    Programs,
    all_logits,
    decode,
    prefill,
    program_name,
)
from minfer_jax.sampling import SamplingParams, init_state

N_CTX = 4096  # positions of context, unless told
MAX_TOKENS = 512  # tokens of an answer, unless told
BUCKETS = (32, 128, 512)  # prompt lengths that a prefill is compiled for; the last is the chunk
_MAX_POSITIONS = 2**31 - 1  # positions are int32


class EngineError(ValueError):
    """What was asked cannot be run. One line."""


@dataclass(kw_only=True)
class RunStats:
    """What one run did.

    Attributes:
        n_prompt: tokens of the prompt.
        n_generated: tokens that were yielded.
        prefill_seconds: until the first token was drawn; compiling and allocating are not in it.
        decode_seconds: of all decode steps, the one that drew the first token included, and what
            the consumer did in between.
        total_seconds: until the latest token was drawn. That first step is in both of the others.
        compile_seconds: spent on programs that this run needed first.
        finish_reason: "length" (max_tokens or the context was reached), "stop", or
            "interrupted" where whoever consumes the run says so.
    """

    n_prompt: int = 0
    n_generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    compile_seconds: float = 0.0
    finish_reason: str = "length"

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.n_prompt / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second."""
        return self.n_generated / self.decode_seconds if self.decode_seconds else 0.0


def check_prompt_fits(n_prompt: int, n_ctx: int, n_ctx_train: int | None = None) -> None:
    """Refuse a prompt longer than the context.

    Raises:
        EngineError: says both lengths, and to raise n_ctx where the model's maximum allows it.
    """
    if n_prompt <= n_ctx:
        return
    hint = "shorten it"
    if n_ctx_train is not None and n_ctx < n_ctx_train:
        hint += f", or raise n_ctx (this model allows {n_ctx_train})"
    raise EngineError(f"the prompt has {n_prompt} tokens, but the context holds {n_ctx}: {hint}")


class Engine:
    """One model on one device, one sequence at a time.

    Attributes:
        params: the weights; usable with `minfer_jax.model.forward`.
        cfg: the model's configuration.
        n_ctx: positions that the KV state holds, fixed.
        stats: of the latest run of `generate_tokens`.
    """

    def __init__(self, params: Params, cfg: ModelConfig, *, n_ctx: int = N_CTX) -> None:
        """Allocates nothing yet: the KV state is made by the first run.

        Args:
            params: weights.
            cfg: their configuration.
            n_ctx: positions wanted; the model's own maximum bounds it.

        Raises:
            EngineError: n_ctx is below 1.
        """
        if n_ctx < 1:
            raise EngineError(f"n_ctx is {n_ctx}, expected at least 1")
        self.params = params
        self.cfg = cfg
        self.n_ctx = min(n_ctx, cfg.n_ctx_train, _MAX_POSITIONS)
        self.stats = RunStats()
        self._buckets = tuple(b for b in BUCKETS if b < self.n_ctx) or (self.n_ctx,)
        if self._buckets[-1] < min(self.n_ctx, BUCKETS[-1]):
            self._buckets += (self.n_ctx,)
        make = partial(kv.init, cfg, self.n_ctx, chunk=self._buckets[-1])
        self._new_kv: Callable[[], KVState] = jax.jit(make)
        self._kv_shape = jax.eval_shape(self._new_kv)
        self._programs = Programs(cfg, self._kv_shape)
        self._kv: KVState | None = None
        self._run = 0

    def generate_tokens(
        self,
        token_ids: Sequence[int],
        max_tokens: int = MAX_TOKENS,
        *,
        stop_ids: Sequence[int] | frozenset[int] = (),
        repeat_penalty: float = 1.0,
        **sampling: float,
    ) -> Iterator[int]:
        """Tokens that follow a prompt, one by one; a fast model draws some 40 ms of them at a time.

        Args:
            token_ids: the prompt, at least one token, at most n_ctx.
            max_tokens: how many to draw at most; fewer where the context ends.
            stop_ids: tokens that end the run; they are not yielded.
            repeat_penalty: as in SamplingParams, but off unless given: tokens are what the model
                says.
            **sampling: further fields of SamplingParams.

        Raises:
            EngineError: the prompt is empty, too long, or holds ids outside the vocabulary;
                max_tokens is negative; the model gives no finite logits; another run has begun
                meanwhile.
            ValueError: a sampling value is out of its range.
        """
        chosen = SamplingParams(repeat_penalty=repeat_penalty, **sampling)  # pyright: ignore
        ids = self._checked(token_ids)
        if max_tokens < 0:
            raise EngineError(f"max_tokens is {max_tokens}, expected 0 or more")
        return self._generate(ids, max_tokens, frozenset(stop_ids), chosen)

    def logits(
        self, token_ids: Sequence[int], chunk: int | None = None
    ) -> Float[np.ndarray, "T V"]:
        """What the model says after each token of a text.

        Args:
            token_ids: at most n_ctx.
            chunk: tokens that one call runs; None for the largest prefill, 1 for the decode
                program.

        Returns:
            float32 [len(token_ids), V].

        Raises:
            EngineError: as for generate_tokens, or chunk is out of range.
        """
        ids = self._checked(token_ids)
        longest = self._buckets[-1]
        if chunk is not None and not 1 <= chunk <= longest:
            raise EngineError(f"chunk is {chunk}, expected 1 to {longest}")
        self._run += 1
        out = np.empty((len(ids), self.cfg.n_vocab), np.float32)
        chosen = SamplingParams(temperature=0.0)
        args, sampler = chosen.arrays(), init_state(chosen, [])
        size = longest if chunk is None else chunk
        bucket = self._bucket(min(size, len(ids)))
        if chunk == 1:
            self._programs.compile(decode, self.params, 1, sampler, args, _burst(1))
        else:
            self._programs.compile(all_logits, self.params, bucket)
        self._reset()
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            if chunk == 1:
                position = _at(start)
                *_, logits, sampler = self._call(
                    decode, part[None], position, sampler, args, _burst(1)
                )
                out[start] = np.asarray(logits)[0]
            else:
                (logits,) = self._call(all_logits, *self._padded(part, start, bucket))
                out[start : start + len(part)] = np.asarray(logits)[0, : len(part)]
        if np.isnan(out[:, 0]).any():
            self._kv = None  # as in _generate
        return out

    @property
    def compiles(self) -> list[Compile]:
        """Every program that was compiled, in order."""
        return self._programs.compiles

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        return sum(c.seconds for c in self.compiles)

    def traces(self) -> dict[str, Callable[[], jax.stages.Traced]]:
        """Every program that runs may need, by name: what traces it, anew at each call."""
        chosen = SamplingParams(temperature=0.0)
        rest = init_state(chosen, []), chosen.arrays(), _burst(1)
        programs = [(prefill, n, ()) for n in self._buckets]
        programs += [(decode, 1, rest), (all_logits, self._buckets[-1], ())]
        return {
            program_name(function, n): partial(
                self._programs.trace, function, self.params, n, *others
            )
            for function, n, others in programs
        }

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV state, whether or not it is allocated yet."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self._kv_shape))

    def _generate(
        self, ids: np.ndarray, max_tokens: int, stop_ids: frozenset[int], chosen: SamplingParams
    ) -> Iterator[int]:
        self._run += 1
        run = self._run
        stats = self.stats = RunStats(n_prompt=len(ids))
        if not max_tokens:
            return
        args, sampler = chosen.arrays(), init_state(chosen, ids.tolist())
        room = min(max_tokens, self.n_ctx - len(ids) + 1)
        bucket = self._bucket(len(ids) - 1)
        compiled = self.compile_seconds
        if len(ids) > 1:
            self._programs.compile(prefill, self.params, bucket)
        self._programs.compile(decode, self.params, 1, sampler, args, _burst(1))
        stats.compile_seconds = self.compile_seconds - compiled
        self._reset()

        begin = time.perf_counter()
        # All tokens but the last are prefilled. The last goes through decode, as every later one
        # does: so the prefill needs neither the output layer nor the sampler.
        for start in range(0, len(ids) - 1, bucket):
            end = min(start + bucket, len(ids) - 1)
            self._call(prefill, *self._padded(ids[start:end], start, bucket))

        jax.block_until_ready(self._kv)
        decode_begin = time.perf_counter()
        # A call is sent off before the tokens that it continues are read: the device never waits
        # for the host.
        first = _burst(1)  # the prompt's last token may be one that stops: it does not stop here
        pace, asked, steps = _Pace(), 1, 1
        tokens, last, _, sampler = self._call(
            decode, ids[None, -1:], _at(len(ids) - 1), sampler, args, first
        )
        while steps:
            after, following = min(pace.steps, room - asked), tokens
            if after:
                position = _at(len(ids) - 1 + asked)
                following, last, _, sampler = self._call(
                    decode, last, position, sampler, args, _burst(after, stop_ids)
                )
            drawn = np.asarray(tokens)[0, :steps].tolist()
            pace.read(steps)
            for token in drawn:
                if token < 0:
                    at = len(ids) + stats.n_generated - 1
                    self._kv = None  # NaN in it would get into later runs, as 0 times NaN is NaN
                    raise EngineError(f"the model gave no finite logits at position {at}")
                now = time.perf_counter()
                if not stats.n_generated:
                    stats.prefill_seconds = now - begin
                if token in stop_ids:
                    stats.finish_reason = "stop"
                    return
                stats.n_generated += 1
                stats.decode_seconds, stats.total_seconds = now - decode_begin, now - begin
                yield token
                if run != self._run:
                    raise EngineError("this run was overtaken by another on the same engine")
            asked, steps, tokens = asked + after, after, following

    def _call(
        self, function: Callable, tokens: np.ndarray | Array, positions: np.ndarray, *rest: object
    ) -> list:
        """Run a program on the KV state, which it replaces; its other results."""
        assert self._kv is not None
        self._kv, *others = self._programs.call(
            function, self.params, tokens, positions, self._kv, *rest
        )
        return others

    def _bucket(self, n_tokens: int) -> int:
        """The smallest bucket that holds the tokens, or the largest."""
        return next((b for b in self._buckets if b >= n_tokens), self._buckets[-1])

    def _padded(self, ids: np.ndarray, start: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, positions), int32 [1, bucket] each; padding is token 0 at position -1."""
        tokens = np.zeros((1, bucket), np.int32)
        positions = np.full((1, bucket), -1, np.int32)
        tokens[0, : len(ids)] = ids
        positions[0, : len(ids)] = np.arange(start, start + len(ids))
        return tokens, positions

    def _reset(self) -> None:
        """Empty the KV state. Old keys and values may stay: only positions make them visible."""
        # Interrupted in the middle of a call, the state may be given away and no new one kept.
        if self._kv is None or any(a.is_deleted() for a in jax.tree.leaves(self._kv)):
            try:
                self._kv = self._new_kv()
            except jax.errors.JaxRuntimeError as e:
                raise EngineError(
                    f"no memory for the KV state of {self.n_ctx} positions "
                    f"({self.kv_bytes / 1e6:.0f} MB): lower n_ctx"
                ) from e
        empty = [np.full(held.shape, -1, np.int32) for held in self._kv.positions]
        kv_state = dataclasses.replace(self._kv, positions=tuple(jax.device_put(empty)))
        self._kv = jax.block_until_ready(kv_state)

    def _checked(self, token_ids: Sequence[int]) -> np.ndarray:
        try:
            ids = np.asarray(token_ids)
        except ValueError:  # nested, and of several lengths
            ids = np.asarray(token_ids, object)
        if ids.size == 0:
            raise EngineError("the prompt holds no tokens; give at least one")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise EngineError(
                f"token_ids is {ids.dtype} {list(ids.shape)}, expected a list of integers"
            )
        wrong = ids[(ids < 0) | (ids >= self.cfg.n_vocab)]
        if wrong.size:
            raise EngineError(
                f"token id {wrong[0]} is outside the vocabulary of {self.cfg.n_vocab}"
            )
        check_prompt_fits(len(ids), self.n_ctx, self.cfg.n_ctx_train)
        return ids.astype(np.int32)


class _Pace:
    """How many tokens a call should draw: what takes about as long as a frame on the screen.

    Tokens then come as if one by one, while the host's part of a call, some tenths of a
    millisecond, is shared among them. A large model draws one a call.
    """

    FRAME = 0.04  # seconds

    def __init__(self) -> None:
        self.steps = 1
        self._then = time.perf_counter()

    def read(self, steps: int) -> None:
        """To be called when the tokens of a call of so many steps were read."""
        now = time.perf_counter()
        each = max((now - self._then) / steps, 1e-6)
        self.steps = max(1, min(BURST, int(self.FRAME / each)))
        self._then = now


def _burst(steps: int, stop_ids: frozenset[int] = frozenset()) -> Burst:
    """Those of the stop ids that fit; of others the engine takes note when it reads them."""
    known = np.full(STOPS, -1, np.int32)
    real = sorted(i for i in stop_ids if 0 <= i < _MAX_POSITIONS)
    some = real[: STOPS - 1]  # a -1 stays: the token of logits that are not finite
    known[: len(some)] = some
    return Burst(steps=np.int32(steps), stop_ids=known)  # pyright: ignore


def _at(position: int) -> np.ndarray:
    return np.array([[position]], np.int32)
