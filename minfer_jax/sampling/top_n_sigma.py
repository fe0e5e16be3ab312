"""Top-n-sigma: keep logits that lie within n standard deviations of the largest."""

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates


def top_n_sigma(candidates: Candidates, n: jax.Array) -> Candidates:
    """Drops tokens whose logit is below the largest less n standard deviations of all left.

    Tang et al. 2024, "Top-n-sigma: not all logits are you need".

    Args:
        candidates: In either order.
        n: float32 ``[B]``; 0 or less turns the step off.

    Returns:
        The candidates left, of complete rows: what lies beyond would count.
    """
    alive = candidates.logits > -jnp.inf
    below = jnp.where(alive, candidates.logits - candidates.top, 0.0)
    count = jnp.maximum(jnp.sum(alive, axis=1, dtype=jnp.float32), 1.0)
    mean = jnp.sum(below, axis=1) / count
    squares = jnp.where(alive, jnp.square(below - mean[:, None]), 0.0)
    deviation = jnp.sqrt(jnp.sum(squares, axis=1) / count)
    kept = below >= -(n * deviation)[:, None]
    return candidates.keep(kept | (n <= 0)[:, None])
