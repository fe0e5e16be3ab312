"""Small pure layers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from minfer_jax.model.params import Linear, Lora, Steering
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
    """post(prologue(x) W^T * scale + lora + bias) * times + plus, in float32.

    Arguments as in qmatmul; `times` is a factor.
    """
    if p.scale is None and p.bias is None and p.lora is None and times == 1.0:
        return qmatmul(x, p.weight, arithmetic, prologue=prologue, post=post, plus=plus)
    y = qmatmul(x, p.weight, arithmetic, prologue=prologue)
    if p.scale is not None:
        y = y * trailing(p.scale, y.ndim)
    if p.lora is not None:
        y = y + adapted(_times(applied(x.astype(jnp.float32), prologue), p.lora.a), p.lora)
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


def adapted(ax: Float[Array, "... R"], p: Lora) -> Float[Array, "... N"]:
    """B (scale * A x), of A x."""
    return _times(ax * trailing(p.scale, ax.ndim), p.b)


def adapted_rows(token_ids: Int[Array, "B T"], p: Lora) -> Float[Array, "B T D"]:
    """What adapters add to the embeddings of tokens: A is looked up, where x would be one-hot."""
    return adapted(p.a[token_ids], p)


def steered(x: Float[Array, "B T D"], p: Steering | None) -> Float[Array, "B T D"]:
    """The residual after a block, and what control vectors add to it."""
    if p is None:
        return x
    return x + trailing(jnp.sum(p.directions * p.scale[:, None], axis=0), x.ndim)


def _times(x: Float[Array, "... K"], w: Float[Array, "N K"]) -> Float[Array, "... N"]:
    """x W^T in float32."""
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
