"""What the two names of precision mean on this machine."""

import jax

from minfer_jax import host
from minfer_jax.quant import native
from minfer_jax.quant.matmul import EXACT, Rounding

PRECISIONS = ("highest", "default")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm, as Linux names them


def roundings(precision: str) -> tuple[Rounding, str]:
    """(rounding of products, dtype of the KV cache) for a precision.

    "highest" is float32 throughout. "default" is what is fast here: 16-bit activations for a few
    rows, bfloat16 factors for many where the processor has instructions for them (float32 is faster
    where they would be emulated), and a float16 cache.

    Raises:
        ValueError: there is no such precision.
    """
    if precision == "highest":
        return EXACT, "float32"
    if precision == "default":
        if jax.default_backend() != "cpu":
            fast = True
        elif native.isa() is not None:
            fast = native.bfloat16()
        else:
            fast = bool(BF16_FLAGS & host.cpu_flags())
        return Rounding(few="int16", many="bfloat16" if fast else "float32"), "float16"
    raise ValueError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
