"""Min-p: keep tokens that are not too unlikely next to the likeliest."""

import dataclasses

import jax
import jax.numpy as jnp

from minfer_jax.sampling.candidates import Candidates


def min_p(candidates: Candidates, p: jax.Array) -> Candidates:
    """Drops tokens whose probability is below p times the largest one, at temperature 1.

    Nguyen et al. 2024, "Turning up the heat: min-p sampling for creative and coherent LLM
    outputs". Compared as logits, so nothing is exponentiated: ``l - max >= log(p)``.

    Args:
        candidates: In any order.
        p: float32 ``[B]``; 0 or less turns the step off, 1 or more keeps the largest alone (and
            those equal to it).

    Returns:
        The candidates left.
    """
    relative = candidates.logits - candidates.top
    least = jnp.log(jnp.clip(p, 0.0, 1.0))[:, None]  # -inf where off
    left = candidates.keep(relative >= least, closes=relative[:, -1] < least[:, 0])
    # An unknown number of tokens beyond survives: what later steps need, their mass, is lost.
    return dataclasses.replace(left, decided=left.decided & (left.complete | (p <= 0)))
