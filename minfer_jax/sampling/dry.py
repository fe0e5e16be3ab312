"""DRY, don't repeat yourself: make tokens less likely that would go on with a repetition."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minfer_jax.sampling.args import packed

BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's sequence breakers."""

_LOG_MAX = math.log(float(np.finfo(np.float32).max))


def breaker_tokens(pieces: Sequence[bytes], breakers: Sequence[str] = BREAKERS) -> np.ndarray:
    """Finds the tokens that break a sequence: those whose text contains a breaker.

    llama.cpp also lets a breaker begin in one token and end in the next.

    Args:
        pieces: Each token's text.
        breakers: Texts, of which empty ones count for nothing.

    Returns:
        uint32 ``[ceil(V / 32)]``, bit i of word w set where token 32 w + i breaks.
    """
    wanted = [text.encode() for text in breakers if text]
    flags = (any(text in piece for text in wanted) for piece in pieces)
    return packed(np.fromiter(flags, bool, len(pieces)))


def dry(
    logits: jax.Array,
    recent: jax.Array,
    multiplier: jax.Array,
    base: jax.Array,
    allowed: jax.Array,
    last_n: jax.Array,
    breakers: jax.Array,
) -> jax.Array:
    """Takes ``multiplier * base ** (n - allowed)`` from tokens that followed the last n before.

    The last n tokens, none of them a breaker, stand somewhere before in the window, and the token
    came right after them. Where it did so several times, the largest n counts; below `allowed` it
    costs nothing. Breakers are never penalised.

        window     a b c c b c y a b c           after "a b c" came c: n = 3
        n          0 0 3 1 0 2 0 0 0             after "b c" came y: n = 2; after "c" came b: n = 1

    After llama.cpp's sampler of the name, by the writer p-e-w.

    Args:
        logits: float32 ``[B, V]``, drawable.
        recent: int32 ``[B, W]``, the newest last; -1 where there is none, at the beginning.
        multiplier: float32 ``[B]``; 0 turns the step off.
        base: float32 ``[B]``; below 1 the step is off.
        allowed: int32 ``[B]``, tokens that may be repeated freely.
        last_n: int32 ``[B]``, how much of the window counts; negative is all.
        breakers: uint32 ``[ceil(V / 32)]``, from `breaker_tokens`.

    Returns:
        float32 ``[B, V]``, drawable.
    """
    batch, vocab = logits.shape
    newest = recent[:, ::-1]  # B W: place i is i tokens back
    n = jnp.sum(newest >= 0, axis=1, dtype=jnp.int32)
    n = jnp.where(last_n >= 0, jnp.minimum(n, last_n), n)[:, None]
    place = lax.broadcasted_iota(jnp.int32, newest.shape, 1)
    breaks = _has_bit(breakers, newest)
    unbroken = jnp.min(jnp.where(breaks & (place < n), place, n), axis=1, keepdims=True)

    # Place i of these: what came right before the token i back is as many tokens as are at the end.
    lengths = _repeats(newest, jnp.minimum(unbroken, n - 1 - place))
    penalised = (lengths >= allowed[:, None]) & (place < n - 1) & ~breaks
    penalised &= (unbroken >= allowed[:, None]) & (n > allowed[:, None])
    penalised &= ((multiplier != 0) & (base >= 1))[:, None]

    excess = (lengths - allowed[:, None]).astype(jnp.float32)
    limit = jnp.where(base > 1.000001, jnp.floor(_LOG_MAX / jnp.log(base)), jnp.inf)[:, None]
    penalty = multiplier[:, None] * jnp.power(base[:, None], jnp.minimum(excess, limit))
    old = jnp.take_along_axis(logits, newest, axis=1, mode="clip")
    rows = jnp.arange(batch)[:, None]
    places = jnp.where(penalised & (newest >= 0), newest, vocab)
    return logits.at[rows, places].min(old - penalty, mode="drop")


def _repeats(newest: jax.Array, limit: jax.Array) -> jax.Array:
    """How many tokens before the one at each place are those at the end.

    As many turns as the longest repetition has tokens: W at most, few as a rule.

    Args:
        newest: int32 ``[B, W]``, the newest first.
        limit: int32 ``[B, W]``, where to stop counting; below W.

    Returns:
        int32 ``[B, W]``, the largest n, up to the limit, such that ``newest[i + 1 + j] ==
        newest[j]`` for all j below n.
    """
    width = newest.shape[1]
    padded = jnp.pad(newest, ((0, 0), (0, width)), constant_values=-1)

    def count(carry: tuple) -> tuple:
        n, lengths, alike = carry
        here = lax.dynamic_slice_in_dim(newest, n, 1, axis=1)
        there = lax.dynamic_slice_in_dim(padded, n + 1, width, axis=1)
        alike &= (there == here) & (n < limit)
        return n + 1, lengths + alike.astype(jnp.int32), alike

    start = (jnp.int32(0), jnp.zeros(newest.shape, jnp.int32), limit > 0)
    _, lengths, _ = lax.while_loop(lambda carry: jnp.any(carry[2]), count, start)
    return lengths


def _has_bit(words: jax.Array, ids: jax.Array) -> jax.Array:
    """Whether tokens are set in a packed mask: bool ``[B, W]``; those outside of it are not."""
    places = jnp.where(ids >= 0, ids // 32, words.size)
    found = jnp.take(words, places, mode="fill", fill_value=0)
    return (found >> (ids & 31).astype(jnp.uint32)) & 1 != 0
