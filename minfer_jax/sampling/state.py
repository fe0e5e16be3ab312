"""What the sampler remembers between tokens."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from minfer_jax.sampling.args import WINDOW
from minfer_jax.sampling.params import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """The sampler's memory, one row a sequence.

    Rows of several states may be joined along the first axis: a row's draws depend on nothing
    but the row.

    Attributes:
        recent: int32 ``[B, W]``, the latest tokens, the newest last; -1 where there is none.
        key: uint32 ``[B, 2]``, threefry key data: the seed's high and low halves.
        step: int32 ``[B]``, tokens drawn so far; folded into the key for each draw.
        mu: float32 ``[B]``, mirostat's bound on the surprise of the next token, in bits.
    """

    recent: jax.Array
    key: jax.Array
    step: jax.Array
    mu: jax.Array


def init_state(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    n_drawn: int = 0,
    *,
    window: int = WINDOW,
    mu: float | None = None,
) -> SamplerState:
    """The state before the first draw, its window filled with the prompt's tail.

    Made on the host and copied over, so that this compiles nothing.

    Args:
        params: Gives the seed.
        prompt_ids: The prompt's tokens; ids outside the vocabulary do no harm.
        n_drawn: How many were drawn already, where a run goes on; then they are the tail of
            `prompt_ids`.
        window: How many of the latest tokens to hold, W: WINDOW for `sample`, WINDOW_EXTENDED for
            `sample_extended`.
        mu: Mirostat's bound, where a run goes on; None for what a run begins with.

    Returns:
        A state of one row.
    """
    recent = np.full((1, window), -1, np.int32)
    tail = np.asarray(prompt_ids[-window:], np.int32)
    recent[0, window - tail.size :] = tail
    high, low = divmod(int(params.seed), 2**32)
    arrays = {
        "recent": recent,
        "key": np.array([[high, low]], np.uint32),
        "step": np.full((1,), n_drawn, np.int32),
        "mu": np.full((1,), 2 * params.mirostat_tau if mu is None else mu, np.float32),
    }
    return SamplerState(**jax.device_put(arrays))


def advance(state: SamplerState, tokens: jax.Array) -> SamplerState:
    """Takes note of one drawn token a row.

    Args:
        state: The state before the draw.
        tokens: int32 ``[B]``.

    Returns:
        The state with the tokens at the window's end, the oldest dropped, one step further on.
    """
    recent = jnp.concatenate([state.recent[:, 1:], tokens[:, None]], axis=1)
    return dataclasses.replace(state, recent=recent, step=state.step + 1)
