"""Temperature: flatten or sharpen the distribution."""

import dataclasses

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates

_LEAST = 1e-6
_FAR = 1e30


def greedy(temperature: jax.Array) -> jax.Array:
    """Which rows take the largest logit instead of drawing: bool ``[B]``, of float32 ``[B]``."""
    return temperature < _LEAST


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


def dynamic_temperature(
    candidates: Candidates,
    value: jax.Array,
    spread: jax.Array,
    exponent: jax.Array,
    keep_zero: jax.Array,
) -> Candidates:
    """Divides the logits by a temperature that grows with the entropy of the tokens left.

    ``t = low + (high - low) * (H / log(n)) ** exponent``, where n tokens are left, H is their
    entropy, low is ``max(value - spread, 0)`` and high ``value + spread``. After llama.cpp's
    sampler "temp-ext", from an idea by the writer kalomaze.

    Args:
        candidates: In either order.
        value: float32 ``[B]``; greedy rows are left undivided.
        spread: float32 ``[B]``; at 0 or less the temperature is `value`.
        exponent: float32 ``[B]``.
        keep_zero: bool ``[]``, whether a logit of 0 has to stay 0, because penalties are to come,
            which tell positive logits from negative ones; else the largest becomes 0.

    Returns:
        The same candidates, their logits ready for a softmax.
    """
    below = candidates.logits - candidates.top
    weights = jnp.exp(below)
    p = weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1.0)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=1)
    n = jnp.sum(below > -jnp.inf, axis=1, dtype=jnp.float32)
    part = jnp.clip(entropy / jnp.log(jnp.maximum(n, 2.0)), 0.0, 1.0)
    low = jnp.maximum(value - spread, 0.0)
    turned = low + (value + spread - low) * jnp.power(part, exponent)
    varies = (spread > 0) & (n > 1) & ~greedy(value)
    divisor = jnp.where(varies, jnp.maximum(turned, _LEAST), value)
    scaled = temperature(candidates, divisor)
    zero = candidates.top / jnp.where(greedy(divisor), 1.0, divisor)[:, None]
    zero = jnp.where(keep_zero, jnp.clip(zero, -_FAR, _FAR), 0.0)
    return dataclasses.replace(scaled, logits=scaled.logits + zero, top=scaled.top + zero)
