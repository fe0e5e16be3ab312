"""The draw: one token a row, with the probabilities of a softmax."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minfer_jax.sampling.candidates import Candidates
from minfer_jax.sampling.state import SamplerState


def draw(candidates: Candidates, key: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Draws by the Gumbel-max trick: the largest of logit plus noise (Gumbel 1954).

    The noise belongs to the token, not to its place among the candidates, so that the same token
    is drawn however many candidates were looked at.

    Args:
        candidates: In any order, scaled by the temperature.
        key: Of this draw, from `draw_key`.

    Returns:
        int32 ``[B]``; -1 where no token is left to draw.
    """
    bits, _ = fold_in(key, candidates.ids)
    score, place = lax.top_k(candidates.logits + gumbel(bits), 1)
    token = jnp.take_along_axis(candidates.ids, place, axis=1)
    return jnp.where(score > -jnp.inf, token, -1)[:, 0]


def draw_key(state: SamplerState) -> tuple[jax.Array, jax.Array]:
    """The key of the coming draw, of seed and step: two uint32 words, each ``[B, 1]``."""
    return fold_in((state.key[:, :1], state.key[:, 1:]), state.step[:, None])


def fold_in(key: tuple[jax.Array, jax.Array], data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), the words of `jax.random.fold_in`.

    Written out, because XLA's CPU form is a loop over arrays: it takes four times as long over a
    vocabulary, and three times as long to compile.

    Args:
        key: Two uint32 words, ``[B, 1]`` each.
        data: int32 ``[B, n]``.

    Returns:
        Two uint32 words, ``[B, n]`` each.
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x = jnp.broadcast_to(words[0], data.shape)
    y = words[1] + data.astype(jnp.uint32)
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = x + y
            y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
        x = x + words[(block + 1) % 3]
        y = y + words[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


def gumbel(bits: jax.Array) -> jax.Array:
    """Turns random bits into Gumbel noise.

    All 32 bits become a float in (0, 1). Small ones keep every bit, and through log1p it is these
    that make the large noise: an unlikely token is drawn as seldom as it should be, to 2**-32.

    Args:
        bits: uint32, any shape.

    Returns:
        float32 of the same shape, from -2.8 to 22.9.
    """
    return -jnp.log(-jnp.log1p(-uniform(bits)))


def uniform(bits: jax.Array) -> jax.Array:
    """Turns random bits into floats in (0, 1): float32 of the same shape, of uint32."""
    return jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
