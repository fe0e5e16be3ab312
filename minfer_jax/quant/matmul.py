"""The quantised product: checks its arguments and chooses an implementation."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from minfer_jax.quant import xla
from minfer_jax.quant.qtensor import QTensor

# Up to this many rows of x, reading packed words beats dequantising the weight first.
MATVEC_ROWS = 4


def qmatmul(x: Float[Array, "... K"], w: QTensor, dtype: jnp.dtype) -> Float[Array, "... N"]:
    """x times the transposed weight, accumulated and returned in float32.

    Args:
        x: activations, [..., K].
        w: packed weight, [N, K].
        dtype: what both factors are rounded to where the weight is dequantised first (many rows of
            x); float32 for exact products. A few rows are always multiplied in float32.

    Returns:
        float32 [..., N].

    Raises:
        ValueError: the last axis of x is not K.
    """
    n, k = w.shape
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns, but the weight [N={n}, K={k}] needs {k}")
    flat = x.reshape(-1, k)
    if flat.shape[0] <= MATVEC_ROWS:
        out = xla.matvec(flat, w)
    else:
        out = lax.dot(
            flat.astype(dtype),
            xla.dequantize(w, dtype),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    return out.reshape(*x.shape[:-1], n)
