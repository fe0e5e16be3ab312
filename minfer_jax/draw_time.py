"""How long the sampler takes for a token, measured by itself: in a run it is part of decoding."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax.sampling import (
    WINDOW_EXTENDED,
    SamplerState,
    SamplingParams,
    init_state,
    sample,
    sample_extended,
)

DRAWS = 32  # of one call, so that what a call costs the host is no part of it
_CALLS = 5


def seconds_a_draw(sampling: SamplingParams, recent: list[int], n_vocab: int) -> float:
    """The median of a few calls on logits of a normal distribution.

    Args:
        sampling: how tokens are drawn.
        recent: the latest tokens, for the penalties.
        n_vocab: V.
    """
    if sampling.extended:
        args = sampling.extended_arrays(bias=np.zeros(n_vocab, np.float32))
        state = init_state(sampling, recent, window=WINDOW_EXTENDED)
    else:
        args, state = sampling.arrays(), init_state(sampling, recent)
    draw = sample_extended if sampling.extended else sample

    @jax.jit
    def several(
        logits: Float[Array, "1 V"], state: SamplerState, args: object
    ) -> tuple[Int[Array, " 1"], SamplerState]:
        def one(turn: Array, carry: tuple) -> tuple:
            # Tied to the last draw, or what depends on the logits alone would be done once for all.
            _, state, logits = lax.optimization_barrier((*carry, logits_of))
            return draw(logits, state, args)  # pyright: ignore

        logits_of = logits
        return lax.fori_loop(0, DRAWS, one, (jnp.zeros(1, jnp.int32), state))

    logits = np.random.default_rng(0).normal(0.0, 3.0, (1, n_vocab)).astype(np.float32)
    jax.block_until_ready(several(logits, state, args))
    times = []
    for _ in range(_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(several(logits, state, args))
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) / DRAWS


def timing_line(n: int, seconds: float, drawing: float) -> str:
    """minfer's line about decoding.

    Args:
        n: tokens that were drawn.
        seconds: that this took.
        drawing: of the sampler for each, at most what a token took.
    """
    each = seconds / n if n else 0.0
    drawing = min(drawing, each)
    share = 100 * drawing / each if each else 0.0
    rest = 100 - share if each else 0.0
    return (
        f"\n[MINFER_TIMING] over {n} tokens: sample {1e3 * drawing:6.2f} ms/tok ({share:4.1f}%), "
        f"forward {1e3 * (each - drawing):6.2f} ms/tok ({rest:4.1f}%)"
    )
