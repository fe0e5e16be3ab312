"""Logarithms of probabilities, of the token that was drawn and of the likeliest."""

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import drawable, largest


def logprobs(
    logits: jax.Array, tokens: jax.Array, k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the model itself says: the log-softmax of its logits, before any step of the sampler.

    Args:
        logits: float32 ``[B, V]``, as the model gives them.
        tokens: int32 ``[B]``; -1 where none was drawn.
        k: Static. How many of the likeliest to give, V at most.

    Returns:
        float32 ``[B]``, of the tokens, 0 where there is none; int32 ``[B, k]``, the likeliest, in
        descending order; float32 ``[B, k]``, theirs.
    """
    logits = drawable(logits)
    best = largest(logits, max(k, 1))
    total = jnp.sum(jnp.exp(logits - best.top), axis=1, keepdims=True)
    mass = jnp.log(jnp.maximum(total, 1.0))  # a row of -inf alone has a total of 0
    drawn = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=1)
    of_tokens = jnp.where(tokens >= 0, (drawn - best.top - mass)[:, 0], 0.0)
    return of_tokens, best.ids[:, :k], best.logits[:, :k] - best.top - mass
