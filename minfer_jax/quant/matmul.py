"""The quantised product: checks its arguments and chooses an implementation."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from minfer_jax.quant import kernels, native, xla
from minfer_jax.quant.native import calls
from minfer_jax.quant.prologue import Gate, Norm, Prologue, applied
from minfer_jax.quant.qtensor import QTensor

log = logging.getLogger(__name__)

# Up to this many rows of x, reading packed words beats unpacking the weight first.
MATVEC_ROWS = 4  # in plain XLA
NATIVE_ROWS = 16


@dataclass(frozen=True)
class Arithmetic:
    """How products are done: what factors may be rounded to, and by what; sums are float32.

    Attributes:
        few: x, where it has few rows: "float32", or "int16" where the kernels offer it (one scale
            for 32 columns; plain XLA stays with float32).
        many: both factors, where x has many rows: "float32" or "bfloat16".
        kernels: one of `kernels.CHOICES`.
    """

    few: str = "float32"
    many: str = "float32"
    kernels: str = "auto"


EXACT = Arithmetic()

Product = Callable[[Array, QTensor], Array]


def qmatmul(
    x: Float[Array, "... width"],
    w: QTensor,
    arithmetic: Arithmetic,
    *,
    prologue: Prologue | None = None,
    post: Norm | None = None,
    plus: Float[Array, "... N"] | None = None,
) -> Float[Array, "... N"]:
    """post(prologue(x) times the transposed weight) + plus, in float32.

    Args:
        x: activations, [..., K]; [..., 2 K] before a Gate.
        w: packed weight, [N, K].
        arithmetic: of the factors; EXACT for float32 throughout.
        prologue: what is done to x first, in float32.
        post: a norm of the product.
        plus: added last.

    Returns:
        float32 [..., N]. Its derivative is that of the same in float32.

    Raises:
        ValueError: the last axis of x does not fit K.
    """
    check_columns(x, w, prologue)
    n = w.shape[0]
    flat = None if plus is None else plus.reshape(-1, n)
    out = _product(x.reshape(-1, x.shape[-1]), w, prologue, post, flat, arithmetic)
    return out.reshape(*x.shape[:-1], n)


def check_columns(x: Float[Array, "... width"], w: QTensor, prologue: Prologue | None) -> None:
    """ValueError unless the last axis of x fits K; before a gate twice that."""
    n, k = w.shape
    needs = 2 * k if isinstance(prologue, Gate) else k
    if x.shape[-1] != needs:
        raise ValueError(
            f"x has {x.shape[-1]} columns, but the weight [N={n}, K={k}] needs {needs}"
        )


def has_kernel(w: QTensor, choice: str) -> bool:
    """Whether the C++ kernels are in use, and know such a weight."""
    return kernels.use_native(choice) and calls.supports(w)


def few_rows(choice: str) -> int:
    """Up to how many rows are worked on as one row is, which is what is cheap."""
    if kernels.use_pallas(choice):
        from minfer_jax.pallas import matvec  # slow to import, and not needed on a CPU

        return matvec.MOST_ROWS
    return NATIVE_ROWS if kernels.use_native(choice) else MATVEC_ROWS


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def _product(
    x: Float[Array, "M width"],
    w: QTensor,
    prologue: Prologue | None,
    post: Norm | None,
    plus: Float[Array, "M N"] | None,
    arithmetic: Arithmetic,
) -> Float[Array, "M N"]:
    many = jnp.dtype(arithmetic.many)
    few = len(x) <= NATIVE_ROWS
    x = x.astype(jnp.float32)
    if has_kernel(w, arithmetic.kernels) and (few or many == jnp.float32 or native.bfloat16()):
        if not calls.takes(prologue):
            x, prologue = applied(x, prologue), None
        own_post = post is None or calls.takes_post(post, w)  # else it and the sum come after
        out = calls.product(
            x,
            w,
            prologue,
            post if own_post else None,
            plus if own_post else None,
            few=few,
            rounded=few and arithmetic.few == "int16",
            bfloat16=not few and many == jnp.bfloat16,
        )
        return out if own_post else _finished(out, post, plus)
    plain = functools.partial(_plain, dtype=many)
    pallas = _pallas(len(x), w, many) if kernels.use_pallas(arithmetic.kernels) else None
    x = applied(x, prologue)
    out = plain(x, w) if pallas is None else kernels.on_cuda(pallas, plain, x, w)
    return _finished(out, post, plus)


def _plain(x: Float[Array, "M K"], w: QTensor, *, dtype: jnp.dtype) -> Float[Array, "M N"]:
    """In plain XLA; factors of many rows are rounded to `dtype`."""
    if len(x) <= MATVEC_ROWS:
        return xla.matvec(x, w)
    return xla.dot(x.astype(dtype), xla.dequantize(w, dtype))


def _pallas(m: int, w: QTensor, dtype: jnp.dtype) -> Product | None:
    """The Pallas kernel for m rows of x, or None where such a weight has none."""
    from minfer_jax.pallas import matmul, matvec  # slow to import, and not needed on a CPU

    few = m <= matvec.MOST_ROWS
    refused = matvec.supports(w) if few else matmul.supports(w)
    if refused is not None:
        log.debug("no Pallas kernel for a product: %s", refused)
        return None
    return matvec.matvec if few else functools.partial(matmul.matmul, dtype=dtype.name)


def _finished(out: Array, post: Norm | None, plus: Array | None) -> Float[Array, "M N"]:
    out = applied(out, post)
    return out if plus is None else out + plus


@_product.defjvp
def _product_jvp(arithmetic: Arithmetic, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """A kernel has no derivative, and that of `matvec`'s terms would take minutes to compile."""

    @jax.checkpoint  # or reverse mode would keep every unpacked weight
    def plain(
        x: Array,
        w: QTensor,
        prologue: Prologue | None,
        post: Norm | None,
        plus: Array | None,
    ) -> Array:
        weight = xla.dequantize(w, jnp.dtype(jnp.float32))
        x = applied(x.astype(jnp.float32), prologue)
        return _finished(xla.dot(x, weight), post, plus)

    return _product(*primals, arithmetic), jax.jvp(plain, primals, tangents)[1]
