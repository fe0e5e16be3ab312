"""Temperature: flatten or sharpen the distribution."""

import dataclasses

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates


def greedy(temperature: jax.Array) -> jax.Array:
    """Which rows take the largest logit instead of drawing: bool ``[B]``, of float32 ``[B]``."""
    return temperature < 1e-6


def temperature(candidates: Candidates, value: jax.Array) -> Candidates:
    """Divides the logits by the temperature, after setting the largest to 0 against overflow.

    Args:
        candidates: In any order.
        value: float32 ``[B]``; greedy rows are left undivided.

    Returns:
        The same candidates, their logits ready for a softmax.
    """
    divisor = jnp.where(greedy(value), 1.0, value)[:, None]
    below = candidates.logits - candidates.top
    # Not for -inf: XLA multiplies by the reciprocal, which may be 0, and -inf times 0 is NaN.
    logits = jnp.where(below > -jnp.inf, below / divisor, below)
    return dataclasses.replace(candidates, logits=logits, top=jnp.zeros_like(candidates.top))
