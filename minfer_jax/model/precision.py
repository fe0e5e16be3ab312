"""What the two names of precision mean on this machine."""

import jax

from minfer_jax import host

PRECISIONS = ("highest", "default")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm, as Linux names them


def dtypes(precision: str) -> tuple[str, str]:
    """(dtype of products, dtype of the KV cache) for a precision.

    "highest" is float32 throughout. "default" is what is fast here: bfloat16 products where the
    processor has instructions for them (float32 is faster where XLA would have to emulate), and a
    float16 cache.

    Raises:
        ValueError: there is no such precision.
    """
    if precision == "highest":
        return "float32", "float32"
    if precision == "default":
        fast = jax.default_backend() != "cpu" or bool(BF16_FLAGS & host.cpu_flags())
        return "bfloat16" if fast else "float32", "float16"
    raise ValueError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
