"""The kernels by one interface: what each does, refuses and can be tuned in.

Which kernel serves follows from the number of rows or queries, as in the two choosers of the
package. All of it can be traced.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

from minfer_jax.model.attention import Scoring
from minfer_jax.pallas import attention_decode, attention_prefill, matmul, matvec
from minfer_jax.quant.cache import Cache
from minfer_jax.quant.qtensor import QTensor
from scripts.gpu_check.made import Attention, Heads

CUSTOM_CALL = "__gpu$xla.gpu.triton"  # what a Pallas kernel is in a program for CUDA


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A kernel for some arguments.

    Attributes:
        kernel: its file's name.
        case: of these arguments, as the table of block sizes words it.
        default: its Config by the rule of thumb.
    """

    kernel: str
    case: str
    default: Any


def product(
    x: Float[Array, "M K"], w: QTensor, *, dtype: str, config: Any, interpret: bool
) -> Float[Array, "M N"]:
    """x times the transposed weight, in float32; `dtype` is that of the factors of many rows."""
    if len(x) <= matvec.MOST_ROWS:
        return matvec.matvec(x, w, config=config, interpret=interpret)
    return matmul.matmul(x, w, dtype, config=config, interpret=interpret)


def product_refusal(rows: int, w: QTensor, dtype: str) -> str | None:
    """Why there is no kernel for such a product; None if there is."""
    return matvec.supports(w) if rows <= matvec.MOST_ROWS else matmul.supports(w)


def product_kernel(rows: int, w: QTensor, dtype: str) -> Chosen:
    """The kernel that serves such a product."""
    if rows <= matvec.MOST_ROWS:
        return Chosen(kernel="matvec", case=matvec.case(rows, w), default=matvec.default(rows, w))
    return Chosen(
        kernel="matmul",
        case=matmul.case(rows, w, dtype),
        default=matmul.default(rows, w, dtype),
    )


def scoring(heads: Heads, dtype: str, kernels: str = "pallas") -> Scoring:
    """How a model's queries weigh keys."""
    return Scoring(
        window=heads.window,
        scale=heads.h**-0.5,
        softcap=heads.softcap,
        dtype=dtype,
        kernels=kernels,
    )


def attention(
    q: Float[Array, "B T N H"],
    k: Cache,
    v: Cache,
    layer: Array,
    q_positions: Array,
    k_positions: Array,
    sinks: Array | None,
    *,
    scoring: Scoring,
    config: Any,
    interpret: bool,
) -> Float[Array, "B T N Hv"]:
    """What `attend` computes of the same arguments."""
    module = attention_decode if _decodes(q, k, v) else attention_prefill
    positions = q_positions, k_positions
    return module.attention(
        q, k, v, layer, *positions, sinks, scoring, config=config, interpret=interpret
    )


def attention_refusal(given: Attention) -> str | None:
    """Why there is no kernel for such arguments; None if there is."""
    q, k, v = given.q, given.k, given.v
    return None if _decodes(q, k, v) else attention_prefill.supports(q, k, v)


def attention_kernel(given: Attention, scoring: Scoring) -> Chosen:
    """The kernel that serves such arguments."""
    q, k, v, dtype = given.q, given.k, given.v, scoring.dtype
    if _decodes(q, k, v):
        module, default = attention_decode, attention_decode.default(q, k, v, dtype)
    else:
        module, default = attention_prefill, attention_prefill.default(q, k, v, dtype)
    return Chosen(kernel=module.NAME, case=module.case(q, k, v, dtype), default=default)


def _decodes(q: Array, k: Cache, v: Cache) -> bool:
    return attention_decode.supports(q, k, v) is None


def count(traced: jax.stages.Traced) -> int:
    """Kernels in a program, lowered for CUDA."""
    return traced.lower(lowering_platforms=("cuda",)).as_text().count(CUSTOM_CALL)
