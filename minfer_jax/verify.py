"""The program that checks guesses: several tokens in one call, of which the right ones count."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.params import Params
from minfer_jax.sampling import SamplerArgs, SamplerState, sample


def verify(
    params: Params,
    token_ids: Int[Array, "1 T"],
    positions: Int[Array, "1 T"],
    kv_state: KVState,
    sampler: SamplerState,
    args: SamplerArgs,
    *,
    cfg: ModelConfig,
) -> tuple[KVState, Int[Array, "1 T"]]:
    """Run a token and guesses of those after it at once, and draw for as long as they are right.

    A draw depends on logits, seed, number of draws and latest tokens: what is drawn is what
    `decode` would draw, at any temperature. Rows of wrong guesses stay in the KV state: the next
    call writes over the first of them, and the others are hidden by their position until then.

    Args:
        token_ids: the last token, then up to T - 1 guesses.
        positions: -1 where there are fewer.

    Returns:
        (KV state, the tokens drawn). The last of them is the first that is not as guessed, or the
        one after all guesses; -1 follows.
    """
    n = token_ids.shape[1]
    logits, kv_state = forward(
        params, token_ids, positions, kv_state, cfg=cfg, n_out=n, stepwise=True
    )
    guesses = jnp.where(positions < 0, -1, token_ids)[:, 1:]

    def goes_on(carry: tuple) -> Array:
        row, tokens, _ = carry
        before = jnp.maximum(row - 1, 0)
        drawn, guess = tokens[0, before], guesses[0, jnp.minimum(before, n - 2)]
        return (row == 0) | (row < n) & (drawn == guess) & (guess >= 0)

    def one(carry: tuple) -> tuple:
        row, tokens, sampler = carry
        here = lax.dynamic_index_in_dim(logits, row, axis=1, keepdims=False)
        token, sampler = sample(here, sampler, args)
        tokens = lax.dynamic_update_slice(tokens, token[:, None], (jnp.int32(0), row))
        return row + 1, tokens, sampler

    tokens = jnp.full((1, n), -1, jnp.int32)
    _, tokens, _ = lax.while_loop(goes_on, one, (jnp.int32(0), tokens, sampler))
    return kv_state, tokens
