"""Repeat, frequency and presence penalties."""

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import drawable


def penalties(
    logits: jax.Array,
    recent: jax.Array,
    repeat: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Makes recent tokens less likely.

    For each distinct token in the window, seen c times: ``l -= c * frequency``, then
    ``l -= presence``, then, if repeat > 1, ``l = l * repeat`` where l <= 0 and ``l / repeat``
    elsewhere.

    Args:
        logits: float32 ``[B, V]``, drawable.
        recent: int32 ``[B, W]``; ids outside the vocabulary are ignored.
        repeat: float32 ``[B]``.
        frequency: float32 ``[B]``.
        presence: float32 ``[B]``.

    Returns:
        float32 ``[B, V]``, drawable.
    """
    batch, vocab = logits.shape
    counts = jnp.sum(recent[:, :, None] == recent[:, None, :], axis=2, dtype=jnp.int32)  # B W
    old = jnp.take_along_axis(logits, recent, axis=1, mode="clip")
    new = old - counts.astype(jnp.float32) * frequency[:, None] - presence[:, None]
    repeat = jnp.maximum(repeat, 1.0)[:, None]
    new = jnp.where(new <= 0, new * repeat, new / repeat)
    # A token that is there twice is written twice, with the same value. Ids outside the vocabulary
    # are dropped, once negative ones, which would count from the end, are moved beyond it.
    rows = jnp.arange(batch)[:, None]
    places = jnp.where(recent >= 0, recent, vocab)
    return logits.at[rows, places].set(drawable(new), mode="drop")
