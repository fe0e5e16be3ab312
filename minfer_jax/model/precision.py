"""What the two names of precision mean on this machine."""

import jax

from minfer_jax import host
from minfer_jax.quant import native
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.quant.matmul import EXACT, Rounding

PRECISIONS = ("highest", "default")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm, as Linux names them


def cache_dtype(cache_type: str | None, precision: str) -> str:
    """The dtype of the KV cache: of a name that a user gives, or what the precision implies.

    Raises:
        ValueError: there is no such cache type.
    """
    if cache_type is None:
        return "float32" if precision == "highest" else "float16"
    if cache_type not in CACHE_TYPES:
        raise ValueError(f"cache_type is {cache_type!r}, expected one of {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES[cache_type]


def rounding(precision: str, *, plain: bool = False) -> Rounding:
    """The rounding of products for a precision.

    "highest" is float32 throughout. "default" is what is fast here: 16-bit activations for a few
    rows, and bfloat16 factors for many where the processor has instructions for them (float32 is
    faster where they would be emulated).

    Args:
        precision: one of PRECISIONS.
        plain: the layers' weights are floats, not quantised. Then the factors of "default" are
            float32 too: whoever takes such a file wants what is in it, and bfloat16 would be a
            hundred times further from it than llama.cpp is.

    Raises:
        ValueError: there is no such precision.
    """
    if precision == "highest":
        return EXACT
    if precision == "default":
        if plain:
            fast = False
        elif jax.default_backend() != "cpu":
            fast = True
        elif native.isa() is not None:
            fast = native.bfloat16()
        else:
            fast = bool(BF16_FLAGS & host.cpu_flags())
        return Rounding(few="int16", many="bfloat16" if fast else "float32")
    raise ValueError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
