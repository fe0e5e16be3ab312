"""Locally typical sampling: keep tokens about as surprising as the distribution is on average."""

import dataclasses

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates, cut


def typical(candidates: Candidates, p: jax.Array) -> Candidates:
    """Keeps the tokens nearest to the entropy, up to the one that makes their sum exceed p.

    Near is ``|-log(p_i) - H|``, where H is the entropy of the tokens left so far, at temperature
    1; of equally near ones the lower id comes first. Meister et al. 2022, "Locally typical
    sampling".

    Args:
        candidates: In either order.
        p: float32 ``[B]``; values outside (0, 1) turn the step off.

    Returns:
        The candidates left, of complete rows: what lies beyond may be more typical. The likeliest
        may have been dropped.
    """
    on = (p > 0) & (p < 1)
    weights = jnp.exp(candidates.logits - candidates.top)
    mass = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1.0)
    surprise = jnp.log(mass) - (candidates.logits - candidates.top)
    alive = weights > 0
    terms = jnp.where(alive, weights / mass * surprise, 0.0)
    entropy = jnp.sum(terms, axis=1, keepdims=True)
    nearness = jnp.where(alive, -jnp.abs(surprise - entropy), -jnp.inf)
    ranked = dataclasses.replace(candidates, logits=nearness + 0.0, descending=False)  # no -0
    least, token = cut(ranked, weights, p * mass[:, 0], on)
    kept = (ranked.logits > least) | ((ranked.logits == least) & (candidates.ids <= token))
    return candidates.keep(kept | ~on[:, None])
