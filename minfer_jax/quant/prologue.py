"""What precedes a product with a weight, so that a kernel can do it on the way in."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021
}

# gpt-oss (ggml: swiglu_oai): the gate is bounded from above, what it opens from both sides.
_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0


def _swiglu_oai(a: Array, b: Array) -> Array:
    a = jnp.minimum(a, _OAI_LIMIT)
    b = jnp.clip(b, -_OAI_LIMIT, _OAI_LIMIT)
    return a * jax.nn.sigmoid(_OAI_ALPHA * a) * (b + 1.0)


GATES: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda a, b: ACTIVATIONS["silu"](a) * b,
    "gelu": lambda a, b: ACTIVATIONS["gelu"](a) * b,
    "swiglu_oai": _swiglu_oai,
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
        return _own(self.weight, self.layer)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba et al. 2016).

    `weight` is float32 [K] or, for heads that have weights of their own, [heads, K]; or a stack of
    such, like `bias` where there is one. `layer` says which one is meant.
    """

    weight: Array
    bias: Array | None = None
    layer: Array | None = None
    eps: float = field(metadata={"static": True})

    def own(self) -> Float[Array, "... K"]:
        """The weight itself."""
        return _own(self.weight, self.layer)

    def own_bias(self) -> Float[Array, " K"] | None:
        """The bias itself."""
        return None if self.bias is None else _own(self.bias, self.layer)


Norm = RmsNorm | LayerNorm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gate:
    """A gate of x = a | b, [2 K] to [K] (Shazeer 2020); `activation` is one of GATES."""

    activation: str = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Activation:
    """act(x), [K] to [K]; `activation` is one of ACTIVATIONS."""

    activation: str = field(metadata={"static": True})


Prologue = RmsNorm | LayerNorm | Gate | Activation


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """See RmsNorm; in float32."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * trailing(weight, x.ndim)


def layer_norm(
    x: Float[Array, "... D"], weight: Float[Array, "... D"], bias: Array | None, eps: float
) -> Array:
    """See LayerNorm; in float32."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    y = rms_norm(x, weight, eps)
    return y if bias is None else y + trailing(bias, x.ndim)


def applied(x: Float[Array, "... width"], prologue: Prologue | None) -> Float[Array, "... K"]:
    """What the product is taken of."""
    if isinstance(prologue, RmsNorm):
        return rms_norm(x, prologue.own(), prologue.eps)
    if isinstance(prologue, LayerNorm):
        return layer_norm(x, prologue.own(), prologue.own_bias(), prologue.eps)
    if isinstance(prologue, Gate):
        a, b = jnp.split(x, 2, axis=-1)
        return GATES[prologue.activation](a, b)
    if isinstance(prologue, Activation):
        return ACTIVATIONS[prologue.activation](x)
    return x


def _own(stack: Array, layer: Array | None) -> Array:
    if layer is None:
        return stack
    return jax.lax.dynamic_index_in_dim(stack, layer, axis=0, keepdims=False)


def trailing(weight: Array, ndim: int) -> Array:
    """The weight with leading axes of 1, ndim in all: what broadcasts is said, not implied."""
    return jnp.expand_dims(weight, tuple(range(ndim - weight.ndim)))
