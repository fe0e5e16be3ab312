"""The kernels as jnp functions; `quant/xla.py` and `model/attention.py` say what each computes."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from minfer_jax.quant.qtensor import QTensor


def supports(w: QTensor) -> bool:
    """Whether there is a kernel for a weight: all packed formats, and plain floats of common K."""
    return w.shape[1] % 32 == 0


def product(
    x: Float[Array, "M K"], w: QTensor, *, few: bool, rounded: bool = False
) -> Float[Array, "M N"]:
    """x times the weight.

    Args:
        x: float32; or bfloat16 for a product of many rows in bfloat16, summed in float32.
        w: a weight that `supports` accepts.
        few: read the weight once, for up to 16 rows; else unpack it once, for many.
        rounded: with `few`, round x to 16 bits, one scale for 32 columns.
    """
    fmt = w.fmt
    planes = [*w.bits, *(p for p in (w.scale, w.sub, w.low, w.sublow, w.dense) if p is not None)]
    widths = (*fmt.widths, 0, 0)
    call = jax.ffi.ffi_call(
        "minfer_product",
        jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32),
        vmap_method="sequential",
    )
    return call(
        x,
        jnp.int32(0) if w.layer is None else w.layer,
        *planes,
        k=np.int64(w.shape[1]),
        width0=np.int32(widths[0]),
        width1=np.int32(widths[1]),
        group=np.int32(fmt.group),
        super_block=np.int32(fmt.super_block),
        zero=np.int32(fmt.zero),
        fine=w.sub is not None,
        low=w.low is not None,
        few=few,
        rounded=rounded,
    )


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "L B K S H"],
    v: Float[Array, "L B K S H"],
    layer: Int[Array, ""],
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    *,
    window: int,
    scale: float,
    bfloat16: bool,
) -> Float[Array, "B T N H"]:
    """Causal attention over the slots that hold something; H is a multiple of 32."""
    call = jax.ffi.ffi_call(
        "minfer_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32), vmap_method="sequential"
    )
    return call(
        q,
        k,
        v,
        layer,
        q_positions,
        k_positions,
        window=np.int64(window),
        scale=np.float32(scale),
        bfloat16=bfloat16,
    )
