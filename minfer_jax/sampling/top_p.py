"""Top-p, or nucleus sampling: keep the likeliest tokens that together exceed a probability."""

import jax
import jax.numpy as jnp
from jax import lax

from minfer_jax.sampling.candidates import Candidates, cut


def top_p(candidates: Candidates, p: jax.Array) -> Candidates:
    """Keeps tokens up to and including the one that makes their summed probability exceed p.

    Probabilities are those of the tokens left so far, at temperature 1; equally likely ones count
    by ascending id. Holtzman et al. 2020, "The curious case of neural text degeneration".

    Args:
        candidates: In either order.
        p: float32 ``[B]``; values outside (0, 1) turn the step off.

    Returns:
        The candidates left.
    """
    logits, ids = candidates.logits, candidates.ids
    on = (p > 0) & (p < 1)
    weights = jnp.exp(logits - candidates.top)
    total = _total(candidates, jnp.sum(weights, axis=1), on)
    logit, token = cut(candidates, weights, p * total, on)
    # Which of the tokens that equal the last candidate come first is known in complete rows only.
    closes = on & (logit > logits[:, -1:])[:, 0]
    kept = (logits > logit) | ((logits == logit) & (ids <= token))
    applies = (on & candidates.complete) | closes
    return candidates.keep(kept | ~applies[:, None], closes=closes)


def _total(candidates: Candidates, inside: jax.Array, wanted: jax.Array) -> jax.Array:
    """Sum of exp(logit - top) over the tokens left, those beyond the candidates included.

    The vocabulary is read only if a row asks for it: mostly top-k has left nothing beyond.
    """
    wanted = wanted & ~candidates.complete & candidates.decided
    whole = lax.cond(
        jnp.any(wanted),
        lambda: jnp.sum(jnp.exp(candidates.vocab_logits - candidates.top), axis=1),
        lambda: inside,
    )
    return jnp.where(wanted, jnp.maximum(whole, inside), inside)
