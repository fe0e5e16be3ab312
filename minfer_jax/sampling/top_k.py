"""Top-k: keep the k largest logits."""

import dataclasses

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates, cut


def top_k(candidates: Candidates, k: jax.Array) -> Candidates:
    """Drops every logit smaller than the k-th largest; those equal to it stay.

    Args:
        candidates: In either order.
        k: int32 ``[B]``; 0 and V or more turn the step off.

    Returns:
        The candidates left.
    """
    logits = candidates.logits
    on = (k > 0) & (k < candidates.vocab_logits.shape[1])
    kth, _ = cut(candidates, None, (k - 1).astype(jnp.float32), on)
    # Tokens beyond may equal the last candidate, so only a k-th above it rules them out.
    closes = on & (logits[:, -1] < kth[:, 0])
    left = candidates.keep((logits >= kth) | ~on[:, None], closes=closes)
    # An unknown number of tokens beyond survives: what later steps need, their mass, is lost.
    return dataclasses.replace(left, decided=left.decided & (left.complete | ~on))
