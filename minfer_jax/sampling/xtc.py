"""XTC, exclude top choices: now and then drop all likely tokens but the least likely of them."""

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates
from minfer_jax.sampling.draw import fold_in, uniform

_ID = -1  # of the random number; no token's


def xtc(
    candidates: Candidates,
    probability: jax.Array,
    threshold: jax.Array,
    key: tuple[jax.Array, jax.Array],
) -> Candidates:
    """Drops, with a probability, the tokens above the least likely one that reaches a threshold.

    Those equal to it stay. After llama.cpp's sampler of the name, by the writer p-e-w.

    Args:
        candidates: In either order.
        probability: float32 ``[B]``; 0 or less turns the step off.
        threshold: float32 ``[B]``; above 0.5 the step is off.
        key: Of this draw, from `draw_key`.

    Returns:
        The candidates left, of complete rows; at least one.
    """
    bits, _ = fold_in(key, jnp.full((probability.size, 1), _ID, jnp.int32))
    on = (uniform(bits)[:, 0] < probability) & (threshold <= 0.5)
    weights = jnp.exp(candidates.logits - candidates.top)
    mass = jnp.sum(weights, axis=1, keepdims=True)
    likely = (weights >= threshold[:, None] * mass) & (candidates.logits > -jnp.inf)
    least = jnp.min(jnp.where(likely, candidates.logits, jnp.inf), axis=1, keepdims=True)
    return candidates.keep((candidates.logits <= least) | ~on[:, None])
