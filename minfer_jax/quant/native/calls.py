"""The kernels as jnp functions; `quant/xla.py` and `model/attention.py` say what each computes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from minfer_jax.quant.prologue import Gate, Prologue, RmsNorm
from minfer_jax.quant.qtensor import QTensor


def supports(w: QTensor) -> bool:
    """Whether there is a kernel for a weight: all packed formats, and plain floats of common K."""
    return w.shape[1] % 32 == 0


# The numbers that ffi.cpp knows prologues by; 0 for none, 1 for RmsNorm.
_GATES = {"silu": 2, "gelu": 3}


def matvec(
    x: Float[Array, "M width"],
    w: QTensor,
    prologue: Prologue | None = None,
    plus: Float[Array, "M N"] | None = None,
    *,
    rounded: bool = False,
) -> Float[Array, "M N"]:
    """prologue(x) times the weight, and `plus`: for a few rows of x, the weight is read once.

    Args:
        x: float32.
        w: a weight that `supports` accepts.
        prologue: done to x first.
        plus: added to the result.
        rounded: round what the product is taken of to 16 bits, one scale for 32 columns.
    """
    before = [] if plus is None else [plus]
    kind, eps = 0, 0.0
    if isinstance(prologue, RmsNorm):
        kind, eps = 1, prologue.eps
        before.append(prologue.weight)
    elif isinstance(prologue, Gate):
        kind = _GATES[prologue.activation]
    return _call("minfer_matvec", (x.shape[0], w.shape[0]))(
        x,
        *_planes(w, before),
        **_format(w),
        plus=plus is not None,
        prologue=np.int32(kind),
        eps=np.float32(eps),
        rounded=rounded,
    )


def matmul(x: Float[Array, "M K"], w: QTensor) -> Float[Array, "M N"]:
    """x times the weight, for many rows of x: the weight is unpacked once.

    Args:
        x: float32, or bfloat16 for a product in bfloat16, summed in float32.
        w: a weight that `supports` accepts.
    """
    return _call("minfer_matmul", (x.shape[0], w.shape[0]))(x, *_planes(w, []), **_format(w))


def _call(target: str, shape: tuple[int, ...]) -> Callable[..., Array]:
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")


def _planes(w: QTensor, before: list[Array]) -> list[Array]:
    """The layer, then what comes before the planes, then the planes, as ffi.cpp reads them."""
    layer = jnp.int32(0) if w.layer is None else w.layer
    planes = [p for p in (w.scale, w.sub, w.low, w.sublow, w.dense) if p is not None]
    return [layer, *before, *w.bits, *planes]


def _format(w: QTensor) -> dict[str, object]:
    fmt = w.fmt
    widths = (*fmt.widths, 0, 0)
    return {
        "k": np.int64(w.shape[1]),
        "width0": np.int32(widths[0]),
        "width1": np.int32(widths[1]),
        "group": np.int32(fmt.group),
        "super_block": np.int32(fmt.super_block),
        "zero": np.int32(fmt.zero),
        "fine": w.sub is not None,
        "low": w.low is not None,
    }


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
    return _call("minfer_attention", q.shape)(
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
