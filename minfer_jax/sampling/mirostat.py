"""Mirostat 2.0: hold the surprise of the text at a target, by a bound that follows it."""

import math

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates


def mirostat(candidates: Candidates, mu: jax.Array) -> Candidates:
    """Drops tokens whose surprise, in bits, exceeds the bound; the likeliest always stay.

    Basu et al. 2021, "Mirostat: a neural text decoding algorithm that directly controls
    perplexity", in llama.cpp's second version.

    Args:
        candidates: In either order, scaled by the temperature.
        mu: float32 ``[B]``, the bound.

    Returns:
        The candidates left, of complete rows.
    """
    below = candidates.logits - candidates.top
    mass = jnp.maximum(jnp.sum(jnp.exp(below), axis=1, keepdims=True), 1.0)
    least = jnp.log(mass) - mu[:, None] * math.log(2)
    return candidates.keep((below >= least) | (below >= 0))


def surprise(candidates: Candidates, tokens: jax.Array) -> jax.Array:
    """How surprising drawn tokens were among those that were left: ``-log2(p)``.

    Args:
        candidates: What was drawn from.
        tokens: int32 ``[B]``.

    Returns:
        float32 ``[B]``; +inf where the token was not among them.
    """
    mass = jnp.sum(jnp.exp(candidates.logits - candidates.top), axis=1)
    drawn = candidates.ids == tokens[:, None]
    logit = jnp.max(jnp.where(drawn, candidates.logits, -jnp.inf), axis=1)
    return (jnp.log(mass) - (logit - candidates.top[:, 0])) / math.log(2)


def follow(mu: jax.Array, observed: jax.Array, tau: jax.Array, eta: jax.Array) -> jax.Array:
    """Moves the bound against the error: ``mu - eta (observed - tau)``.

    Args:
        mu: float32 ``[B]``.
        observed: float32 ``[B]``, the surprise of the token drawn; the bound stays where it is
            not finite.
        tau: float32 ``[B]``, the surprise that is wanted, in bits.
        eta: float32 ``[B]``, how fast to follow.

    Returns:
        float32 ``[B]``, the bound for the next token.
    """
    return jnp.where(jnp.isfinite(observed), mu - eta * (observed - tau), mu)
