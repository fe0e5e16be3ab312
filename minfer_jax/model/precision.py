"""What the two names of precision mean on this machine."""

import dataclasses

import jax

from minfer_jax import host
from minfer_jax.quant import kernels, native
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.quant.matmul import EXACT, Arithmetic

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


def arithmetic(precision: str, *, plain: bool = False, choice: str = "auto") -> Arithmetic:
    """How products are done at a precision.

    "highest" is float32 throughout. "default" is what is fast here: 16-bit activations for a few
    rows, and bfloat16 factors for many where the processor has instructions for them (float32 is
    faster where they would be emulated).

    Args:
        precision: one of PRECISIONS.
        plain: the layers' weights are floats, not quantised. Then the factors of "default" are
            float32 too: whoever takes such a file wants what is in it, and bfloat16 would be a
            hundred times further from it than llama.cpp is.
        choice: one of `kernels.CHOICES`.

    Raises:
        ValueError: there is no such precision or choice.
    """
    if choice not in kernels.CHOICES:
        raise ValueError(f"kernels is {choice!r}, expected one of {', '.join(kernels.CHOICES)}")
    if precision == "highest":
        return dataclasses.replace(EXACT, kernels=choice)
    if precision == "default":
        if plain:
            fast = False
        elif jax.default_backend() != "cpu" or kernels.use_pallas(choice):
            fast = True
        elif kernels.use_native(choice):
            fast = native.bfloat16()
        else:
            fast = bool(BF16_FLAGS & host.cpu_flags())
        many = "bfloat16" if fast else "float32"
        return Arithmetic(few="int16", many=many, kernels=choice)
    raise ValueError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
