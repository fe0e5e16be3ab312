"""Small pure layers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from minfer_jax.model.params import Linear
from minfer_jax.quant.matmul import Rounding, qmatmul

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
}


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang & Sennrich 2019)."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * _last_axis(weight, x.ndim)


def linear(x: Float[Array, "... K"], p: Linear, rounding: Rounding) -> Float[Array, "... N"]:
    """x W^T * scale + bias, in float32; `rounding` as in qmatmul."""
    y = qmatmul(x, p.weight, rounding)
    if p.scale is not None:
        y = y * _last_axis(p.scale, y.ndim)
    return y if p.bias is None else y + _last_axis(p.bias, y.ndim)


def _last_axis(vector: Float[Array, " D"], ndim: int) -> Array:
    """[D] -> [1, ..., D]: what broadcasts is said, not implied."""
    return jnp.expand_dims(vector, tuple(range(ndim - 1)))


def side_by_side(x: Float[Array, "... K"], maps: tuple[Linear, ...], rounding: Rounding) -> Array:
    """The outputs of several maps of one x, concatenated."""
    outputs = [linear(x, p, rounding) for p in maps]
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)


def gated_mlp(
    x: Float[Array, "... D"],
    gate_up: tuple[Linear, ...],
    down: Linear,
    *,
    activation: str,
    rounding: Rounding,
) -> Float[Array, "... D"]:
    """down(act(gate x) * (up x)) (Shazeer 2020)."""
    gate, up = jnp.split(side_by_side(x, gate_up, rounding), 2, axis=-1)
    return linear(ACTIVATIONS[activation](gate) * up, down, rounding)
