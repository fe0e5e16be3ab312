"""The quantised product: checks its arguments and chooses an implementation."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from minfer_jax.quant import native, xla
from minfer_jax.quant.native import calls
from minfer_jax.quant.qtensor import QTensor

# Up to this many rows of x, reading packed words beats unpacking the weight first.
MATVEC_ROWS = 4  # in plain XLA
NATIVE_ROWS = 16


@dataclass(frozen=True)
class Rounding:
    """What a product may round its factors to; sums are float32.

    Attributes:
        few: x, where it has few rows: "float32", or "int16" where the kernels offer it (one scale
            for 32 columns; plain XLA stays with float32).
        many: both factors, where x has many rows: "float32" or "bfloat16".
    """

    few: str = "float32"
    many: str = "float32"


EXACT = Rounding()


def qmatmul(x: Float[Array, "... K"], w: QTensor, rounding: Rounding) -> Float[Array, "... N"]:
    """x times the transposed weight, accumulated and returned in float32.

    Args:
        x: activations, [..., K].
        w: packed weight, [N, K].
        rounding: of the factors; EXACT for float32 throughout.

    Returns:
        float32 [..., N]. Its derivative with respect to x is that of the product in float32.

    Raises:
        ValueError: the last axis of x is not K.
    """
    n, k = w.shape
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns, but the weight [N={n}, K={k}] needs {k}")
    out = _product(x.reshape(-1, k), w, rounding)
    return out.reshape(*x.shape[:-1], n)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(x: Float[Array, "M K"], w: QTensor, rounding: Rounding) -> Float[Array, "M N"]:
    many = jnp.dtype(rounding.many)
    if native.isa() is not None and calls.supports(w):
        if len(x) <= NATIVE_ROWS:
            rounded = rounding.few == "int16"
            return calls.product(x.astype(jnp.float32), w, few=True, rounded=rounded)
        if many == jnp.float32 or native.bfloat16():
            return calls.product(x.astype(many), w, few=False)
    if len(x) <= MATVEC_ROWS:
        return xla.matvec(x, w)
    return lax.dot(
        x.astype(many),
        xla.dequantize(w, many),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@_product.defjvp
def _product_jvp(rounding: Rounding, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """A kernel has no derivative, and that of `matvec`'s terms would take minutes to compile."""

    def plain(x: Array, w: QTensor) -> Array:
        weight = xla.dequantize(w, jnp.dtype(jnp.float32))
        return lax.dot(x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST)

    return _product(*primals, rounding), jax.jvp(plain, primals, tangents)[1]
