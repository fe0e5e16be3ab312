"""The programs that an engine runs: pure functions, each compiled for a number of tokens.

This is the one place that jits the model. What differs from run to run is data, so a program is
compiled once for its shape.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax import memory, program_cache
from minfer_jax.burst import BURST, Burst, drawing
from minfer_jax.decode_extended import decode_extended
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.kv_state import KVState, repeated
from minfer_jax.model.params import Params
from minfer_jax.sampling import SamplerArgs, SamplerState, sample

_cache_hits = 0  # of the compile cache, in this process


def _count_hits(event: str, **_: object) -> None:
    global _cache_hits
    _cache_hits += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_count_hits)

# On processors with 512-bit registers XLA uses half of each unless told; others it leaves alone.
_COMPILER_OPTIONS = {"cpu": {"xla_cpu_prefer_vector_width": 512}}

# On others (Metal) jax does not let a program write over its arguments, and warns if it is asked.
_DONATING = ("cpu", "gpu", "tpu")


def prefill(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    *,
    cfg: ModelConfig,
) -> tuple[KVState]:
    """Take tokens into the KV state, and compute nothing else."""
    return (forward(params, token_ids, positions, kv_state, cfg=cfg, n_out=0)[1],)


def decode(
    params: Params,
    token_ids: Int[Array, "B 1"],
    positions: Int[Array, "B 1"],
    kv_state: KVState,
    sampler: SamplerState,
    args: SamplerArgs,
    burst: Burst,
    *,
    cfg: ModelConfig,
) -> tuple[KVState, Int[Array, "B BURST"], Int[Array, "B 1"], Float[Array, "B V"], SamplerState]:
    """Run a token and draw the next, again and again.

    Several tokens a call: what a call costs the host, up to a tenth of a small model's token, is
    paid once. A token that stops, or the -1 of logits that are not finite, ends its row, before
    the first step too.

    Returns:
        (KV state, the tokens drawn with -1 after them, the last of each row, the logits that it was
        drawn from, sampler).
    """

    def draw(logits: Array, step: Array, kept: tuple) -> tuple[Array, tuple]:
        token, sampler = sample(logits, kept[1], args)
        return token, (logits, sampler)

    kept = jnp.zeros((token_ids.shape[0], cfg.n_vocab), jnp.float32), sampler
    kv_state, tokens, last, kept = drawing(
        params, token_ids, positions, kv_state, burst, draw, kept, cfg=cfg
    )
    return kv_state, tokens, last, *kept


def verify(
    params: Params,
    token_ids: Int[Array, "1 T"],
    positions: Int[Array, "1 T"],
    kv_state: KVState,
    sampler: SamplerState,
    args: SamplerArgs,
    *,
    cfg: ModelConfig,
) -> tuple[KVState, Int[Array, "1 T"]]:
    """Run a token and guesses of those after it at once, and draw for as long as they are right.

    A draw depends on logits, seed, number of draws and latest tokens: what is drawn is what
    `decode` would draw, at any temperature. Rows of wrong guesses stay in the KV state: the next
    call writes over the first of them, and the others are hidden by their position until then.

    Args:
        token_ids: the last token, then up to T - 1 guesses.
        positions: -1 where there are fewer.

    Returns:
        (KV state, the tokens drawn). The last of them is the first that is not as guessed, or the
        one after all guesses; -1 follows.
    """
    n = token_ids.shape[1]
    logits, kv_state = forward(
        params, token_ids, positions, kv_state, cfg=cfg, n_out=n, stepwise=True
    )
    guesses = jnp.where(positions < 0, -1, token_ids)[:, 1:]

    def goes_on(carry: tuple) -> Array:
        row, tokens, _ = carry
        before = jnp.maximum(row - 1, 0)
        drawn, guess = tokens[0, before], guesses[0, jnp.minimum(before, n - 2)]
        return (row == 0) | (row < n) & (drawn == guess) & (guess >= 0)

    def one(carry: tuple) -> tuple:
        row, tokens, sampler = carry
        here = lax.dynamic_index_in_dim(logits, row, axis=1, keepdims=False)
        token, sampler = sample(here, sampler, args)
        tokens = lax.dynamic_update_slice(tokens, token[:, None], (jnp.int32(0), row))
        return row + 1, tokens, sampler

    tokens = jnp.full((1, n), -1, jnp.int32)
    _, tokens, _ = lax.while_loop(goes_on, one, (jnp.int32(0), tokens, sampler))
    return kv_state, tokens


def all_logits(
    params: Params,
    token_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    kv_state: KVState,
    *,
    cfg: ModelConfig,
) -> tuple[KVState, Float[Array, "B T V"]]:
    """Run tokens and give the logits of every row."""
    n_out = token_ids.shape[1]
    logits, kv_state = forward(params, token_ids, positions, kv_state, cfg=cfg, n_out=n_out)
    return kv_state, logits


# How a program's name begins; the number of tokens follows where it varies.
_NAMES = {
    prefill: "prefill",
    decode: "decode",
    decode_extended: "decode extended",
    verify: "verify",
    all_logits: "logits",
}


@dataclass(frozen=True, kw_only=True)
class Compile:
    """One compiled program.

    Attributes:
        name: what it is and for how many tokens, such as "prefill 128".
        seconds: that tracing, lowering and compiling took.
        cached: whether compiling was spared, because the compile cache had it, or the whole program
            was kept.
    """

    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes a program anew, apart from those that an engine holds, and runs it.

    Attributes:
        trace: its first stage; `lower()` and `compile()` follow.
        arguments: for one call into an empty KV state, all of them new but the weights. The first
            result is the KV state, which takes the place of argument 3 in the next call.
        n_tokens: that a call runs, or draws.
    """

    trace: Callable[[], jax.stages.Traced]
    arguments: Callable[[], tuple]
    n_tokens: int


class Programs:
    """Compiles the functions above on first need, and runs them.

    Attributes:
        compiles: every program that was compiled, in order.
    """

    def __init__(self, cfg: ModelConfig, kv_shape: KVState) -> None:
        """Compiles nothing yet.

        Args:
            cfg: the model.
            kv_shape: shapes and dtypes of the KV state that will be given. A compile needs no more:
                done before the state is allocated, the two are never in memory at once.
        """
        self.compiles: list[Compile] = []
        self._cfg, self._kv_shape = cfg, kv_shape
        self._programs: dict[str, Callable[..., tuple]] = {}

    @property
    def seconds(self) -> float:
        """Spent compiling so far."""
        return sum(c.seconds for c in self.compiles)

    def compile(
        self, function: Callable, params: Params, n_tokens: int, *rest: object, batch: int = 1
    ) -> None:
        """Make sure that a function is compiled for so many tokens.

        Args:
            function: prefill, decode, decode_extended, verify or all_logits.
            params: weights, on one device.
            n_tokens: T.
            *rest: what the function takes after the KV state.
            batch: B.
        """
        if self.has(function, n_tokens, batch):
            return
        name = program_name(function, n_tokens, batch)
        begin, hits = time.perf_counter(), _cache_hits
        arguments = self._arguments(params, n_tokens, rest, batch)
        path = program_cache.find((name, self._cfg, _COMPILER_OPTIONS), arguments)
        program = program_cache.load(path, arguments) if path else None
        cached = program is not None
        if program is None:
            lowered = self.trace(function, params, n_tokens, *rest, batch=batch).lower()
            with program_cache.instead_of_xla_s(path):
                program = lowered.compile()
            cached = _cache_hits > hits
            if path and not cached:
                program_cache.save(path, program)
        self._programs[name] = program
        seconds = time.perf_counter() - begin
        self.compiles.append(Compile(name=name, seconds=seconds, cached=cached))
        memory.trim()

    def has(self, function: Callable, n_tokens: int, batch: int = 1) -> bool:
        """Whether a function is compiled for so many tokens of so many sequences."""
        return program_name(function, n_tokens, batch) in self._programs

    def trace(
        self, function: Callable, params: Params, n_tokens: int, *rest: object, batch: int = 1
    ) -> jax.stages.Traced:
        """The first stage of `compile`, of which nothing is kept; `lower()` and `compile()` follow.

        Args:
            function, params, n_tokens, *rest, batch: as for `compile`.
        """
        jitted = _jitted(partial(function, cfg=self._cfg), params, (3,))
        return jitted.trace(*self._arguments(params, n_tokens, rest, batch))

    def recipe(
        self,
        function: Callable,
        params: Params,
        n_tokens: int,
        *rest: object,
        empty: Callable[[], KVState],
    ) -> Recipe:
        """How to make a program and run it.

        Args:
            function, params, n_tokens, *rest: as for `compile`.
            empty: makes a KV state.
        """

        def arguments() -> tuple:
            tokens, positions = np.zeros((1, n_tokens), np.int32), np.arange(n_tokens)[None]
            return params, tokens, positions.astype(np.int32), empty(), *rest

        return Recipe(
            trace=partial(self.trace, function, params, n_tokens, *rest),
            arguments=arguments,
            n_tokens=BURST if function in (decode, decode_extended) else n_tokens,
        )

    def _arguments(self, params: Params, n_tokens: int, rest: tuple, batch: int) -> tuple:
        tokens = jax.ShapeDtypeStruct((batch, n_tokens), jnp.int32)
        kv_shape = self._kv_shape
        if batch > 1:
            kv_shape = jax.eval_shape(partial(repeated, batch=batch), kv_shape)
        return params, tokens, tokens, kv_shape, *rest

    def call(
        self,
        function: Callable,
        params: Params,
        tokens: np.ndarray | Array,
        positions: np.ndarray,
        kv_state: KVState,
        *rest: object,
    ) -> tuple:
        """Run a compiled function; the KV state is donated, and the first result is the new one."""
        n_batch, n_tokens = tokens.shape
        program = self._programs[program_name(function, n_tokens, n_batch)]
        return program(params, tokens, positions, kv_state, *rest)


def compile_other(
    name: str, function: Callable, arguments: tuple, donated: tuple[int, ...] = ()
) -> tuple[jax.stages.Compiled, Compile]:
    """Compile a function that is none of those above, for who keeps the program.

    Args:
        name: that it is known by.
        function: the first argument is weights.
        arguments: such as it will be called with.
        donated: those that it may write over.

    Returns:
        (the program, what it cost).
    """
    begin, hits = time.perf_counter(), _cache_hits
    program = _jitted(function, arguments[0], donated).lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    memory.trim()
    return program, Compile(name=name, seconds=seconds, cached=_cache_hits > hits)


def _jitted(function: Callable, params: Params, donated: tuple[int, ...]) -> Any:
    """A function as it is compiled for where the weights are."""
    platform = platform_of(params)
    return jax.jit(
        function,
        donate_argnums=donated if platform in _DONATING else (),
        compiler_options=_COMPILER_OPTIONS.get(platform),
    )


def platform_of(params: Params) -> str:
    """Where weights are, such as "cpu"."""
    return next(iter(jax.tree.leaves(params)[0].devices())).platform


def program_name(function: Callable, n_tokens: int, batch: int = 1) -> str:
    """What a function, compiled for so many tokens of so many sequences, is called."""
    name = _NAMES[function]
    if function not in (decode, decode_extended):
        name += f" {n_tokens}"
    return name if batch == 1 else f"{name} x{batch}"
