"""The router of a mixture of experts: which experts a token goes to, and how much each counts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# How logits become the probabilities that experts are chosen by (llama.cpp:
# llama_expert_gating_func_type).
GATINGS: dict[str, Callable[[Array], Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "softmax_weight": lambda logits: logits,  # chosen by logit: softmax over the chosen ones alone
}

# The least sum that weights are divided by: the smallest normal float16, as in llama.cpp.
_SMALLEST_SUM = 2.0**-14


def route(
    logits: Float[Array, "M E"],
    n_used: int,
    *,
    gating: str,
    normalize: bool,
    scale: float,
    bias: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "M U"], Float[Array, "M U"]]:
    """The experts of each token and their weights (llama.cpp: build_moe_ffn).

    Args:
        logits: the router's output.
        n_used: U, experts of a token.
        gating: one of GATINGS.
        normalize: the weights of a token are divided by their sum.
        scale: times all weights, last.
        bias: added to the probabilities for the choice alone (DeepSeek V3: exp_probs_b).

    Returns:
        (ids, weights): int32 and float32, the most probable first; of equal ones the lowest id.

    Raises:
        ValueError: there is no such gating, or n_used is not between 1 and E.
    """
    n_experts = logits.shape[-1]
    if gating not in GATINGS:
        raise ValueError(f"gating is {gating!r}, expected one of {', '.join(GATINGS)}")
    if not 1 <= n_used <= n_experts:
        raise ValueError(f"{n_used} of {n_experts} experts used, expected 1 to {n_experts}")
    probabilities = GATINGS[gating](logits.astype(jnp.float32))
    chosen_by = probabilities if bias is None else probabilities + bias[None]
    _, ids = lax.top_k(chosen_by, n_used)
    weights = jnp.take_along_axis(probabilities, ids, axis=-1)
    if gating == "softmax_weight":
        weights = jax.nn.softmax(weights)
    if normalize:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.maximum(total, jnp.float32(_SMALLEST_SUM))
    return ids, weights * jnp.float32(scale)
