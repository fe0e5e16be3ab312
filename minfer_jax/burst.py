"""Several tokens a call: the loop that the forms of decode share.

What a call costs the host, up to a tenth of a small model's token, is paid once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.kv_state import KVState
from minfer_jax.model.params import Params

BURST = 16  # tokens of a row that one call draws at most
STOPS = 32  # tokens that end it


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Burst:
    """How far one call of `decode` goes.

    Attributes:
        steps: int32 [], tokens to draw, 1 to BURST.
        stop_ids: int32 [STOPS], tokens that end it; -1 where there are fewer.
    """

    steps: Int[Array, ""]
    stop_ids: Int[Array, " STOPS"]


def burst(steps: int, stop_ids: frozenset[int] = frozenset()) -> Burst:
    """A Burst with those of the stop ids that fit; of others note is to be taken on reading."""
    known = np.full(STOPS, -1, np.int32)
    real = sorted(i for i in stop_ids if 0 <= i < 2**31 - 1)
    some = real[: STOPS - 1]  # a -1 stays: the token of logits that are not finite
    known[: len(some)] = some
    return Burst(steps=np.int32(steps), stop_ids=known)  # pyright: ignore


def drawing(
    params: Params,
    token_ids: Int[Array, "B 1"],
    positions: Int[Array, "B 1"],
    kv_state: KVState,
    burst: Burst,
    draw: Callable[[Array, Array, Any], tuple[Array, Any]],
    kept: Any,
    *,
    cfg: ModelConfig,
) -> tuple[KVState, Int[Array, "B BURST"], Int[Array, "B 1"], Any]:
    """What the forms of decode have in common: the loop over the tokens of a call.

    A row at position -1 is idle, and so is one whose last token stops: it is run at position -1,
    where it is written nowhere, and gives -1. The loop ends when all rows are idle.

    Args:
        params, token_ids, positions, kv_state, burst, cfg: as for `decode`.
        draw: takes logits [B, V], the step, from 0, and what is kept; gives tokens [B] and that.
        kept: arrays that go from step to step.

    Returns:
        (KV state, the tokens drawn with -1 after them, the last of each row, what is kept).
    """

    def idle(last: Array) -> Array:
        stopped = jnp.any(last[:, :, None] == burst.stop_ids[None, None, :], axis=2)
        return (positions < 0) | stopped  # B 1

    def goes_on(carry: tuple) -> Array:
        step, last = carry[0], carry[1]
        return (step < burst.steps) & ~jnp.all(idle(last))

    def one(carry: tuple) -> tuple:
        step, last, tokens, kv_state, kept = carry
        # Tied to the step, or plain XLA would unpack the output layer once for all, to floats.
        last, weights = lax.optimization_barrier((last, params))
        off = idle(last)
        ids, at = jnp.maximum(last, 0), jnp.where(off, -1, positions + step)
        logits, kv_state = forward(weights, ids, at, kv_state, cfg=cfg)
        token, kept = draw(logits[:, 0], step, kept)
        token = jnp.where(off, -1, token[:, None])
        tokens = lax.dynamic_update_slice(tokens, token, (jnp.int32(0), step))
        return step + 1, jnp.where(off, last, token), tokens, kv_state, kept

    tokens = jnp.full((token_ids.shape[0], BURST), -1, jnp.int32)
    carry = (jnp.int32(0), token_ids, tokens, kv_state, kept)
    _, last, tokens, kv_state, kept = lax.while_loop(goes_on, one, carry)
    return kv_state, tokens, last, kept
