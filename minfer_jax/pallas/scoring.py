"""How a query weighs keys, and which slots it sees: what attention's plain form and kernels share.

Nothing here is a kernel: it is arithmetic on values of any shape, inside a kernel or outside.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# The score of a masked slot: finite, so that a row which sees nothing gives 0 and no NaN.
NEVER = -1e30


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a query weighs keys: what a compiled program depends on.

    Attributes:
        window: positions that a query sees, itself included; 0 for all.
        scale: factor on q . k.
        softcap: c in c * tanh(score / c), of the scaled score; 0 for none (Gemma 2).
        dtype: what the factors of both products are rounded to; scores and sums are float32.
        kernels: one of `quant.kernels.CHOICES`.
    """

    window: int = 0
    scale: float
    softcap: float = 0.0
    dtype: str = "float32"
    kernels: str = "auto"


def seen(qp: Int[Array, "..."], kp: Int[Array, "..."], window: int) -> Bool[Array, "..."]:
    """Whether a query at position qp sees a slot that holds kp; a window of 0 is none."""
    inside = (kp >= 0) & (kp <= qp)
    return inside & (qp - kp < window) if window else inside


def capped(scores: Float[Array, "..."], softcap: float) -> Float[Array, "..."]:
    """Scores with Gemma 2's cap; a cap of 0 is none."""
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def visible_blocks(
    positions: Int[Array, "..."], n_slots: int, block: int, window: int
) -> tuple[Array, Array]:
    """The blocks of slots where queries can see anything, as (first, how many).

    Position p lies in slot p % S: so what queries from the oldest to the newest see, those
    positions and the window before them, is a run of slots that may go round the end of a ring; and
    so do the blocks. S = 8, blocks of 2, window 3, queries at 8 and 9:

        slot       0  1 | 2  3 | 4  5 | 6  7
        position   8  9 | 2  3 | 4  5 | 6  7       first 3, 2 of them: blocks 3 and 0
        seen       x  x                 x  x

    Args:
        positions: of the queries, -1 for padding.
        n_slots: S.
        block: slots of a block; the last one may be shorter.
        window: as of `seen`.

    Returns:
        int32: number i of the blocks is (first + i) modulo ceil(S / block).
    """
    # Constants have a type of their own: Triton's lowering takes that of a bare one from elsewhere.
    zero, n_blocks = jnp.int32(0), jnp.int32(-(-n_slots // block))
    newest = positions.max()
    oldest = jnp.where(positions < 0, newest, positions).min()
    lowest = jnp.maximum(oldest - (window - 1), zero) if window else zero
    everything = newest - lowest >= n_slots - 1
    start, end = (lax.rem(p, jnp.int32(n_slots)) for p in (lowest, newest))
    first, last = (lax.div(slot, jnp.int32(block)) for slot in (start, end))
    # Where a run ends in the block that it began in, but before its start, that block counts once.
    around = jnp.where(start > end, n_blocks, zero)
    count = jnp.where(everything, n_blocks, jnp.minimum(last - first + 1 + around, n_blocks))
    return jnp.where(everything, zero, first), jnp.where(newest < 0, zero, count)
