"""The engine: owns weights, KV state and compiled programs. Tokens in, tokens or logits out.

Every program has a fixed shape. A prompt runs through one prefill bucket (padded), long ones in
chunks of the largest; each further token runs through decode. What differs from run to run is data:
positions, sampler values.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from minfer_jax import memory
from minfer_jax.model import kv_state as kv
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.params import Params
from minfer_jax.sampling import SamplerArgs, SamplerState, SamplingParams, init_state, sample

BUCKETS = (32, 128, 512)  # prompt lengths that a prefill is compiled for; the last is the chunk
# On processors with 512-bit registers XLA uses half of each unless told; elsewhere this changes
# nothing.
_COMPILER_OPTIONS = {"cpu": {"xla_cpu_prefer_vector_width": 512}}


class EngineError(ValueError):
    """What was asked cannot be run. One line."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """One compiled program: its name, and the seconds that tracing, lowering and compiling took."""

    name: str
    seconds: float


@dataclass(kw_only=True)
class RunStats:
    """What one run did. Seconds of compiling are in none of the other two.

    `finish_reason` is "length" (max_tokens or the context was reached) or "stop".
    """

    n_prompt: int = 0
    n_generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    finish_reason: str = "length"


def step(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    sampler: SamplerState,
    args: SamplerArgs,
    *,
    cfg: ModelConfig,
) -> tuple[Int[Array, "B 1"], Float[Array, "B V"], KVState, SamplerState]:
    """Run tokens and draw the next one: (next token, the logits it was drawn from, new states)."""
    logits, kv_state = forward(params, token_ids, positions, kv_state, cfg=cfg)
    token, sampler = sample(logits[:, 0], sampler, args)
    return token[:, None], logits[:, 0], kv_state, sampler


def all_logits(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    *,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B T V"], KVState]:
    """Run tokens and give the logits of every row."""
    return forward(params, token_ids, positions, kv_state, cfg=cfg, n_out=token_ids.shape[1])


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
    """One model, one sequence at a time.

    Attributes:
        params: the weights; usable with `minfer_jax.model.forward`.
        cfg: the model's configuration.
        n_ctx: positions that the KV state holds, fixed.
        compiles: every program that was compiled, in order.
        stats: of the latest run of `generate_tokens`.
    """

    def __init__(self, params: Params, cfg: ModelConfig, *, n_ctx: int = 4096) -> None:
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
        self.n_ctx = min(n_ctx, cfg.n_ctx_train)
        self.compiles: list[Compile] = []
        self.stats = RunStats()
        self._buckets = tuple(b for b in BUCKETS if b < self.n_ctx) or (self.n_ctx,)
        if self._buckets[-1] < min(self.n_ctx, BUCKETS[-1]):
            self._buckets += (self.n_ctx,)
        self._programs: dict[str, Callable[..., tuple]] = {}
        self._kv_shape = jax.eval_shape(partial(kv.init, cfg, self.n_ctx, chunk=BUCKETS[-1]))
        self._kv: KVState | None = None
        self._run = 0

    def generate_tokens(
        self,
        token_ids: Sequence[int],
        max_tokens: int = 512,
        *,
        stop_ids: Sequence[int] | frozenset[int] = (),
        repeat_penalty: float = 1.0,
        **sampling: float,
    ) -> Iterator[int]:
        """Tokens that follow a prompt, one by one as they are drawn.

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
            self._compile(step, 1, sampler, args)
        else:
            self._compile(all_logits, bucket)
        self._reset()
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            if chunk == 1:
                position = np.array([[start]], np.int32)
                _, logits, sampler = self._step(part[None], position, sampler, args)
                out[start] = np.asarray(logits)[0]
            else:
                logits, self._kv = self._call(all_logits, *self._padded(part, start, bucket))
                out[start : start + len(part)] = np.asarray(logits)[0, : len(part)]
        return out

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        return sum(c.seconds for c in self.compiles)

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
        clock = _Clock(self)
        for t in (self._bucket(len(ids)), 1)[: min(room, 2)]:
            self._compile(step, t, sampler, args)
        self._reset()
        next_token, sampler = self._prefill(ids, sampler, args)
        token = _only(next_token)
        stats.prefill_seconds, stats.compile_seconds = clock.read()

        clock = _Clock(self)
        for n in range(1, room + 1):
            if token < 0:
                at = len(ids) + n - 2
                raise EngineError(f"the model gave no finite logits at position {at}")
            if token in stop_ids:
                stats.finish_reason = "stop"
                return
            if n < room:  # the next step is on its way before this token is handed out
                position = np.array([[len(ids) + n - 1]], np.int32)
                next_token, _, sampler = self._step(next_token, position, sampler, args)
            stats.n_generated = n
            stats.decode_seconds, _ = clock.read()
            yield token
            if run != self._run:
                raise EngineError("this run was overtaken by another on the same engine")
            if n < room:
                token = _only(next_token)

    def _prefill(
        self, ids: np.ndarray, sampler: SamplerState, args: SamplerArgs
    ) -> tuple[Array, SamplerState]:
        """Run a prompt from position 0 on; the token that follows, and the sampler after it."""
        bucket = self._bucket(len(ids))
        token, after = None, sampler
        for start in range(0, len(ids), bucket):
            tokens, positions = self._padded(ids[start : start + bucket], start, bucket)
            # Only the last chunk's draw counts: every chunk starts from a copy of the same sampler.
            fresh = jax.tree.map(np.asarray, sampler)
            token, _, after = self._step(tokens, positions, fresh, args)
        assert token is not None
        return token, after

    def _step(
        self,
        tokens: np.ndarray | Array,
        positions: np.ndarray,
        sampler: SamplerState,
        args: SamplerArgs,
    ) -> tuple[Array, Array, SamplerState]:
        """One call of `step`: (next token [1, 1], logits [1, V], sampler)."""
        token, logits, self._kv, sampler = self._call(step, tokens, positions, sampler, args)
        return token, logits, sampler

    def _call(
        self, function: Callable, tokens: np.ndarray | Array, positions: np.ndarray, *rest: object
    ) -> tuple:
        """Run a compiled function on the KV state, which is donated."""
        program = self._programs[_name(function, tokens.shape[1])]
        return program(self.params, tokens, positions, self._kv, *rest)

    def _compile(self, function: Callable, t: int, *rest: object) -> None:
        """Make sure that a function is compiled for t tokens.

        Needs only the shape of the KV state: compiled before that is allocated, the two are never
            in memory at once.
        """
        name = _name(function, t)
        if name in self._programs:
            return
        begin = time.perf_counter()
        platform = jax.tree.leaves(self.params)[0].device.platform
        jitted = jax.jit(
            partial(function, cfg=self.cfg),
            donate_argnums=3,
            compiler_options=_COMPILER_OPTIONS.get(platform),
        )
        tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)
        lowered = jitted.lower(self.params, tokens, tokens, self._kv_shape, *rest)
        self._programs[name] = lowered.compile()
        self.compiles.append(Compile(name=name, seconds=time.perf_counter() - begin))
        memory.trim()

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
        if self._kv is None:
            self._kv = kv.init(self.cfg, self.n_ctx, chunk=BUCKETS[-1])
        empty = [np.full(held.shape, -1, np.int32) for held in self._kv.positions]
        self._kv = dataclasses.replace(self._kv, positions=tuple(jax.device_put(empty)))

    def _checked(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = np.asarray(token_ids)
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


class _Clock:
    """Seconds since it was made, less and beside those that the engine spent compiling."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begin, self._compiled = time.perf_counter(), engine.compile_seconds

    def read(self) -> tuple[float, float]:
        compiling = self._engine.compile_seconds - self._compiled
        return time.perf_counter() - self._begin - compiling, compiling


def _name(function: Callable, t: int) -> str:
    if function is all_logits:
        return f"logits {t}"
    return "decode" if t == 1 else f"prefill {t}"


def _only(token: Array) -> int:
    return int(np.asarray(token)[0, 0])
