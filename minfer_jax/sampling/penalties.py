"""Repeat, frequency and presence penalties."""

import jax
import jax.numpy as jnp
from jax import lax

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
    counts = _counts(recent, vocab)
    old = jnp.take_along_axis(logits, recent, axis=1, mode="clip")
    new = old - counts.astype(jnp.float32) * frequency[:, None] - presence[:, None]
    repeat = jnp.maximum(repeat, 1.0)[:, None]
    new = jnp.where(new <= 0, new * repeat, new / repeat)
    # A token that is there twice is written twice, with the same value. Ids outside the vocabulary
    # are dropped, once negative ones, which would count from the end, are moved beyond it.
    rows = jnp.arange(batch)[:, None]
    places = jnp.where(recent >= 0, recent, vocab)
    return logits.at[rows, places].set(drawable(new), mode="drop")


def within(recent: jax.Array, last_n: jax.Array) -> jax.Array:
    """The newest tokens of a window alone.

    Args:
        recent: int32 ``[B, W]``, the newest last.
        last_n: int32 ``[B]``, how many to keep; negative is all.

    Returns:
        int32 ``[B, W]``, -1 in place of the others.
    """
    age = recent.shape[1] - lax.broadcasted_iota(jnp.int32, recent.shape, 1)
    last_n = last_n[:, None]
    return jnp.where((age <= last_n) | (last_n < 0), recent, -1)


def _counts(recent: jax.Array, vocab: int) -> jax.Array:
    """How often each token of the window is in it: int32 ``[B, W]``.

    Each is compared with each in a short window; with 1024 tokens that would take 0.4 ms. So those
    of a long one are counted over the vocabulary.
    """
    batch, width = recent.shape
    if width <= 128:
        return jnp.sum(recent[:, :, None] == recent[:, None, :], axis=2, dtype=jnp.int32)
    rows = jnp.arange(batch)[:, None]
    places = jnp.where(recent >= 0, recent, vocab)
    counts = jnp.zeros((batch, vocab), jnp.int32).at[rows, places].add(1, mode="drop")
    return jnp.take_along_axis(counts, recent, axis=1, mode="clip")
