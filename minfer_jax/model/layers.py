"""Small pure layers."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from minfer_jax.model.params import Linear
from minfer_jax.model.tap import Values
from minfer_jax.quant.matmul import Arithmetic, qmatmul
from minfer_jax.quant.prologue import Norm, Prologue, applied, trailing


def linear(
    x: Float[Array, "... width"],
    p: Linear,
    arithmetic: Arithmetic,
    prologue: Prologue | None = None,
    *,
    post: Norm | None = None,
    times: float = 1.0,
    plus: Float[Array, "... N"] | None = None,
) -> Float[Array, "... N"]:
    """post(prologue(x) W^T * scale + bias) * times + plus, in float32; arguments as in qmatmul."""
    if p.scale is None and p.bias is None and times == 1.0:
        return qmatmul(x, p.weight, arithmetic, prologue=prologue, post=post, plus=plus)
    y = qmatmul(x, p.weight, arithmetic, prologue=prologue)
    if p.scale is not None:
        y = y * trailing(p.scale, y.ndim)
    if p.bias is not None:
        y = y + trailing(p.bias, y.ndim)
    y = applied(y, post)
    if times != 1.0:
        y = y * jnp.float32(times)
    return y if plus is None else y + plus


def added(
    x: Float[Array, "... width"],
    p: Linear,
    arithmetic: Arithmetic,
    prologue: Prologue | None,
    *,
    post: Norm | None,
    times: float,
    plus: Float[Array, "... N"] | None,
    tap: Values | None,
    names: tuple[str, str],
) -> Float[Array, "... N"]:
    """`linear`; with a tap step by step: the map and `post` of it have these names."""
    if tap is None:
        return linear(x, p, arithmetic, prologue, post=post, times=times, plus=plus)
    y = tap(names[0], linear(x, p, arithmetic, prologue))
    if post is not None:
        y = tap(names[1], applied(y, post))
    if times != 1.0:
        y = y * jnp.float32(times)
    return y if plus is None else y + plus


def side_by_side(
    x: Float[Array, "... K"], maps: tuple[Linear, ...], arithmetic: Arithmetic, norm: Norm | None
) -> Float[Array, "... N"]:
    """The outputs of several maps of one x, which is normed first, concatenated."""
    outputs = [linear(x, p, arithmetic, norm) for p in maps]
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)
