"""The product of a mixture of experts: every row with the weight of its own expert.

Only experts that have rows are computed, and their weights stay packed in the stack. In this file R
is rows of x, P rows of the result, K contraction, N outputs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from minfer_jax.quant import native, xla
from minfer_jax.quant.matmul import NATIVE_ROWS, Arithmetic, check_columns, has_kernel
from minfer_jax.quant.native import calls
from minfer_jax.quant.prologue import Gate, applied
from minfer_jax.quant.qtensor import QTensor

# In plain XLA:
FEW = 8  # up to this many rows in all, the packed words are read for each of them
BLOCK = 32  # else rows of an expert that are multiplied at a time, with its unpacked weight


def expert_product(
    x: Float[Array, "R width"],
    w: QTensor,
    experts: Int[Array, " P"],
    arithmetic: Arithmetic,
    *,
    gate: Gate | None = None,
) -> Float[Array, "P N"]:
    """Row p is gate(x[p // (P // R)]) times the transposed weight of expert experts[p], in float32.

    Args:
        x: activations, [R, K]; [R, 2 K] before a gate. R == P, or the P // R experts that a row
            goes to follow each other.
        w: a stack of packed weights [N, K]; `w.layer`, data, is the first expert of the layer (0
            where it is None).
        experts: int32, counted from there; negative for nobody: that row is zeros, and free.
        arithmetic: of the factors, as in qmatmul; few and many are rows of an expert (in plain XLA:
            rows in all).
        gate: done to x first.

    Returns:
        float32 [P, N]. Its derivative with respect to x is that of the same in float32. It takes
        one unpacked weight at a time, but unpacks one for each row.

    Raises:
        ValueError: the shapes do not fit, or the weight is not a stack.
    """
    check_columns(x, w, gate)
    if len(x) == 0 or len(experts) == 0 or len(experts) % len(x):
        raise ValueError(
            f"{len(experts)} rows of experts for {len(x)} rows of x: expected a multiple of these"
        )
    if not w.stacked:
        n, k = w.shape
        raise ValueError(f"the weight [N={n}, K={k}] is a single one, expected a stack of experts")
    if gate is not None and not calls.supports_gate(gate):
        x, gate = applied(x.astype(jnp.float32), gate), None
    first = jnp.uint32(0) if w.layer is None else w.layer
    return _product(x, w.at(first), experts.astype(jnp.int32), gate, arithmetic)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _product(
    x: Float[Array, "R width"],
    w: QTensor,
    experts: Int[Array, " P"],
    gate: Gate | None,
    arithmetic: Arithmetic,
) -> Float[Array, "P N"]:
    if has_kernel(w, arithmetic.kernels):
        return calls.experts(
            x.astype(jnp.float32),
            w,
            experts,
            gate,
            few=NATIVE_ROWS,
            rounded=arithmetic.few == "int16",
            bfloat16=arithmetic.many == "bfloat16" and native.bfloat16(),
        )
    x = applied(x.astype(jnp.float32), gate)
    if len(experts) <= FEW:
        return _by_row(x, w, experts)
    return _by_expert(x, w, experts, jnp.dtype(arithmetic.many))


def _expert(w: QTensor, e: Int[Array, ""]) -> QTensor:
    """The weight of an expert of the layer."""
    assert w.layer is not None
    return w.at(w.layer + e.astype(jnp.uint32))


def _by_row(x: Float[Array, "R K"], w: QTensor, experts: Int[Array, " P"]) -> Float[Array, "P N"]:
    """The packed words of its expert for each row that has one."""
    order = jnp.argsort(experts < 0, stable=True)

    def row(i: Array, out: Float[Array, "P N"]) -> Float[Array, "P N"]:
        p = order[i]
        own = lax.dynamic_slice_in_dim(x, p // (len(experts) // len(x)), 1)
        return lax.dynamic_update_slice_in_dim(out, xla.matvec(own, _expert(w, experts[p])), p, 0)

    out = jnp.zeros((len(experts), w.shape[0]), jnp.float32)
    return lax.fori_loop(0, jnp.sum(experts >= 0, dtype=jnp.int32), row, out)


def _by_expert(
    x: Float[Array, "R K"], w: QTensor, experts: Int[Array, " P"], dtype: jnp.dtype
) -> Float[Array, "P N"]:
    """The unpacked weight of each expert that has rows, for blocks of them."""
    order, first, count = runs(experts)
    x_sorted = jnp.pad(x[order // (len(experts) // len(x))], ((0, BLOCK), (0, 0))).astype(dtype)

    def run(r: Array, out: Float[Array, "P+BLOCK N"]) -> Float[Array, "P+BLOCK N"]:
        weight = xla.dequantize(_expert(w, experts[order[first[r]]]), dtype)

        def rows(b: Array, out: Array) -> Array:
            at = first[r] + b * BLOCK
            y = xla.dot(lax.dynamic_slice_in_dim(x_sorted, at, BLOCK), weight)
            # Rows beyond the run are of other experts: their own runs come later, and overwrite.
            return lax.dynamic_update_slice_in_dim(out, y, at, axis=0)

        return lax.fori_loop(0, -((first[r] - first[r + 1]) // BLOCK), rows, out)

    out = jnp.zeros((len(experts) + BLOCK, w.shape[0]), jnp.float32)
    out = lax.fori_loop(0, count, run, out)
    return _or_zero(experts >= 0, out[jnp.argsort(order)])


def runs(
    experts: Int[Array, " P"],
) -> tuple[Int[Array, " P"], Int[Array, " P+1"], Int[Array, ""]]:
    """Rows by expert: the loops over experts and their rows take as many turns as there are runs.

    Args:
        experts: int32, negative for nobody.

    Returns:
        (order, first, count): row numbers sorted by expert, those of nobody last; where in them the
        run of each expert that has rows begins, and the last one ends; the number of such experts.
    """
    p = len(experts)
    nobody = jnp.iinfo(jnp.int32).max
    keys = jnp.where(experts < 0, nobody, experts)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    keys = keys[order]
    begins = jnp.concatenate([jnp.ones(1, jnp.bool), keys[1:] != keys[:-1]]) & (keys != nobody)
    owned = jnp.sum(keys != nobody, dtype=jnp.int32)
    (first,) = jnp.nonzero(begins, size=p + 1, fill_value=owned)
    return order, first.astype(jnp.int32), jnp.sum(begins, dtype=jnp.int32)


def _or_zero(keep: Bool[Array, " P"], rows: Float[Array, "P N"]) -> Float[Array, "P N"]:
    return jnp.where(keep[:, None], rows, jnp.float32(0))


@_product.defjvp
def _product_jvp(arithmetic: Arithmetic, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Row by row: a loop of a length that depends on data has no derivative in reverse."""

    def plain(x: Array, w: QTensor, experts: Array, gate: Gate | None) -> Float[Array, "P N"]:
        x = applied(x.astype(jnp.float32), gate)
        x = jnp.repeat(x, len(experts) // len(x), axis=0)

        @jax.checkpoint  # or reverse mode would keep every row's unpacked weight
        def row(of: tuple[Array, Array]) -> Float[Array, " N"]:
            weight = xla.dequantize(_expert(w, jnp.maximum(of[1], 0)), jnp.dtype(jnp.float32))
            return xla.dot(of[0][None], weight)[0]

        return _or_zero(experts >= 0, lax.map(row, (x, experts)))

    return _product(*primals, arithmetic), jax.jvp(plain, primals, tangents)[1]
