"""The logit lens: what the model would say if it ended after a layer.

The layer's residual is given to the output norm and the output map, as the last layer's is
(nostalgebraist, "interpreting GPT: the logit lens", 2020).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import head
from minfer_jax.model.params import Params

_ROWS = 64  # whose logits are held at once


def logit_lens(
    residuals: Float[Array, "L T D"], params: Params, cfg: ModelConfig
) -> tuple[Int[Array, "L T"], Float[Array, "L T"]]:
    """The likeliest token after each layer, and its probability.

    Args:
        residuals: of each layer; of all layers that are wanted.
        params: weights.
        cfg: static.

    Returns:
        (int32 ids, float32 probabilities).
    """
    n_layer, t, d = residuals.shape
    rows = residuals.reshape(-1, d)
    rows = jnp.pad(rows, ((0, -len(rows) % _ROWS), (0, 0))).reshape(-1, _ROWS, d)

    def of(x: Float[Array, "R D"]) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
        logits = head(x[None], params, cfg)[0]
        found = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return found, jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))

    ids, probabilities = lax.map(of, rows)
    return tuple(a.reshape(-1)[: n_layer * t].reshape(n_layer, t) for a in (ids, probabilities))
