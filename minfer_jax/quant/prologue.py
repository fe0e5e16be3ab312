"""What precedes a product with a weight, so that a kernel can do it on the way in."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019).

    `weight` is float32 [K], or a stack of such rows of which `layer` says which one is meant.
    """

    weight: Array
    layer: Array | None = None
    eps: float = field(metadata={"static": True})

    def own(self) -> Float[Array, " K"]:
        """The weight itself."""
        if self.layer is None:
            return self.weight
        return jax.lax.dynamic_index_in_dim(self.weight, self.layer, axis=0, keepdims=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gate:
    """act(a) * b of x = a | b, [2 K] to [K] (Shazeer 2020); `activation` is one of ACTIVATIONS."""

    activation: str = field(metadata={"static": True})


Prologue = RmsNorm | Gate


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """See RmsNorm; in float32."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * jnp.expand_dims(weight, tuple(range(x.ndim - 1)))


def applied(x: Float[Array, "... width"], prologue: Prologue | None) -> Float[Array, "... K"]:
    """What the product is taken of."""
    if isinstance(prologue, RmsNorm):
        return rms_norm(x, prologue.own(), prologue.eps)
    if isinstance(prologue, Gate):
        a, b = jnp.split(x, 2, axis=-1)
        return ACTIVATIONS[prologue.activation](a) * b
    return x
